"""Writing and editing: every value, in place and by assignment, under autograd, in invokes and steps."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch

from families.editing import EDITS
from statetap import Error, StandardizedTransformer
from traced import PROMPT, near, rule

N = len(PROMPT)


def test_a_written_state_reaches_its_own_token_and_those_after(qwen):
    mix = qwen.layers[0].linear_attn
    with qwen.trace(PROMPT):
        clean, outputs = mix.states.save(), mix.attention_head_outputs.save()
        served = [
            mix.attention_queries.save(),
            mix.attention_keys.save(),
            mix.attention_values.save(),
            mix.decays.save(),
            mix.betas.save(),
        ].save()
        logits = qwen.logits.save()
    value = torch.randn(1, 4, 16, 24)
    with qwen.trace(PROMPT) as tracer:
        for _ in tracer.iter[4]:
            mix.state = value
        for _ in tracer.iter[5]:
            s5 = mix.state.save()
        states, heads = mix.states.save(), mix.attention_head_outputs.save()
        edited = qwen.logits.save()
    assert states[:, :4].equal(clean[:, :4]) and states[:, 4].equal(value) and states[:, 5].equal(s5)
    tail = rule(*[x[:, 5:] for x in served], state=value)
    near(states[:, 5:], tail[2]), near(heads[:, 5:], tail[0])
    q = served[0][:, 4].double()
    q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + 1e-6) / 4
    near(heads[:, 4], (q[..., None] * value.double()).sum(-2))
    assert heads[:, :4].equal(outputs[:, :4])
    near(edited[:, :4], logits[:, :4], 1e-5)
    assert (edited[:, 4:] - logits[:, 4:]).abs().amax(-1).min() > 1e-4


def test_the_ways_to_write_a_state_agree(qwen):
    mix = qwen.layers[1].linear_attn
    found = []
    zeros = torch.zeros(1, 4, 16, 24)
    with qwen.trace(PROMPT) as tracer:
        for _ in tracer.iter[7]:
            mix.state = zeros
        found.append(qwen.logits.save())
    with qwen.trace(PROMPT) as tracer:
        for _ in tracer.iter[7]:
            mix.state[:] = 0
        found.append(qwen.logits.save())
    with qwen.trace(PROMPT):
        mix.set_state_after(7, zeros)
        found.append(qwen.logits.save())
    with qwen.trace(PROMPT):
        mix.set_state_after(7 - N, torch.zeros(16, 24))
        found.append(qwen.logits.save())
    with qwen.trace(PROMPT):
        mix.state_after(7).mul_(0)
        found.append(qwen.logits.save())
    with qwen.trace(PROMPT) as tracer:
        for _ in tracer.iter[7]:
            mix.state *= 0
        found.append(qwen.logits.save())
    assert all(x.equal(found[0]) for x in found)


def test_a_state_read_twice_is_one_state(qwen):
    mix = qwen.layers[0].linear_attn
    with qwen.trace(PROMPT) as tracer:
        for _ in tracer.iter[3]:
            before = mix.state.clone().save()
            mix.state[:, 0] += mix.state[:, 1]
            after = mix.state.save()
        states = mix.states.save()
    assert after[:, 0].equal(before[:, 0] + before[:, 1]) and states[:, 3, 0].equal(after[:, 0])
    torch.testing.assert_close(states[:, 3], after)  # the other heads' are the call's own


def test_the_latest_write_wins_and_later_tokens_follow(qwen):
    mix = qwen.layers[0].linear_attn
    one, two = torch.ones(1, 4, 16, 24), 2 * torch.ones(1, 4, 16, 24)
    with qwen.trace(PROMPT):
        mix.set_state_after(9, two)
        mix.set_state_after(4, two)
        mix.set_state_after(4, one)
        mix.state_after(4)[:, 1] = 5
        states = mix.states.save()
    assert states[:, 9].equal(two) and states[:, 4, 0].equal(one[:, 0]) and (states[:, 4, 1] == 5).all()


def test_an_edit_changes_the_logits(qwen):
    mix = qwen.layers[1].linear_attn
    with qwen.trace(PROMPT):
        clean = qwen.logits.save()
    for name in EDITS:
        with qwen.trace(PROMPT):
            EDITS[name][0](mix)
            edited = qwen.logits.save()
        moved = float((edited - clean).abs().max())
        assert moved == 0 if name == "state_output" else moved > 1e-4, name


def test_edits_in_either_order(qwen):
    """An edit of the outputs stays where it was made; the rest follows an argument that is edited afterwards."""
    mix = qwen.layers[0].linear_attn
    found = []
    for outputs_first in (True, False):
        with qwen.trace(PROMPT):
            if outputs_first:
                mix.attention_head_outputs[:, -1] = 7
            mix.attention_keys[:, 3] = 0
            if not outputs_first:
                mix.attention_head_outputs[:, -1] = 7
            found.append((mix.attention_head_outputs.save(), mix.state_output.save(), qwen.logits.save()))
    assert all(a.equal(b) for a, b in zip(*found))


SCATTERED = {  # each of its own elements, so that no order among them means anything else
    "part of a state": lambda m: m.state_after(5)[:, 0].zero_(),
    "an element of a later state": lambda m: m.state_after(8)[:, 1, 2].fill_(3),
    "a whole state": lambda m: m.set_state_after(12, torch.ones(1)),
    "an argument before": lambda m: m.betas[:, 3, 1].zero_(),
    "part of the outputs": lambda m: m.attention_head_outputs[:, -1].fill_(7),
}


@pytest.mark.parametrize("order", list(itertools.permutations(SCATTERED, 3)), ids=" / ".join)
def test_edits_commute(qwen, order):
    """An edit of part of a value is of that part; what was not edited follows from the call as it then stands."""
    mix, found = qwen.layers[0].linear_attn, []
    for names in (order, sorted(order)):
        with qwen.trace(PROMPT):
            for name in names:
                SCATTERED[name](mix)
            kept = [mix.states.save(), mix.attention_head_outputs.save(), qwen.logits.save()].save()
        found.append(kept)
    for one, other in zip(*found):
        near(one, other, 1e-5)


def test_an_edit_of_one_head_leaves_the_others_to_the_call(qwen):
    mix = qwen.layers[0].linear_attn
    with qwen.trace(PROMPT):
        mix.betas[:, 3, 1] = 0
        clean, pattern = mix.states.save(), mix.effective_attention[0].save()
    with qwen.trace(PROMPT):
        mix.state_after(5)[:, 0] = 0
        mix.betas[:, 3, 1] = 0
        shown = mix.state_after(5).save()
        states, edited = mix.states.save(), mix.effective_attention[0].save()
    assert not states[:, 5, 0].any() and not edited[:, 0, 6:, :5].any()
    near(states[:, :, 1:], clean[:, :, 1:]), near(shown, states[:, 5]), near(edited[:, 1:], pattern[:, 1:])


def test_a_state_edited_in_turns_with_a_later_one(qwen):
    mix = qwen.layers[0].linear_attn
    with qwen.trace(PROMPT):
        first = mix.state_after(5)
        first[:, 0] = 0
        mix.state_after(6)
        first[:, 1] = 0
        later = mix.state_after(6).save()
        states = mix.states.save()
    assert not states[:, 5, :2].any()
    near(later, states[:, 6])


def test_rows_are_edited_alone(qwen):
    """One row's edit of a state, and of an argument, whichever block of the trace comes first."""
    mix, found = qwen.layers[0].linear_attn, []
    for order in (1, -1):
        edits = [lambda: mix.state_after(4)[:1, 2].zero_(), lambda: mix.attention_keys[1:, 1].zero_()][::order]
        with qwen.trace(["abcdefgh", "hgfedcba"]):
            for edit in edits:
                edit()
            kept = [mix.states.save(), qwen.logits.save()].save()
        found.append(kept)
    with qwen.trace("hgfedcba"):
        mix.attention_keys[:, 1] = 0
        alone = mix.states.save()
    near(found[0][0], found[1][0]), near(found[0][1], found[1][1]), near(found[0][0][1:], alone)


STAGES = {
    "queries": lambda a: a.attention_queries[:, 0].zero_(),
    "scores": lambda a: a.attention_scores[:, 1, -1].fill_(2),
    "probabilities": lambda a: a.attention_probabilities[:, 2].zero_(),
    "head outputs": lambda a: a.attention_head_outputs[:, 3, 0].fill_(1),
}


@pytest.mark.parametrize("pair", list(itertools.permutations(STAGES, 2)), ids=" / ".join)
def test_stages_of_attention_are_edited_by_each_block_alone(models, pair):
    model = models(attn_implementation="eager")
    attn, prompts, alone, together, ordered = model.layers[3].self_attn, ("abcdefgh", "hgfedcba"), [], [], []
    for name, prompt in zip(pair, prompts):
        with model.trace(prompt):
            STAGES[name](attn)
            alone.append(model.logits.save())
    with model.trace() as tracer:
        for name, prompt in zip(pair, prompts):
            with tracer.invoke(prompt):
                STAGES[name](attn)
                together.append(model.logits.save())
    for names in (pair, pair[::-1]):
        with model.trace(PROMPT):
            for name in names:
                STAGES[name](attn)
            ordered.append(model.logits.save())
    near(together[0], alone[0], 1e-5), near(together[1], alone[1], 1e-5), near(*ordered, 1e-5)


def test_a_whole_output_that_was_assigned_stays(qwen):
    mix = qwen.layers[0].linear_attn
    with qwen.trace(PROMPT):
        clean = mix.attention_head_outputs.save()
        logits = qwen.logits.save()
    with qwen.trace(PROMPT):
        mix.attention_head_outputs = clean
        mix.attention_keys[:] = 0
        frozen = qwen.logits.save()
    near(frozen, logits, 1e-5)


def test_writing_a_value_back_changes_nothing(qwen):
    mix = qwen.layers[0].linear_attn
    with qwen.trace(PROMPT):
        clean = qwen.logits.save()
    with qwen.trace(PROMPT):
        for name in (
            "attention_queries",
            "attention_keys",
            "attention_values",
            "betas",
            "decays",
            "attention_head_outputs",
            "state_output",
        ):
            setattr(mix, name, getattr(mix, name))
        same = qwen.logits.save()
    near(same, clean, 1e-5)


def test_state_output_changes_what_is_handed_on_only(qwen):
    mix = qwen.layers[0].linear_attn
    runs = []
    for write in (False, True):
        entering, logits = [], []
        with qwen.generate(PROMPT, max_new_tokens=2, do_sample=False) as tracer:
            for step in tracer.iter[:2]:
                s = mix.state_input
                entering.append(s.save() if s is not None else None)
                if write and step == 0:
                    mix.state_output = torch.zeros(1, 4, 16, 24)
                logits.append(qwen.logits.save())
        runs.append((entering, logits))
    (_, clean), (entering, edited) = runs
    assert edited[0].equal(clean[0]) and entering[1].abs().max() == 0
    assert (edited[1] - clean[1]).abs().max() > 1e-4


def test_writes_during_generation(qwen):
    """A state written at a later step's token is what the step after it starts from."""
    mix = qwen.layers[0].linear_attn
    entering = []
    with qwen.generate(PROMPT, max_new_tokens=4, do_sample=False) as tracer:
        for step in tracer.iter[:4]:
            s = mix.state_input
            entering.append(s.save() if s is not None else None)
            if step == 2:
                mix.set_state_after(0, torch.ones(1, 4, 16, 24))
    assert (entering[3] == 1).all() and not (entering[2] == 1).all()


def test_state_input_can_be_given_to_a_fresh_prompt(qwen):
    mix = qwen.layers[0].linear_attn
    state = torch.randn(1, 4, 16, 24)
    with qwen.trace(PROMPT):
        served = [
            mix.attention_queries.save(),
            mix.attention_keys.save(),
            mix.attention_values.save(),
            mix.decays.save(),
            mix.betas.save(),
        ].save()
        mix.state_input = state
        states = mix.states.save()
    near(states, rule(*served, state=state)[2])


def test_state_input_can_be_given_to_one_block_of_a_trace(qwen):
    mix, state, found = qwen.layers[0].linear_attn, torch.randn(1, 4, 16, 24), []
    for with_state in (False, True):
        with qwen.trace("abcdefgh"):
            if with_state:
                mix.state_input = state
            found.append(qwen.logits.save())
    with qwen.trace() as tracer:
        for i in range(2):
            with tracer.invoke("abcdefgh"):
                if i:
                    mix.state_input = state
                found.append(qwen.logits.save())
    near(found[2], found[0]), near(found[3], found[1])
    assert (found[0] - found[1]).abs().max() > 1e-3


def test_invokes_edit_their_own_rows(qwen):
    mix = qwen.layers[0].linear_attn
    prompts = ["abcdefgh", "hgfedcba"]
    alone = []
    for prompt in prompts:
        with qwen.trace(prompt):
            alone.append(qwen.logits.save())
    with qwen.trace() as tracer:
        read = tracer.barrier(2)
        with tracer.invoke(prompts[0]):
            first = mix.state_after(4).save()
            read()
            one = qwen.logits.save()
        with tracer.invoke(prompts[1]):
            read()
            mix.set_state_after(4, first)
            second = mix.state_after(4).save()
            two = qwen.logits.save()
    near(one, alone[0])
    assert second.equal(first) and (two - alone[1]).abs().max() > 1e-4
    with qwen.trace() as tracer:
        with tracer.invoke(prompts[0]):
            mix.attention_head_outputs[:, -1] = 0
            one = qwen.logits.save()
        with tracer.invoke(prompts[1]):
            mix.attention_keys[:, 2] = 0
            mix.betas = mix.betas * 0.5
            two = qwen.logits.save()
    separate = []
    with qwen.trace(prompts[0]):
        mix.attention_head_outputs[:, -1] = 0
        separate.append(qwen.logits.save())
    with qwen.trace(prompts[1]):
        mix.attention_keys[:, 2] = 0
        mix.betas = mix.betas * 0.5
        separate.append(qwen.logits.save())
    near(one, separate[0]), near(two, separate[1])


def test_gradients_of_states_and_by_written_states(qwen):
    mix = qwen.layers[0].linear_attn
    value = torch.randn(1, 4, 16, 24).requires_grad_()
    embeddings = torch.randn(1, N, 64).requires_grad_()
    with qwen.trace(inputs_embeds=embeddings):
        mix.set_state_after(10, value)
        states = mix.states.save()
        norms = mix.state_norms.save()
    (states[:, 20].sum() + norms[:, 25].sum()).backward()
    assert value.grad.abs().min() > 0
    assert embeddings.grad[:, :8].abs().max() == 0 and embeddings.grad[:, 15].abs().max() > 0


def test_gradient_checkpointing(checkpoints):
    model = StandardizedTransformer(str(checkpoints()), device="cpu")
    module, mix = model._module, model.layers[0].linear_attn
    ids = torch.randint(0, 250, (1, 12))
    grads = []
    for checkpointing in (False, True):
        module.train()
        if checkpointing:
            module.gradient_checkpointing_enable(dict(use_reentrant=False))
        module.zero_grad()
        with model.trace(input_ids=ids, use_cache=False):
            states = mix.states.save()
            logits = model.logits.save()
        loss = logits.square().sum()
        torch.autograd.backward(loss)
        assert states.shape[1] == 12
        grads.append(module.model.layers[0].linear_attn.in_proj_a.weight.grad.clone())
    torch.testing.assert_close(*grads)
    with model.trace(input_ids=ids, use_cache=False):
        mix.betas[:, 3] = 0
        logits = model.logits.save()
    loss = logits.square().sum()
    with pytest.raises(Error, match="gradient checkpointing"):
        torch.autograd.backward(loss)


@pytest.mark.slow
@pytest.mark.parametrize("grad", [True, False])
def test_memory_is_flat_over_many_traces(qwen, grad):
    import os

    def resident():
        with open(f"/proc/{os.getpid()}/statm") as file:
            return int(file.read().split()[1])

    mix, sizes = qwen.layers[0].linear_attn, {}
    gc.collect()
    gc.disable()
    try:
        with torch.set_grad_enabled(grad):
            for n in range(120):
                with qwen.trace() as tracer:
                    for prompt in ("a" * 40, "b" * 64, "c" * 20, "d" * 60):
                        with tracer.invoke(prompt):
                            states = mix.states.save()
                del states
                if n in (20, 119):
                    sizes[n] = resident()
    finally:
        gc.enable()
    assert sizes[119] <= 1.05 * sizes[20], sizes


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_edits_in_inference_mode(models, attention):
    """The same as without gradients."""
    model, found = models("qwen3_5_text", attn_implementation=attention), []
    mix, attn = model.layers[0].linear_attn, model.layers[3].self_attn
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            with model.trace(PROMPT):
                mix.attention_keys[:, 2] = 0
                mix.attention_head_outputs[:, -1] = 1
                mix.betas = mix.betas * 0.5
                mix.state_after(3).zero_()
                states = mix.states.save()
                if attention == "eager":
                    attn.attention_probabilities[:, 0] = 0
                logits = model.logits.save()
        found.append((states.clone(), logits.clone()))
    assert all(a.equal(b) for a, b in zip(*found))
