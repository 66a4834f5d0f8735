"""Instrumentation belongs to a model: other models of its class stay bit for bit what they were."""

from __future__ import annotations

import gc
import subprocess
import sys
import types

import pytest
import torch
import transformers

import statetap
import tiny
from statetap import families, ops
from statetap.mixers import MixerCall, MixerSpec, binding, instrument, is_instrumented
from statetap.mixers.instrument import Instrumented

IDS = torch.arange(40)[None] * 5 % 250


@pytest.fixture
def pair(request, checkpoints):
    """An instrumented model, and a plain one of the same checkpoint."""
    path = checkpoints("qwen3_5_text")
    load = lambda: transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    ours, plain = load(), load()
    instrumented = instrument(ours, families.family_of(ours.config).mixer)
    yield ours, plain, instrumented
    instrumented.remove()


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def test_a_plain_model_is_undisturbed_bit_for_bit(checkpoints):
    """Whether it was loaded before ours, after it, or run in a process that has never heard of us."""
    path = checkpoints("qwen3_5_text")
    script = (
        "import torch, transformers, sys;"
        f"m = transformers.AutoModelForCausalLM.from_pretrained({str(path)!r}).eval();"
        "ids = torch.arange(40)[None] * 5 % 250;"
        f"torch.save(m(ids).logits.detach(), {str(path / 'alone.pt')!r})"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    alone = torch.load(path / "alone.pt")
    load = lambda: transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    before = load()
    ours = load()
    instrumented = instrument(ours, families.family_of(ours.config).mixer)
    after = load()
    served = []
    with instrumented.watching(
        lambda call: served.append(call.states().shape) if isinstance(call, MixerCall) else None
    ):
        logits(before), logits(after)
        assert not served
        logits(ours)
    assert len(served) == 3
    for backend in ("torch", "reference", "default", "auto"):
        instrumented.route(backend)
        assert logits(before).equal(alone) and logits(after).equal(alone)
    instrumented.route("default")
    assert logits(ours).equal(alone)
    instrumented.remove()


@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
def test_every_backend_gives_the_models_logits(pair, backend):
    ours, plain, instrumented = pair
    instrumented.route(backend)
    torch.testing.assert_close(logits(ours), logits(plain), rtol=1e-3, atol=1e-4)


def test_routing_a_family(pair):
    ours, plain, instrumented = pair
    spec = instrumented.spec
    statetap.route_kernels("qwen3_5_text", "default")
    assert logits(ours).equal(logits(plain))
    instrumented.route("torch")  # a model's own choice goes first
    assert not logits(ours).equal(logits(plain))
    instrumented.route(None)
    assert logits(ours).equal(logits(plain))
    statetap.route_kernels(statetap.families.qwen3_5_text, "auto")
    assert not logits(ours).equal(logits(plain))
    with pytest.raises(statetap.ArgumentError, match="backend"):
        statetap.route_kernels("qwen3_5_text", "fast")
    with pytest.raises(statetap.UnsupportedFamily, match="qwen3_5_text"):
        statetap.route_kernels("llama", "torch")
    assert spec is families.qwen3_5_text.FAMILY.mixer


def test_states_can_be_had_with_the_models_own_kernels(pair):
    ours, plain, instrumented = pair
    instrumented.route("default")
    found = []
    with instrumented.watching(
        lambda c: found.append((c.states(), c.state_output)) if isinstance(c, MixerCall) else None
    ):
        torch.testing.assert_close(logits(ours), logits(plain), rtol=1e-3, atol=1e-4)
    assert all(states[:, -1].equal(final) for states, final in found)


def test_remove_puts_everything_back(checkpoints):
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    name = "torch_chunk_gated_delta_rule"
    gc.collect()  # other tests' models
    before = getattr(modeling, name)
    original = binding.original(before)
    models = [transformers.AutoModelForCausalLM.from_pretrained(checkpoints()).eval() for _ in range(2)]
    spec = families.family_of(models[0].config).mixer
    first, second = (instrument(m, spec) for m in models)
    assert instrument(models[0], spec) is first and is_instrumented(models[0])
    assert getattr(modeling, name) is not original
    first.remove()
    assert getattr(modeling, name) is not original and not is_instrumented(models[0])
    second.remove()
    assert getattr(modeling, name) is before
    assert not any(m._forward_hooks or m._forward_pre_hooks for model in models for m in model.modules())


def test_padding_on_the_right_leaves_the_state_alone(pair):
    _, _, instrumented = pair
    lengths = torch.tensor([40, 7, 23])
    ids = IDS.expand(3, -1)
    padded, alone = {}, {}

    def watch(call):
        if isinstance(call, MixerCall):
            call.mask_padding(lengths)
            padded[call.layer] = call.state_output

    with instrumented.watching(watch), torch.no_grad():
        instrumented.text_model(input_ids=ids, use_cache=False)
    for row, n in enumerate(lengths.tolist()):
        with instrumented.watching(
            lambda c: alone.update({c.layer: c.state_output}) if isinstance(c, MixerCall) else None
        ):
            instrumented.text_model(input_ids=ids[:1, :n], use_cache=False)
        for layer in padded:
            torch.testing.assert_close(padded[layer][row], alone[layer][0], rtol=1e-4, atol=1e-5)


def test_several_texts_in_a_row_are_refused(pair):
    ours, _, _ = pair
    positions = torch.cat([torch.arange(15), torch.arange(25)])[None]
    with pytest.raises(statetap.ArgumentError, match="^position_ids.*row"):
        ours(IDS, position_ids=positions)
    mask = torch.ones(1, 40, dtype=torch.long)
    mask[:, :5] = 0
    left = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    ours(IDS, attention_mask=mask, position_ids=left)  # padding on the left is not several texts


def test_an_error_in_a_forward_leaves_nobody_on_the_stack(pair):
    ours, plain, instrumented = pair

    def fail(call):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"), instrumented.watching(fail):
        ours(IDS)
    assert logits(plain).isfinite().all()
    torch.testing.assert_close(logits(ours), logits(plain), rtol=1e-3, atol=1e-4)


def test_another_model_may_run_while_a_call_is_open(pair, checkpoints):
    ours, plain, instrumented = pair
    want, seen = logits(plain), []

    def watch(call):
        seen.append(logits(plain))

    with instrumented.watching(watch):
        logits(ours)
    assert len(seen) == 3
    assert all(x.equal(want) for x in seen)


def test_a_plain_model_still_compiles_to_one_graph(pair):
    _, plain, _ = pair
    mixer = plain.model.layers[0].linear_attn
    x = torch.randn(1, 9, 64)
    with torch.no_grad():
        want = mixer(x)
        got = torch.compile(lambda x: mixer(x), fullgraph=True, backend="eager")(x)
    torch.testing.assert_close(got, want)


# -- the check at load -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "eager_attention_forward"]
)
def test_a_kernel_that_is_missing_is_named(monkeypatch, name):
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    model = tiny.model("qwen3_5_text")
    monkeypatch.delattr(modeling, name)
    with pytest.raises(statetap.UnsupportedFamily) as caught:
        instrument(model, families.family_of(model.config).mixer)
    for part in (name, modeling.__name__, transformers.__version__, "5.17 to 5.24"):
        assert part in str(caught.value)


STUB = """
import torch
def other(*a, **k): ...
class Mixer(torch.nn.Module):
    def forward(self, x):
        return other(x)
"""


@pytest.mark.parametrize(
    "source,reason",
    [
        (STUB + "def kernel(*a, **k): ...\n", "Mixer.forward does not call it"),
        (STUB, "no function of this name exists"),
        (STUB.replace("other(x)", "kernel(x)"), "no function of this name exists"),
    ],
    ids=["another is called", "gone", "called but gone"],
)
def test_a_modeling_file_that_has_moved_on(monkeypatch, source, reason):
    """A stub whose kernel is missing, or is no longer what the forward calls: one error, and nothing is left behind."""
    stub = types.ModuleType("stub_modeling")
    exec(source, stub.__dict__)
    stub.Mixer.__module__ = "stub_modeling"
    monkeypatch.setitem(sys.modules, "stub_modeling", stub)
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.Module()])
    model.layers[0].mix = stub.Mixer()
    with pytest.raises(statetap.UnsupportedFamily) as caught:
        Instrumented(model, MixerSpec("stub_modeling", "Mixer", ("kernel",), "delta", versions="5.17 to 5.24"))
    for part in ("'kernel'", reason, "stub_modeling", transformers.__version__, "5.17 to 5.24"):
        assert part in str(caught.value)
    assert not model.layers[0].mix._forward_hooks and not model.layers[0].mix._forward_pre_hooks


def test_a_model_of_another_family(checkpoints):
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=16
    )
    model = transformers.LlamaForCausalLM(config)
    with pytest.raises(statetap.UnsupportedFamily, match="llama.*qwen3_5_text"):
        families.family_of(config)
    with pytest.raises(statetap.UnsupportedFamily, match="LlamaForCausalLM"):
        instrument(model, families.qwen3_5_text.FAMILY.mixer)
    with pytest.raises(statetap.UnsupportedFamily):
        statetap.StandardizedTransformer(model, tokenizer=tiny.tokenizer())


def test_rules_are_those_of_ops(pair):
    """A call's trajectory is what the op gives for its arguments."""
    ours, _, instrumented = pair
    checked = []

    def watch(call):
        if isinstance(call, MixerCall):
            out = ops.gated_delta_rule(
                call.queries, call.keys, call.values, call.decays, call.betas, use_qk_l2norm_in_kernel=True
            )
            torch.testing.assert_close(out.final_state, call.state_output)
            checked.append(call.layer)

    with instrumented.watching(watch):
        logits(ours)
    assert checked == [0, 1, 2]


def test_a_model_that_is_gone_needs_no_dispatcher(checkpoints):
    """Nothing is left in the modeling file once the last instrumented model is dropped."""
    script = (
        "import gc, transformers; from statetap import families, mixers;"
        "from transformers.models.qwen3_5 import modeling_qwen3_5 as m;"
        "before = m.torch_chunk_gated_delta_rule;"
        f"model = transformers.AutoModelForCausalLM.from_pretrained({str(checkpoints())!r});"
        "kept = mixers.instrument(model, families.family_of(model.config).mixer);"
        "assert m.torch_chunk_gated_delta_rule is not before;"
        "del model, kept; gc.collect();"
        "assert m.torch_chunk_gated_delta_rule is before"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
