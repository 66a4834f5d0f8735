"""Shared by every test: seeds, poisoned memory, checkpoints written once a session."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
import torch
from hypothesis import HealthCheck, settings

import tiny

settings.register_profile(
    "statetap",
    deadline=None,
    max_examples=20,
    derandomize=bool(os.environ.get("CI")),  # the same examples every time there; new ones everywhere else
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("statetap")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def one_thread():
    """The models are tiny: a second thread costs them more than it helps."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def poisoned():
    """Memory that is not initialised holds nan, so that a result which was never written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """`checkpoints(model_type, **overrides)`: a folder with a tiny random checkpoint, written once a session."""
    written = {}

    def get(model_type="qwen3_5_text", **overrides):
        key = model_type, tuple(sorted((k, str(v)) for k, v in overrides.items()))
        if key not in written:
            written[key] = tiny.checkpoint(tmp_path_factory.mktemp(model_type), model_type, **overrides)
        return written[key]

    return get


@pytest.fixture(scope="session")
def models(checkpoints):
    """`models(model_type, **options)`: a `StandardizedTransformer` of a tiny checkpoint, loaded once a session."""
    from statetap import StandardizedTransformer

    loaded = {}

    def get(model_type="qwen3_5_text", **options):
        key = model_type, tuple(sorted(options.items(), key=str))
        if key not in loaded:
            loaded[key] = StandardizedTransformer(str(checkpoints(model_type)), device="cpu", **options)
        return loaded[key]

    return get


@pytest.fixture(scope="session")
def plain(checkpoints):
    """`plain(model_type)`: the same checkpoint as a plain transformers model."""
    import transformers

    from statetap import families

    loaded = {}

    def get(model_type="qwen3_5_text"):
        if model_type not in loaded:
            path = checkpoints(model_type)
            auto = families.auto_class(transformers.AutoConfig.from_pretrained(path))
            loaded[model_type] = auto.from_pretrained(path).eval()
        return loaded[model_type]

    return get
