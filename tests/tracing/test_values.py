"""What a linear-attention block serves: shapes, order, agreement with the rule, at every step."""

from __future__ import annotations

import itertools

import pytest
import torch

import statetap
from statetap import Unavailable
from tracing.conftest import PROMPT, near, rule

HEADS, K, V, N = 4, 16, 24, len(PROMPT)


def test_shapes_dtypes_and_signs(model):
    mix, entering = model.layers[0].linear_attn, []
    with model.trace(PROMPT):
        q, k, v = mix.attention_queries.save(), mix.attention_keys.save(), mix.attention_values.save()
        g, b = mix.decays.save(), mix.betas.save()
        entering.append(mix.state_input)
        y, state, states = mix.attention_head_outputs.save(), mix.state_output.save(), mix.states.save()
        writes, norms, attention = mix.writes.save(), mix.state_norms.save(), mix.effective_attention.save()
        reads, trajectory = mix.read(torch.randn(3, K)).save(), mix.trajectory.save()
        out = mix.attention_output.save()
    weights, rest = attention
    assert entering == [None]
    assert q.shape == k.shape == (1, N, HEADS, K) and v.shape == y.shape == writes.shape == rest.shape == (
        1,
        N,
        HEADS,
        V,
    )
    assert g.shape == b.shape == norms.shape == (1, N, HEADS) and g.dtype == torch.float32 and g.max() <= 0
    assert b.min() > 0 and b.max() < (2 if model.config.model_type == "olmo_hybrid" else 1)
    assert state.shape == (1, HEADS, K, V) and states.shape == (1, N, HEADS, K, V) and state.dtype == torch.float32
    assert weights.shape == (1, HEADS, N, N) and reads.shape == (1, N, HEADS, 3, V)
    assert out.shape == (1, N, 64)
    assert trajectory.states().equal(states) and states[:, -1].equal(state)
    outputs, final, every = rule(q, k, v, g, b)
    near(y, outputs), near(state, final), near(states, every)
    near(norms, every.flatten(-2).norm(dim=-1))


def test_logits_and_tokens_are_plain_transformers(model, plain):
    theirs = plain(model.family.FAMILY.model_type)
    ids = model.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    with model.trace(PROMPT):
        logits = model.logits.save()
        probs = model.next_token_probs.save()
    torch.testing.assert_close(logits, theirs(ids).logits, rtol=1e-3, atol=1e-4)
    near(probs, theirs(ids).logits[:, -1].softmax(-1), 1e-3)
    ours = model.generate(PROMPT, max_new_tokens=8, do_sample=False)
    assert ours.equal(theirs.generate(ids, max_new_tokens=8, do_sample=False))


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


def test_generate_hands_the_state_on(model):
    mix = model.layers[1].linear_attn
    entering, leaving, states = [], [], []
    with model.generate(PROMPT, max_new_tokens=4, do_sample=False) as tracer:
        for _ in tracer.iter[:4]:
            s = mix.state_input
            entering.append(s.save() if s is not None else None)
            leaving.append(mix.state_output.save())
            states.append(mix.states.save())
    assert entering[0] is None
    assert all(a.equal(b) for a, b in zip(leaving, entering[1:]))
    assert [s.shape[1] for s in states] == [N, 1, 1, 1]
    assert all(s[:, -1].equal(x) for s, x in zip(states, leaving))


def test_saved_values_never_change(model):
    mix, kept = model.layers[0].linear_attn, []
    with model.trace(PROMPT):
        kept += [mix.state_output.save(), mix.states.save(), mix.attention_keys.save(), mix.decays.save()]
    clones = [x.clone() for x in kept]
    seen = []
    with model.generate("another prompt", max_new_tokens=5, do_sample=False) as tracer:
        for _ in tracer.iter[:5]:
            s = mix.state_input
            if s is not None:
                seen.append((s.save(), s.clone().save()))
            seen.append((mix.state_output.save(), mix.state_output.clone().save()))
    assert all(a.equal(b) for a, b in zip(kept, clones))
    assert all(a.equal(b) for a, b in seen)


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


def test_generation_that_ends_early(qwen):
    """A loop that outruns the generation keeps its values and says once that what follows it did not run."""
    mix = qwen.layers[0].linear_attn
    bias = torch.zeros(258)
    kept, reached = [], []
    end = 256
    with pytest.warns(UserWarning, match="was never reached") as warned:
        with qwen.generate(PROMPT, max_new_tokens=10, do_sample=False, eos_token_id=end) as tracer:
            for step in tracer.iter[:]:
                kept.append(mix.state_output.save())
                logits = qwen.logits
                if step == 2:
                    bias[end] = 1e4
                qwen.logits = logits + bias
            reached.append(True)
    assert len(kept) == 3 and not reached
    assert len([w for w in warned if "was never reached" in str(w.message)]) == 1


def test_calls_in_pieces_on_one_cache(model):
    mix = model.layers[0].linear_attn
    ids = torch.randint(0, 250, (1, 37))
    with model.trace(ids):
        want = mix.states.save()
    name = "cache" if "cache" in model._module.forward.__wrapped__.__code__.co_varnames else "past_key_values"
    cache, entering, leaving, states = None, [], [], []
    for start, stop in ((0, 5), (5, 6), (6, 30), (30, 37)):
        given = {"input_ids": ids[:, start:stop], "use_cache": True, **({} if cache is None else {name: cache})}
        with model.trace(**given):
            s = mix.state_input
            entering.append(s.save() if s is not None else None)
            last = mix.state_output.save()
            every = mix.states.save()
            result = model.output.save()
        cache = getattr(result, name, None) or result.past_key_values
        leaving.append(last), states.append(every)
    assert entering[0] is None and all(a.equal(b) for a, b in zip(leaving, entering[1:]))
    near(torch.cat(states, 1), want)


def test_invokes_of_different_lengths(model):
    prompts = ["abc", "a longer prompt x", "x" * 64]
    mix = model.layers[1].linear_attn
    alone = []
    for prompt in prompts:
        with model.trace(prompt):
            alone.append((mix.states.save(), mix.state_output.save(), mix.decays.save(), mix.attention_output.save()))
    together = []
    with model.trace() as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                together.append(
                    (mix.states.save(), mix.state_output.save(), mix.decays.save(), mix.attention_output.save())
                )
    listed = []
    with model.trace(prompts):
        listed += [mix.states.save(), mix.state_output.save(), mix.decays.save(), mix.attention_output.save()]
    for i, prompt in enumerate(prompts):
        n = len(prompt)
        for form in (together[i], tuple(x[i : i + 1] for x in listed)):
            states, final, decays, out = form
            near(states[:, -n:], alone[i][0]), near(final, alone[i][1])
            near(decays[:, -n:], alone[i][2]), near(out[:, -n:], alone[i][3])
            assert states[:, :-n].abs().max() == 0 if n < 64 else True


def test_beam_search(model, plain):
    mix = model.layers[0].linear_attn
    theirs = plain(model.family.FAMILY.model_type)
    ids = model.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    options = dict(num_beams=3, num_return_sequences=3, max_new_tokens=6, do_sample=False)
    states, entering = [], []
    with model.generate(PROMPT, **options) as tracer:
        for _ in tracer.iter[:6]:
            s = mix.state_input
            entering.append(s.save() if s is not None else None)
            states.append(mix.state_output.save())
        beams = tracer.result.save()
    assert beams.equal(theirs.generate(ids, use_cache=False, **options))
    assert states[-1].shape[0] == 3
    for beam in beams:  # the last step read all but the last token, in an order of its own
        with model.trace(beam[None, :-1]):
            want = mix.state_output.save()
        assert any((state - want[0]).abs().max() <= 1e-4 * want.abs().max() for state in states[-1]) or beam[-1] == 257


def test_bfloat16(models):
    model = models("qwen3_5_text", dtype=torch.bfloat16)
    mix = model.layers[0].linear_attn
    with model.trace(PROMPT):
        q, k, v, g, b = (
            getattr(mix, n).save()
            for n in ("attention_queries", "attention_keys", "attention_values", "decays", "betas")
        )
        states, a = mix.states.save(), None
    with model.trace(PROMPT):
        a = mix.in_proj_a.output.save()
    assert q.dtype == torch.bfloat16 and g.dtype == states.dtype == torch.float32
    module = mix._module
    exact = -module.A_log.float().exp() * torch.nn.functional.softplus(a.float() + module.dt_bias)
    assert g.equal(exact)
    near(states, rule(q, k, v, g, b)[2], 1e-5)


def test_support(model):
    linear, softmax = model.support(layer=0), model.support(layer=-1)
    assert linear["linear_attn.states"] is None and linear["linear_attn.attention_output"] is None
    assert (
        linear["self_attn.attention_output"]
        == linear["self_attn.attention_scores"]
        == "no self_attn module on this block"
    )
    assert softmax["linear_attn.states"] == softmax["linear_attn.state"] == "no linear_attn module on this block"
    assert softmax["self_attn.attention_output"] is None and "eager" in softmax["self_attn.attention_scores"]
    whole = model.support()
    assert whole["layer_output"] is None and whole["linear_attn.states"] == {3: "no linear_attn module on this block"}
    assert model.layers[0].self_attn is None and model.layers[3].linear_attn is None
    with pytest.raises(statetap.ArgumentError, match="layer"):
        model.support(layer=4)
    assert model.family is getattr(statetap.families, model.family.FAMILY.model_type)
    assert model.config.layer_types[:4] == ["linear_attention"] * 3 + ["full_attention"]


def test_inner_values_of_fused_attention_are_unavailable(qwen):
    with pytest.raises(Unavailable, match=r"layers\[3\].self_attn.attention_scores.*eager"):
        with qwen.trace(PROMPT):
            qwen.layers[3].self_attn.attention_scores.save()


def test_eager_attention(models):
    model = models("qwen3_5_text", attn_implementation="eager")
    attn = model.layers[3].self_attn
    with model.trace(PROMPT):
        q, k, v = attn.attention_queries.save(), attn.attention_keys.save(), attn.attention_values.save()
        scores, probs = attn.attention_scores.save(), attn.attention_probabilities.save()
        heads, out = attn.attention_head_outputs.save(), attn.attention_output.save()
        mlp, layer = model.layers[3].mlp.mlp_output.save(), model.layers[3].layer_output.save()
        clean = model.logits.save()
    assert q.shape == (1, 4, N, 16) and k.shape == v.shape == (1, 2, N, 16) and heads.shape == (1, N, 4, 16)
    assert scores.shape == probs.shape == (1, 4, N, N)
    near(probs.sum(-1), torch.ones(1, 4, N)), near(probs, scores.softmax(-1))
    near(heads, (probs @ v.repeat_interleave(2, 1)).transpose(1, 2))
    assert out.shape == mlp.shape == layer.shape == (1, N, 64)
    with model.trace(PROMPT):
        attn.attention_probabilities[:, 0] = 0
        edited = model.logits.save()
    with model.trace(PROMPT):
        attn.attention_head_outputs[:, :, 0] = 0
        same = model.logits.save()
    assert (edited - clean).abs().max() > 1e-3
    near(edited, same)


def test_the_multimodal_wrapper(checkpoints, plain):
    """As the text model that `AutoModelForCausalLM` makes of it, and as the wrapper that it is."""
    import transformers

    from statetap import StandardizedTransformer

    path = str(checkpoints("qwen3_5"))
    text = StandardizedTransformer(path, device="cpu")
    module = transformers.AutoModelForImageTextToText.from_pretrained(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    wrapped = StandardizedTransformer(module, tokenizer=tokenizer, task="text-generation")
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    found = []
    for model in (text, wrapped):
        assert model.family is statetap.families.qwen3_5_text and model.config.model_type == "qwen3_5_text"
        with model.trace(ids):
            found.append((model.layers[2].linear_attn.states.save(), model.logits.save()))
    assert type(wrapped._module).__name__ == "Qwen3_5ForConditionalGeneration"
    near(found[0][0], found[1][0]), near(found[0][1], found[1][1])
