"""The contract: what is found, what is served, and that the model stays what it was."""

from __future__ import annotations

import warnings

import pytest
import torch

import statetap
import tiny
from families.base import HEADS, HIDDEN, Base
from statetap import StandardizedTransformer, Unavailable, families
from statetap.mixers import instrument
from statetap.ops.backends import BACKENDS
from traced import PROMPT, SERVED, near, rule

N = len(PROMPT)
CPU = torch.device("cpu")


class Reading(Base):
    def test_it_is_found_with_its_kernels(self, model):
        name = self.family or self.model_type
        assert families.module_of(tiny.config(self.model_type)) is model.family is families.module_of(name)
        assert model.family.FAMILY.model_type == name == model.config.model_type
        assert all(found and reason is None for _, found, reason in families.check(name))

    def test_it_loads_without_warnings(self, checkpoints):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = StandardizedTransformer(str(checkpoints(self.model_type)), device="cpu")
            for layer in range(model.num_layers):
                model.support(layer=layer)
            with model.trace(PROMPT):
                model.logits.save()

    def test_support_says_why_not(self, model):
        softmax = self.softmax(model)
        there, other = model.support(layer=0), model.support(layer=softmax)
        assert there["linear_attn.states"] is there["linear_attn.state"] is there["layer_output"] is None
        assert {r for n, r in there.items() if n.startswith("self_attn")} == {"no self_attn module on this block"}
        assert {r for n, r in other.items() if n.startswith("linear_attn")} == {"no linear_attn module on this block"}
        assert other["self_attn.attention_output"] is other["mlp.mlp_output"] is None
        assert "eager" in other["self_attn.attention_scores"]
        kinds = model.config.layer_types
        for layer, kind in zip(model.layers, kinds):
            assert (layer.linear_attn is not None) == (kind == "linear_attention") == (layer.self_attn is None)
        whole = model.support()
        assert whole["layer_output"] is None and whole["linear_attn.states"].keys() == {
            i for i, kind in enumerate(kinds) if kind != "linear_attention"
        }
        with pytest.raises(statetap.ArgumentError, match="layer"):
            model.support(layer=4)
        with pytest.raises(Unavailable, match="attention_scores.*eager"):
            with model.trace(PROMPT):
                model.layers[softmax].self_attn.attention_scores.save()

    def test_values_have_their_shapes_and_follow_the_rule(self, model, mix):
        entering = []
        with model.trace(PROMPT):
            served = [getattr(mix, name).save() for name in SERVED]
            served = list(served).save()
            entering.append(mix.state_input)
            y, state, states = mix.attention_head_outputs.save(), mix.state_output.save(), mix.states.save()
            writes, norms, attention = mix.writes.save(), mix.state_norms.save(), mix.effective_attention.save()
            reads, trajectory = mix.read(torch.randn(3, self.key_dim)).save(), mix.trajectory.save()
            out = mix.attention_output.save()
        q, k, v, g, b = served
        weights, rest = attention
        assert entering == [None]
        assert q.shape == k.shape == (1, N, HEADS, self.key_dim)
        assert v.shape == y.shape == writes.shape == rest.shape == (1, N, HEADS, self.value_dim)
        assert g.shape == ((1, N, HEADS, self.key_dim) if self.per_channel else (1, N, HEADS))
        assert g.dtype == torch.float32 and g.max() <= 0
        assert b.shape == norms.shape == (1, N, HEADS) and b.min() > 0 and b.max() < self.largest_beta
        assert state.shape == (1, HEADS, self.key_dim, self.value_dim) and state.dtype == torch.float32
        assert states.shape == (1, N, *state.shape[1:]) and reads.shape == (1, N, HEADS, 3, self.value_dim)
        assert weights.shape == (1, HEADS, N, N) and out.shape == (1, N, HIDDEN)
        assert trajectory.states().equal(states) and states[:, -1].equal(state)
        outputs, final, every = rule(*served)
        near(y, outputs), near(state, final), near(states, every)
        near(norms, every.flatten(-2).norm(dim=-1))
        near(torch.einsum("bhts,bshv->bthv", weights, v) + rest, outputs)

    def test_bfloat16_decays_are_exact(self, models):
        model = models(self.model_type, dtype=torch.bfloat16)
        mix = self.linear(model)[0]
        with model.trace(PROMPT):
            exact = self.exact_decays(mix).save()
            served = [getattr(mix, name).save() for name in SERVED]
            served = list(served).save()
            states, state = mix.states.save(), mix.state_output.save()
        assert served[0].dtype == torch.bfloat16
        assert served[3].dtype == states.dtype == state.dtype == torch.float32
        assert served[3].equal(exact) and exact.max() <= 0
        near(states, rule(*served)[2], 1e-5)

    def test_logits_and_tokens_are_plain_transformers(self, model, theirs):
        ids = model.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
        with model.trace(PROMPT):
            logits, probabilities = model.logits.save(), model.next_token_probs.save()
        torch.testing.assert_close(logits, theirs(ids).logits, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(probabilities, logits[:, -1].softmax(-1))
        options = dict(max_new_tokens=8, do_sample=False)
        assert model.generate(PROMPT, **options).equal(theirs.generate(ids, **options))

    def test_backends_agree_and_default_is_transformers(self, model, mix, theirs):
        ids, found = torch.arange(40)[None] * 5 % 250, {}
        with torch.no_grad():
            want = theirs(ids).logits
            for backend in ["auto", "default", *(n for n, b in BACKENDS.items() if b.available(CPU) is None)]:
                statetap.route_kernels(model, backend)
                with model.trace(ids):
                    found[backend] = (mix.states.save(), model.logits.save())
                near(found[backend][1], want, 1e-3), near(found[backend][0], found["auto"][0])
                assert theirs(ids).logits.equal(want)  # another model of the class is never touched
            statetap.route_kernels(model, "default")
            with model.trace(ids):
                logits = model.logits.save()
            statetap.route_kernels(model, "auto")
        assert logits.equal(want)

    def test_instrumenting_is_undone(self, theirs):
        ids = torch.arange(20)[None]
        with torch.no_grad():
            want = theirs(ids).logits
            instrumented = instrument(theirs, families.family_of(theirs.config).mixer)
            near(theirs(ids).logits, want, 1e-3)
            instrumented.remove()
            assert theirs(ids).logits.equal(want)
