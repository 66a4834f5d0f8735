"""The contract: writes that hold, edits in place, gradients, memory."""

from __future__ import annotations

import gc

import pytest
import torch

from families.base import HEADS, Base
from traced import PROMPT, SERVED, Cached, near, rule


def scaled(mix, name, token, factor):
    """`name` with one token scaled, out of place."""
    x = getattr(mix, name)
    weight = torch.ones(x.shape[1])
    weight[token] = factor
    setattr(mix, name, x * weight.reshape(1, -1, *[1] * (x.ndim - 2)))


# value -> the same edit in place and out of place
EDITS = {
    "state": (lambda m: m.state_after(3).zero_(), lambda m: m.set_state_after(3, torch.zeros(1))),
    "attention_queries": (lambda m: m.attention_queries[:, 3].zero_(), lambda m: scaled(m, "attention_queries", 3, 0)),
    "attention_keys": (lambda m: m.attention_keys[:, 3].zero_(), lambda m: scaled(m, "attention_keys", 3, 0)),
    "attention_values": (lambda m: m.attention_values[:, 3].mul_(2), lambda m: scaled(m, "attention_values", 3, 2)),
    "betas": (lambda m: m.betas[:, 3].mul_(0.5), lambda m: scaled(m, "betas", 3, 0.5)),
    "decays": (lambda m: m.decays[:, 5].mul_(1e4), lambda m: scaled(m, "decays", 5, 1e4)),
    "attention_head_outputs": (
        lambda m: m.attention_head_outputs[:, -1].zero_(),
        lambda m: scaled(m, "attention_head_outputs", -1, 0),
    ),
    "state_output": (
        lambda m: m.state_output.zero_(),
        lambda m: setattr(m, "state_output", torch.zeros_like(m.state_output)),
    ),
}


class Editing(Base):
    def test_a_written_state_holds_and_is_continued_from(self, model, mix):
        value = torch.randn(1, HEADS, self.key_dim, self.value_dim)
        with model.trace(PROMPT):
            served = [getattr(mix, name).save() for name in SERVED]
            served = list(served).save()
            clean, logits = mix.states.save(), model.logits.save()
        with model.trace(PROMPT):
            mix.set_state_after(4, value)
            states, heads, state = mix.states.save(), mix.attention_head_outputs.save(), mix.state_output.save()
            changed = model.logits.save()
        assert states[:, :4].equal(clean[:, :4]) and states[:, 4].equal(value) and states[:, -1].equal(state)
        outputs, _, tail = rule(*[x[:, 5:] for x in served], state=value)
        near(states[:, 5:], tail), near(heads[:, 5:], outputs)
        near(changed[:, :4], logits[:, :4], 1e-5)
        assert (changed[:, 4:] - logits[:, 4:]).abs().amax(-1).min() > 1e-5

    @pytest.mark.parametrize("name", EDITS)
    def test_edits_in_place_are_those_out_of_place(self, model, name):
        """No error, the same logits, the same finite gradients of parameters and of embeddings."""
        mix, embedding = self.linear(model)[1], model._module.get_input_embeddings()
        ids = model.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
        for embedded in (False, True):
            logits, gradients = [], []
            for edit in EDITS[name]:
                model._module.zero_grad()
                leaf = embedding(ids).detach().requires_grad_()
                with model.trace(**(dict(inputs_embeds=leaf) if embedded else dict(input_ids=ids))):
                    edit(mix)
                    kept = model.logits.save()
                kept.square().sum().backward()
                logits.append(kept.detach())
                gradients.append((leaf if embedded else embedding.weight).grad.clone())
            assert all(g.isfinite().all() for g in gradients)
            torch.testing.assert_close(*logits)
            torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5 * float(gradients[0].abs().max()))

    def test_gradients_through_decode_steps(self, model):
        """Prompt, then two cached steps: the embeddings' gradients are those of one forward over all tokens."""
        mix = self.linear(model)[-1]
        embeddings = model._module.get_input_embeddings()(torch.randint(0, 250, (1, 12))).detach()
        whole, pieces, cached = embeddings.clone().requires_grad_(), embeddings.clone().requires_grad_(), Cached(model)
        with model.trace(inputs_embeds=whole):
            state, logits = mix.state_output.save(), model.logits.save()
        (logits[:, -1].square().sum() + state.norm()).backward()
        for start, stop in ((0, 10), (10, 11), (11, 12)):
            with model.trace(**cached.given(inputs_embeds=pieces[:, start:stop])):
                state, logits, result = mix.state_output.save(), model.logits.save(), model.output.save()
            cached.keep(result)
        (logits[:, -1].square().sum() + state.norm()).backward()
        torch.testing.assert_close(pieces.grad, whole.grad, rtol=1e-3, atol=1e-4 * float(whole.grad.abs().max()))

    @pytest.mark.parametrize("grad", [True, False])
    def test_traces_leave_no_tensors_behind(self, model, mix, grad):
        counts = []
        gc.collect()
        gc.freeze()  # what is there already is not counted
        gc.disable()
        try:
            with torch.set_grad_enabled(grad):
                for _ in range(6):
                    with model.trace() as tracer:
                        for prompt in ("a" * 8, "b" * 5):
                            with tracer.invoke(prompt):
                                states = mix.states.save()
                    del states
                    counts.append(sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()))
        finally:
            gc.enable()
            gc.unfreeze()
        assert counts[-1] <= counts[1], counts
