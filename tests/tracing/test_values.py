"""What a linear-attention block serves: shapes, order, agreement with the rule, at every step."""

from __future__ import annotations

import itertools

import pytest
import torch

from traced import PROMPT

HEADS, K, V, N = 4, 16, 24, len(PROMPT)


READS = {
    "state_output": lambda m, nxt: m.state_output.save(),
    "attention_queries": lambda m, nxt: m.attention_queries.save(),
    "states": lambda m, nxt: m.states.save(),
    "betas": lambda m, nxt: m.betas.save(),
}


@pytest.mark.parametrize("order", list(itertools.permutations(READS))[::5])
def test_any_order(qwen, order):
    mix, nxt = qwen.layers[0].linear_attn, qwen.layers[1].linear_attn
    with qwen.trace(PROMPT):
        want = dict(
            state_output=mix.state_output.save(),
            attention_queries=mix.attention_queries.save(),
            states=mix.states.save(),
            betas=mix.betas.save(),
        ).save()
        later = nxt.states.save()
    with qwen.trace(PROMPT):
        got = {name: READS[name](mix, nxt) for name in order}
        got = dict(got).save()
        projected = nxt.in_proj_qkv.output.save()
        again = nxt.states.save()
    assert all(got[name].equal(want[name]) for name in order)
    assert again.equal(later) and projected.shape == (1, N, 2 * 2 * K + HEADS * V)


def test_a_submodule_and_a_kernel_value_in_one_trace(qwen):
    mix = qwen.layers[0].linear_attn
    with qwen.trace(PROMPT):
        projected = mix.in_proj_qkv.output.save()
        states = mix.states.save()
        normed = mix.norm.output.save()
        out = mix.attention_output.save()
    assert projected.shape[1] == states.shape[1] == N and normed.shape[-1] == V and out.shape == (1, N, 64)


def test_state_at_each_token_in_a_loop(qwen):
    mix = qwen.layers[0].linear_attn
    with qwen.trace(PROMPT):
        states = mix.states.save()
    some, every, after = [], [], []
    with qwen.trace(PROMPT) as tracer:
        for _ in tracer.iter[2:9:1]:
            some.append(mix.state.save())
        for _ in tracer.iter[:]:
            every.append(mix.state.save())
        after.append(mix.state_after(-1).save())
        logits = qwen.logits.save()
    assert torch.stack(some, 1).equal(states[:, 2:9])
    assert torch.stack(every, 1).equal(states)
    assert after[0].equal(states[:, -1]) and logits.shape[1] == N


def test_tokens_nested_in_steps(qwen):
    mix = qwen.layers[0].linear_attn
    per_token, whole = [], []
    with qwen.generate(PROMPT, max_new_tokens=3, do_sample=False) as tracer:
        for _ in tracer.iter[:3]:
            tokens = []
            for _ in tracer.iter[:]:
                tokens.append(mix.state.save())
            per_token.append(tokens)
            whole.append(mix.states.save())
            qwen.layers[2].layer_output.save()
    assert [len(tokens) for tokens in per_token] == [N, 1, 1]
    assert all(torch.stack(tokens, 1).equal(states) for tokens, states in zip(per_token, whole))


def test_a_step_alone(qwen):
    mix = qwen.layers[0].linear_attn
    leaving = []
    with qwen.generate(PROMPT, max_new_tokens=4, do_sample=False) as tracer:
        for _ in tracer.iter[:4]:
            leaving.append(mix.state_output.save())
    with qwen.generate(PROMPT, max_new_tokens=4, do_sample=False) as tracer:
        for _ in tracer.iter[2]:
            for _ in tracer.iter[0]:
                token = mix.state.save()
            third = mix.state_output.save()
    assert third.equal(leaving[2]) and token.equal(leaving[2])
