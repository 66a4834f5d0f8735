"""What cannot reach the model is said plainly: bad edits, values asked for too late, or outside of a trace."""

from __future__ import annotations

import pytest
import torch
import transformers

from statetap import ArgumentError, Error, OutOfOrderError, StandardizedTransformer, Unavailable
from traced import PROMPT

N = len(PROMPT)


BAD = [
    (lambda m: setattr(m, "attention_keys", torch.zeros(1, 3, 4, 16)), ArgumentError, "attention_keys|keys"),
    (lambda m: setattr(m, "attention_values", 3.0), ArgumentError, "values"),
    (lambda m: setattr(m, "betas", torch.zeros(1, N, 4).double()), ArgumentError, "betas"),
    (lambda m: m.set_state_after(N, torch.zeros(1, 4, 16, 24)), ArgumentError, "token"),
    (lambda m: m.set_state_after(0, torch.zeros(2, 4, 16, 24)), ArgumentError, "state"),
    (lambda m: m.set_state_after(0, torch.zeros(24, 16)), ArgumentError, "state"),
    (lambda m: setattr(m, "state_output", torch.zeros(4, 16, 24)), ArgumentError, "state_output"),
    (
        lambda m: setattr(m, "states", torch.zeros(1, N, 4, 16, 24)),
        ArgumentError,
        "states is read-only.*set_state_after",
    ),
    (lambda m: setattr(m, "trajectory", None), ArgumentError, "trajectory is read-only"),
    (lambda m: m.states.zero_(), Error, "states was edited in place.*set_state_after"),
    (lambda m: m.writes[:, 3].zero_(), Error, "writes was edited in place"),
    (lambda m: m.trajectory.updates.zero_(), Error, "trajectory.updates was edited in place"),
    (lambda m: m.trajectory[0].chunk_states.zero_(), Error, "trajectory.chunk_states was edited in place"),
    (lambda m: m.read(torch.zeros(2, 15)), ArgumentError, "probes"),
    (lambda m: m.read(None), ArgumentError, "read: got None"),
    *((lambda m, x=x: m.state_after(x), ArgumentError, "state after a token") for x in ("3", None, [3], True, 1.5)),
    *(
        (lambda m, d=d: m.set_state_after(0, torch.zeros(1, 4, 16, 24, dtype=d)), ArgumentError, f"state: got {d}")
        for d in (torch.complex64, torch.bool, torch.int64, torch.float64)
    ),
    (lambda m: m.set_state_after(0, 4.0), ArgumentError, "state: got float"),
    (lambda m: setattr(m, "betas", torch.zeros(1, N, 4, dtype=torch.int64)), ArgumentError, "betas: got torch.int64"),
    (lambda m: setattr(m, "attention_queries", 1), ArgumentError, "linear_attn.attention_queries: got int"),
    (lambda m: setattr(m, "decays", m.decays + 100), ArgumentError, "decays: above 0"),
    (lambda m: m.decays.add_(100), ArgumentError, "decays: above 0"),
    (lambda m: setattr(m, "nonsense", 3), ArgumentError, "no value 'nonsense'"),
    (lambda m: setattr(m, "state_after", 3), ArgumentError, "state_after is a method"),
    (lambda m: setattr(m, "attention_output", 5), ArgumentError, "attention_output: got int"),
    (lambda m: setattr(m, "attention_output", torch.zeros(1, N, 64).double()), ArgumentError, "got torch.float64"),
]


@pytest.mark.parametrize("name", ["states", "writes", "state_norms"])
def test_edits_of_derived_values_are_noticed_in_inference_mode_too(qwen, name):
    with pytest.raises(Error, match=f"{name} was edited in place"):
        with torch.inference_mode(), qwen.trace(PROMPT):
            getattr(qwen.layers[0].linear_attn, name)[:] = 0


MODEL_BAD = [
    (lambda m: setattr(m, "logits", 3), r"logits: got int"),
    (lambda m: setattr(m, "logits", torch.zeros(2, 3)), r"logits: got shape \[2, 3\]"),
    (lambda m: setattr(m.layers[0], "layer_output", torch.zeros(3)), r"layers\[0\].layer_output: got shape \[3\]"),
    (lambda m: setattr(m.layers[0], "linear_attn", 3), "no value 'linear_attn'"),
    (lambda m: setattr(m.layers[0].mlp, "mlp_outputs", 3), "no value 'mlp_outputs'.*mlp_output"),
    (lambda m: setattr(m.layers[0].mlp.up_proj, "outptu", 3), "no value 'outptu'.*output"),
]


@pytest.mark.parametrize("edit,kind,message", BAD)
def test_bad_edits_are_refused_plainly(qwen, edit, kind, message):
    mix = qwen.layers[0].linear_attn
    with pytest.raises(kind, match=message):
        with qwen.trace(PROMPT):
            edit(mix)
    with qwen.trace(PROMPT):  # and the model goes on as before
        mix.states.save()


@pytest.mark.parametrize("edit,message", MODEL_BAD)
def test_bad_edits_of_modules_are_refused_plainly(qwen, edit, message):
    with pytest.raises(ArgumentError, match=message):
        with qwen.trace(PROMPT):
            edit(qwen)


@pytest.mark.parametrize("grad", [True, False])
def test_an_edit_after_the_model_has_passed_warns(qwen, grad):
    """It reaches nothing, and says so; what was saved may be edited when the run is over."""
    mix = qwen.layers[0].linear_attn
    with torch.set_grad_enabled(grad), pytest.warns(UserWarning, match="edited in place after the model") as told:
        with qwen.trace() as tracer:
            with tracer.invoke("abcd"):
                keys, state = mix.attention_keys, mix.state_after(2)
                qwen.layers[1].layer_output.save()
                keys[:] = 0
                state[:, 0] = 0
            with tracer.invoke("abcdefg"):
                kept = mix.attention_values.save()
                kept[:, 0] = 0
    kept.detach()[:] = 1
    names = [str(w.message).split(" was ")[0] for w in told if "edited in place" in str(w.message)]
    assert names == ["layers[0].linear_attn.attention_keys", "layers[0].linear_attn.state"]


def test_a_value_of_another_trace_that_was_not_saved(qwen):
    mix = qwen.layers[0].linear_attn
    with qwen.trace(PROMPT):
        lost = mix.state_after(4)
    with pytest.raises(NameError, match="lost"):
        with qwen.trace(PROMPT):
            mix.set_state_after(4, lost)


LATE = {
    "attention_keys": lambda m, x: m.attention_keys.save(),
    "states": lambda m, x: m.states.save(),
    "state_output": lambda m, x: m.state_output.save(),
    "set_state_after": lambda m, x: m.set_state_after(0, torch.zeros(1, 4, 16, 24)),
    "attention_output": lambda m, x: m.attention_output.save(),
    "layer_output": lambda m, x: x.layers[0].layer_output.save(),
    "mlp_output": lambda m, x: x.layers[0].mlp.mlp_output.save(),
    "output": lambda m, x: x.layers[0].mlp.up_proj.output.save(),
    "input": lambda m, x: x.layers[0].mlp.input.save(),
    "inputs": lambda m, x: x.layers[0].inputs[0][0].save(),
}


@pytest.mark.parametrize("step", [0, 1, 3])
@pytest.mark.parametrize("name", LATE)
def test_too_late_at_every_step(qwen, name, step):
    mix = qwen.layers[0].linear_attn
    with pytest.raises(OutOfOrderError, match=rf"layers\[0\].*{name}.*too late \(step {step}\).*Move"):
        with qwen.generate(PROMPT, max_new_tokens=5, do_sample=False) as tracer:
            for _ in tracer.iter[step]:
                qwen.layers[1].layer_output.save()
                LATE[name](mix, qwen)


def test_plain_values_in_time_at_every_step(checkpoints):
    """Of a module that runs twice a forward too: both of its calls, and each step's own."""
    module = transformers.AutoModelForCausalLM.from_pretrained(checkpoints())
    mlp, silu = module.model.layers[0].mlp, torch.nn.functional.silu
    mlp.forward = lambda x: mlp.act_fn(mlp.down_proj(mlp.act_fn(mlp.gate_proj(x))))
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoints())
    model, seen = StandardizedTransformer(module, tokenizer=tokenizer), []
    ours = model.layers[0].mlp
    with model.generate(PROMPT, max_new_tokens=4, do_sample=False) as tracer:
        for _ in tracer.iter[1:4]:
            gate, once = ours.gate_proj.output, ours.act_fn.output
            down, twice = ours.down_proj.output, ours.act_fn.output
            seen.append((gate.shape[1], once.equal(silu(gate)), twice.equal(silu(down))))
    assert seen == [(1, True, True)] * 3
    with pytest.raises(OutOfOrderError, match=r"mlp.act_fn.output was asked for too late \(step 2\)"):
        with model.generate(PROMPT, max_new_tokens=4, do_sample=False) as tracer:
            for _ in tracer.iter[2]:
                model.layers[1].layer_output.save()
                ours.act_fn.output.save()


def test_too_late_in_an_open_loop_and_after_logits(qwen):
    with pytest.raises(OutOfOrderError, match="states"):
        with qwen.generate(PROMPT, max_new_tokens=4, do_sample=False) as tracer:
            for _ in tracer.iter[:]:
                qwen.logits.save()
                qwen.layers[2].linear_attn.states.save()


def test_a_value_that_never_comes(qwen):
    with pytest.raises(OutOfOrderError, match=r"layers\[0\].linear_attn.states was never reached"):
        with qwen.trace(PROMPT):
            qwen.layers[0].linear_attn.skip(torch.zeros(1, N, 64))
            qwen.layers[0].linear_attn.states.save()


def test_outside_of_a_trace(qwen):
    for name in ("states", "attention_output", "state_norms"):
        with pytest.raises(Unavailable, match=rf"layers\[0\].linear_attn.{name}: no forward is running.*trace"):
            getattr(qwen.layers[0].linear_attn, name)
