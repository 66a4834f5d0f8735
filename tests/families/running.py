"""The contract: generation, calls on a cache, batches, sweeps."""

from __future__ import annotations

import pytest
import torch

import statetap
import tiny
from families.base import Base
from traced import PROMPT, Cached, near

N = len(PROMPT)


class Running(Base):
    def test_the_state_is_handed_on_and_saved_values_never_change(self, model):
        mix = self.linear(model)[1]
        entering, leaving, states, clones = [], [], [], []
        with model.generate(PROMPT, max_new_tokens=4, do_sample=False) as tracer:
            for _ in tracer.iter[:4]:
                s = mix.state_input
                entering.append(s.save() if s is not None else None)
                leaving.append(mix.state_output.save())
                clones.append(mix.state_output.clone().save())
                states.append(mix.states.save())
        assert entering[0] is None and all(a.equal(b) for a, b in zip(leaving, entering[1:]))
        assert [s.shape[1] for s in states] == [N, 1, 1, 1]
        assert all(s[:, -1].equal(x) for s, x in zip(states, leaving))
        with model.trace("another prompt"):
            mix.states.save()
        assert all(a.equal(b) for a, b in zip(leaving, clones))

    def test_generation_that_ends_early(self, model, mix):
        """A loop that outruns the generation keeps its values and says once that what follows it did not run."""
        kept, reached, bias = [], [], torch.zeros(tiny.VOCABULARY)
        with pytest.warns(UserWarning, match="was never reached") as warned:
            with model.generate(PROMPT, max_new_tokens=6, do_sample=False, eos_token_id=tiny.END) as tracer:
                for step in tracer.iter[:]:
                    kept.append(mix.state_output.save())
                    logits = model.logits
                    if step == 2:
                        bias[tiny.END] = 1e4
                    model.logits = logits + bias
                reached.append(True)
        assert len(kept) == 3 and not reached
        assert len([w for w in warned if "was never reached" in str(w.message)]) == 1

    def test_calls_in_pieces_on_one_cache(self, model, mix):
        ids, cached = torch.randint(0, 250, (1, 37)), Cached(model)
        with model.trace(ids):
            want, betas, logits = mix.states.save(), mix.betas.save(), model.logits.save()
        entering, leaving, states, used, pieces = [], [], [], [], []
        for start, stop in ((0, 5), (5, 6), (6, 30), (30, 37)):
            with model.trace(**cached.given(input_ids=ids[:, start:stop])):
                s = mix.state_input
                entering.append(s.save() if s is not None else None)
                leaving.append(mix.state_output.save())
                used.append(mix.betas.save())
                states.append(mix.states.save())
                pieces.append(model.logits.save())
                result = model.output.save()
            cached.keep(result)
        assert entering[0] is None and all(a.equal(b) for a, b in zip(leaving, entering[1:]))
        near(torch.cat(states, 1), want), near(torch.cat(used, 1), betas)
        near(torch.cat(pieces, 1), logits, 1e-3)

    def test_blocks_of_a_trace_on_one_cache(self, model):
        ids, cached = torch.randint(0, 250, (2, 9)), Cached(model)
        with model.trace(ids):
            want = model.logits.save()
        with model.trace(**cached.given(input_ids=ids[:, :7])):
            result = model.output.save()
        cached.keep(result)
        found = []
        with model.trace(**cached.given()) as tracer:
            for row in range(2):
                with tracer.invoke(ids[row : row + 1, 7:]):
                    found.append(model.logits.save())
        near(torch.cat(found), want[:, 7:], 1e-3)

    def test_invokes_and_padding(self, model):
        prompts, mix = ["abc", "a longer prompt x", "x" * 64], self.linear(model)[1]
        values = "decays", "states", "state_output", "attention_output"
        alone, together = [], []
        for prompt in prompts:
            with model.trace(prompt):
                alone.append([getattr(mix, name).save() for name in values])
        with model.trace() as tracer:
            for prompt in prompts:
                with tracer.invoke(prompt):
                    together.append([getattr(mix, name).save() for name in values])
        with model.trace(prompts):
            listed = [getattr(mix, name).save() for name in values]
            listed = list(listed).save()
        for i, (prompt, want) in enumerate(zip(prompts, alone)):
            n = len(prompt)
            for decays, states, state, out in (together[i], [x[i : i + 1] for x in listed]):
                near(decays[:, -n:], want[0]), near(states[:, -n:], want[1])
                near(state, want[2]), near(out[:, -n:], want[3])
                assert not states[:, :-n].any()

    def test_several_texts_in_a_row_are_refused(self, model):
        positions = torch.cat([torch.arange(15), torch.arange(22)])[None]
        with pytest.raises(statetap.ArgumentError, match="^position_ids.*row"):
            with model.trace(input_ids=torch.arange(37)[None], position_ids=positions):
                model.logits.save()

    def test_beam_search(self, model, mix, theirs):
        ids = model.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
        options = dict(num_beams=3, num_return_sequences=3, max_new_tokens=6, do_sample=False)
        states = []
        with model.generate(PROMPT, **options) as tracer:
            for _ in tracer.iter[:6]:
                states.append(mix.state_output.save())
            beams = tracer.result.save()
        assert beams.equal(theirs.generate(ids, use_cache=False, **options))
        assert states[-1].shape[0] == 3
        for beam in beams:  # the last step read all but the last token, in an order of its own
            with model.trace(beam[None, :-1]):
                want = mix.state_output.save()
            errors = (states[-1] - want).abs().amax((1, 2, 3))
            assert errors.min() <= 1e-4 * want.abs().max() or beam[-1] == tiny.PAD

    def test_a_sweep_captures_what_a_trace_serves(self, model, mix, tmp_path):
        texts = [PROMPT, "a", "every token rewrites the state; " * 3]
        (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n")
        run = statetap.capture(
            model._module,
            tmp_path / "texts.txt",
            tmp_path / "run",
            tokenizer=model.tokenizer,
            values="state_output,states,trajectory,decays,betas,writes,state_norms",
            tokens="all",
            progress=False,
        )
        assert run.layers == [i for i, layer in enumerate(model.layers) if layer.linear_attn is not None]
        values = "states", "decays", "betas", "writes", "state_norms"
        for n in range(len(texts)):
            row = run.row(n)
            with model.trace(row.tokens[None]):
                served = [getattr(mix, name).save() for name in values]
                served = list(served).save()
                state = mix.state_output.save()
            near(row["state_output", 0], state[0]), near(row.trajectory(0).states(), served[0])
            for name, x in zip(values, served):
                near(row[name, 0], x[0])
