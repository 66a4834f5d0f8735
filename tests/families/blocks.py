"""The contract: softmax attention, MLPs, the residual stream, and the methods over them."""

from __future__ import annotations

import pytest
import torch

import tiny
from families.base import HEADS, HIDDEN, Base
from statetap import ArgumentError
from traced import PROMPT, near

N = len(PROMPT)


BAD = {
    "layer": lambda m: m.steer("a", torch.zeros(HIDDEN)),
    "vector": lambda m: m.steer(0, 3.0),
    "vector: got shape": lambda m: m.steer(0, torch.zeros(5)),
    "token_positions": lambda m: m.steer(0, torch.zeros(HIDDEN), token_positions="last"),
    "batch_index": lambda m: m.steer(0, torch.zeros(HIDDEN), batch_index=[4]),
    "skip_layers": lambda m: m.skip_layers(2, 1),
    "skip_with": lambda m: m.skip_layers(1, 1, torch.zeros(3)),
    "hidden": lambda m: m.project_on_vocab(torch.zeros(1, 3, 5)),
    "hidden: got str": lambda m: m.project_on_vocab("a"),
}


class Blocks(Base):
    def test_attention_values_under_eager(self, models):
        model = models(self.model_type, attn_implementation="eager")
        attn = model.layers[self.softmax(model)].self_attn
        with model.trace(PROMPT):
            q, k, v = attn.attention_queries.save(), attn.attention_keys.save(), attn.attention_values.save()
            scores, pattern = attn.attention_scores.save(), attn.attention_probabilities.save()
            heads, out = attn.attention_head_outputs.save(), attn.attention_output.save()
            clean = model.logits.save()
        groups = q.shape[1] // k.shape[1]
        assert q.shape == (1, HEADS, N, model.qk_head_dim) and heads.shape == (1, N, HEADS, model.head_dim)
        assert k.shape[:3] == v.shape[:3] == (1, model.num_kv_heads, N)
        assert scores.shape == pattern.shape == (1, HEADS, N, N) and out.shape == (1, N, HIDDEN)
        near(pattern, scores.softmax(-1)), near(pattern.sum(-1), torch.ones(1, HEADS, N))
        assert not pattern.triu(1).any()
        product = q @ k.repeat_interleave(groups, 1).transpose(2, 3) * attn._module.scaling
        near(scores.where(pattern > 0, 0), product.where(pattern > 0, 0))
        near(heads, (pattern @ v.repeat_interleave(groups, 1)).transpose(1, 2))
        found = []
        with model.trace(PROMPT):
            attn.attention_probabilities[:, 0] = 0
            found.append(model.logits.save())
        with model.trace(PROMPT):
            attn.attention_head_outputs[:, :, 0] = 0
            found.append(model.logits.save())
        near(*found)
        assert (found[0] - clean).abs().max() > 1e-3

    def test_what_a_block_adds(self, model):
        """Where there is one residual stream: what comes in, and what attention and MLP add, is what comes out."""
        for i in (0, self.softmax(model)):
            block = model.layers[i]
            mixer = block.linear_attn if block.linear_attn is not None else block.self_attn
            with model.trace(PROMPT):
                entering, mixed = block.input.save(), mixer.attention_output.save()
                mlp, leaving = block.mlp.mlp_output.save(), block.layer_output.save()
            assert mixed.shape == mlp.shape == (1, N, HIDDEN) and leaving.numel() == self.streams * mlp.numel()
            if self.streams == 1:
                near(entering + mixed + mlp, leaving, 1e-5)
            with model.trace(PROMPT):
                mixer.attention_output = torch.zeros_like(mixed)
                block.mlp.mlp_output[:] = 0
                nothing = block.layer_output.save()
            if self.streams == 1:
                near(nothing, entering, 1e-5)

    def test_sizes_and_the_logit_lens(self, model):
        config = model.config
        assert (model.num_layers, model.hidden_size, model.vocab_size) == (4, HIDDEN, tiny.VOCABULARY)
        assert (model.num_heads, model.num_kv_heads) == (config.num_attention_heads, config.num_key_value_heads)
        with model.trace(PROMPT):
            last = model.layers[-1].layer_output.save()
            inside = model.project_on_vocab(model.layers[-1].layer_output).save()
            logits = model.logits.save()
        assert inside.equal(logits) and model.project_on_vocab(last).equal(logits)

    def test_steering(self, model):
        vector = torch.randn(HIDDEN)
        with model.trace(PROMPT):
            clean, logits = model.layers[1].layer_output.save(), model.logits.save()
        with model.trace(PROMPT):
            model.steer(1, vector, factor=3.0, token_positions=-1)
            steered, moved = model.layers[1].layer_output.save(), model.logits.save()
        difference = (steered - clean).reshape(1, N, -1, HIDDEN)
        near(difference[:, -1], 3 * vector.expand(1, self.streams, -1))
        assert not difference[:, :-1].any() and (moved[:, -1] - logits[:, -1]).abs().max() > 1e-3

    def test_skipping_blocks(self, model):
        with model.trace(PROMPT):
            before = model.layers[1].layer_output.save()
            model.skip_layers(2, 3)
            after, logits = model.layers[3].layer_output.save(), model.logits.save()
        assert after.equal(before) and logits.equal(model.project_on_vocab(before))

    def test_skipping_blocks_at_every_step(self, model):
        seen = []
        with model.generate(PROMPT, max_new_tokens=3, do_sample=False) as tracer:
            for _ in tracer.iter[:3]:
                before = model.layers[1].layer_output
                model.skip_layers(2, 3)
                seen.append(model.layers[3].layer_output.equal(before))
        assert seen == [True] * 3

    @pytest.mark.parametrize("name", BAD)
    def test_bad_arguments_are_refused_plainly(self, model, name):
        with pytest.raises(ArgumentError, match=f"^{name}"):
            with model.trace(PROMPT):
                BAD[name](model)
                model.logits.save()
