"""What else is installed changes nothing: kernel packages that raise when used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

STUBS = {
    "fla": {
        "fla/__init__.py": "def _no(*a, **k): raise RuntimeError('fla was used')\nchunk_gated_delta_rule = fused_recurrent_gated_delta_rule = _no\n",
        "fla/ops/__init__.py": "",
        "fla/ops/gated_delta_rule/__init__.py": "from fla import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule\n",
    },
    "causal_conv1d": {
        "causal_conv1d/__init__.py": "def _no(*a, **k): raise RuntimeError('causal_conv1d was used')\ncausal_conv1d_fn = causal_conv1d_update = _no\n",
    },
}
SCRIPT = """
import warnings; warnings.simplefilter("error")
import statetap
warnings.simplefilter("default")
import sys, torch
model = statetap.StandardizedTransformer(sys.argv[1], device="cpu")
mix, states = model.layers[0].linear_attn, []
with model.generate("The Eiffel Tower", max_new_tokens=3, do_sample=False) as tracer:
    for step in tracer.iter[:3]:
        states.append(mix.states.save())
        last = model.logits.save()
assert [s.shape[1] for s in states] == [16, 1, 1], states
torch.save(last, sys.argv[2])
"""


def stub(folder: Path, names):
    for name in names:
        for file, content in STUBS[name].items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(content)


def run(folder, checkpoint, names):
    stub(folder, names)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", SCRIPT, str(checkpoint), str(folder / "logits.pt")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return torch.load(folder / "logits.pt")


@pytest.mark.parametrize("names", [("fla",), ("fla", "causal_conv1d")], ids=" and ".join)
def test_packages_that_raise_when_used(tmp_path, checkpoints, names):
    path = checkpoints()
    for folder in ("with", "without"):
        (tmp_path / folder).mkdir()
    got = run(tmp_path / "with", path, names)
    assert got.equal(run(tmp_path / "without", path, ()))


BAD_LOADS = [
    (("/nowhere/at/all",), {}, "Error", "model: cannot load '/nowhere/at/all'"),
    (("CHECKPOINT",), dict(backend="quick"), "ArgumentError", "backend: 'quick'"),
    (("CHECKPOINT",), dict(family="gpt2"), "UnsupportedFamily", "'gpt2'.*qwen3_5_text"),
    (("CHECKPOINT",), dict(device="gpu0"), "ArgumentError", "device"),
    ((torch.nn.Linear(2, 2),), {}, "UnsupportedFamily", "Linear"),
    ((3,), {}, "ArgumentError", "model"),
]


@pytest.mark.parametrize("args,kwargs,kind,message", BAD_LOADS)
def test_bad_loads_give_one_sentence(checkpoints, args, kwargs, kind, message):
    import statetap

    args = tuple(str(checkpoints()) if a == "CHECKPOINT" else a for a in args)
    with pytest.raises(getattr(statetap, kind), match=message) as caught:
        statetap.StandardizedTransformer(*args, **kwargs)
    assert "\n" not in str(caught.value)


def test_loading_an_old_family_name_by_hand(checkpoints):
    import statetap

    model = statetap.StandardizedTransformer(str(checkpoints()), device="cpu", family=statetap.families.qwen3_5_text)
    assert model.family is statetap.families.qwen3_5_text


def test_two_wrappers_of_one_module(checkpoints):
    """Both serve their own traces; nothing is counted or served twice."""
    import transformers

    import statetap
    import tiny

    module = transformers.AutoModelForCausalLM.from_pretrained(checkpoints())
    models = [statetap.StandardizedTransformer(module, tokenizer=tiny.tokenizer()) for _ in range(2)]
    found = []
    for model in models:
        with model.trace("abc"):
            found.append(model.layers[0].linear_attn.states.save())
    assert found[0].equal(found[1])


def test_a_model_that_is_dropped_is_freed(checkpoints):
    import gc
    import weakref

    import statetap

    def use():  # in a frame of its own: nnsight's look at a frame keeps its locals
        model = statetap.StandardizedTransformer(str(checkpoints()), device="cpu")
        with model.trace("abc"):
            model.layers[0].linear_attn.states.save()
        return weakref.ref(model._module), weakref.ref(model)

    gone = use()
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_scan_follows_shapes(checkpoints):
    import statetap

    model, shapes = statetap.StandardizedTransformer(str(checkpoints()), device="cpu"), []
    with model.scan("abcdef"):
        shapes.append(tuple(model.layers[0].linear_attn.state_output.shape))
        shapes.append(tuple(model.layers[0].linear_attn.states.shape))
        shapes.append(tuple(model.layers[0].linear_attn.state_norms.shape))
        shapes.append(tuple(model.logits.shape))
    assert shapes == [(1, 4, 16, 24), (1, 6, 4, 16, 24), (1, 6, 4), (1, 6, 258)]
