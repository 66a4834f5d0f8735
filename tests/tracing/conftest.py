"""Models, loaded once a session, and what several files compare with."""

from __future__ import annotations

import pytest
import transformers

from statetap import StandardizedTransformer, Taps, ops

FAMILIES = ["qwen3_5_text", "qwen3_next", "qwen3_5_moe_text", "olmo_hybrid"]
PROMPT = "The Eiffel Tower is in the city of"


@pytest.fixture(scope="session")
def models(checkpoints):
    loaded = {}

    def get(model_type="qwen3_5_text", **kw):
        key = model_type, tuple(sorted(kw.items(), key=str))
        if key not in loaded:
            loaded[key] = StandardizedTransformer(str(checkpoints(model_type)), device="cpu", **kw)
        return loaded[key]

    return get


@pytest.fixture(params=FAMILIES)
def model(request, models):
    return models(request.param)


@pytest.fixture
def qwen(models):
    return models("qwen3_5_text")


@pytest.fixture(scope="session")
def plain(checkpoints):
    """A plain transformers model of the same checkpoint."""
    loaded = {}

    def get(model_type="qwen3_5_text"):
        if model_type not in loaded:
            loaded[model_type] = transformers.AutoModelForCausalLM.from_pretrained(checkpoints(model_type)).eval()
        return loaded[model_type]

    return get


def rule(q, k, v, g, beta, state=None):
    """The fp64 recurrence over served values: outputs, final state, states."""
    a = [x.double() for x in (q, k, v, g, beta)]
    out = ops.gated_delta_rule(
        *a,
        initial_state=None if state is None else state.double(),
        use_qk_l2norm_in_kernel=True,
        taps=Taps(states="all"),
        backend="reference",
    )
    return out.outputs, out.final_state, out.states


def near(x, y, rtol=1e-4):
    """Equal to rtol of the largest value."""
    assert x.shape == y.shape, (x.shape, y.shape)
    assert (x.double() - y.double()).abs().max() <= rtol * y.abs().max() + 1e-7, (x.double() - y.double()).abs().max()


@pytest.fixture(scope="session")
def helpers():
    return rule, near
