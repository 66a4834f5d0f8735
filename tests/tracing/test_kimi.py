"""Kimi-Linear: a decay per key channel, and both kinds of mixer under one name. OLMo-Hybrid: betas above one."""

from __future__ import annotations

import pytest
import torch

from tracing.conftest import PROMPT, near, rule

N = len(PROMPT)


@pytest.fixture
def kimi(models):
    return models("kimi_linear")


def test_blocks_are_named_by_their_kind(kimi):
    kinds = [(layer.linear_attn is not None, layer.self_attn is not None) for layer in kimi.layers]
    expected = [(t == "linear_attention", t == "full_attention") for t in kimi.config.layer_types]
    assert kinds == expected and {True, False} == {a for a, _ in kinds}
    softmax = [a for a, _ in kinds].index(False)
    assert kimi.support(layer=softmax)["linear_attn.states"] == "no linear_attn module on this block"


def test_values_follow_the_rule(kimi):
    mix = next(layer.linear_attn for layer in kimi.layers if layer.linear_attn is not None)
    with kimi.trace(PROMPT):
        q, k, v = mix.attention_queries.save(), mix.attention_keys.save(), mix.attention_values.save()
        g, b = mix.decays.save(), mix.betas.save()
        y, state, states = mix.attention_head_outputs.save(), mix.state_output.save(), mix.states.save()
        norms = mix.state_norms.save()
    assert g.shape == (1, N, 4, 16) and g.dtype == torch.float32 and g.max() <= 0
    outputs, final, every = rule(q, k, v, g, b)
    near(y, outputs), near(state, final), near(states, every), near(norms, every.flatten(-2).norm(dim=-1))
    assert states[:, -1].equal(state)


def test_logits_tokens_hand_off_and_writes(kimi, plain):
    theirs = plain("kimi_linear")
    ids = kimi.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    mix = kimi.layers[0].linear_attn
    with kimi.trace(PROMPT):
        logits = kimi.logits.save()
    torch.testing.assert_close(logits, theirs(ids).logits, rtol=1e-3, atol=1e-4)
    entering, leaving = [], []
    with kimi.generate(PROMPT, max_new_tokens=4, do_sample=False) as tracer:
        for _ in tracer.iter[:4]:
            s = mix.state_input
            entering.append(s.save() if s is not None else None)
            leaving.append(mix.state_output.save())
        tokens = tracer.result.save()
    assert entering[0] is None and all(a.equal(b) for a, b in zip(leaving, entering[1:]))
    assert tokens.equal(theirs.generate(ids, max_new_tokens=4, do_sample=False))
    with kimi.trace(PROMPT):
        mix.state_after(4).zero_()
        edited = kimi.logits.save()
    near(edited[:, :4], logits[:, :4], 1e-5)
    assert (edited[:, 4:] - logits[:, 4:]).abs().amax(-1).min() > 1e-5


@pytest.mark.parametrize("allowed", [True, False])
def test_olmo_hybrids_betas(checkpoints, allowed):
    from statetap import StandardizedTransformer

    model = StandardizedTransformer(str(checkpoints("olmo_hybrid", linear_allow_neg_eigval=allowed)), device="cpu")
    mix = model.layers[0].linear_attn
    with model.trace(PROMPT):
        served = [mix.attention_queries.save(), mix.attention_keys.save(), mix.attention_values.save()].save()
        g, b, states = mix.decays.save(), mix.betas.save(), mix.states.save()
    assert (b.max() > 1) == allowed and b.max() < 2
    near(states, rule(*served, g, b)[2])
