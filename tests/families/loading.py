"""The contract: the check at load, the ways to load, models side by side."""

from __future__ import annotations

import copy
import pickle
import re
import sys

import pytest
import torch
import transformers

import tiny
from families.base import HEADS, Base
from statetap import ArgumentError, StandardizedTransformer, UnsupportedFamily, families
from statetap.mixers import instrument, is_instrumented
from traced import PROMPT, near


class Loading(Base):
    def test_a_missing_kernel_is_named_at_load(self, theirs, monkeypatch):
        """For each kernel, and nothing is left behind in the model or in its modeling file."""
        spec = families.family_of(theirs.config).mixer
        modeling = families.modeling(families.family_of(theirs.config))
        names = (*spec.kernels, *spec.convolutions, spec.attention_kernel)
        before = {name: getattr(modeling, name) for name in names}
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in theirs.modules()]
        for name in names:
            with monkeypatch.context() as patch:
                patch.delattr(modeling, name)
                with pytest.raises(UnsupportedFamily) as caught:
                    instrument(theirs, spec)
            said = str(caught.value)
            for part in (f"'{name}'", spec.modeling, f"transformers {transformers.__version__}", spec.versions):
                assert part in said and "\n" not in said
        assert {name: getattr(modeling, name) for name in names} == before
        assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in theirs.modules()] == hooks

    def test_a_modeling_file_that_cannot_be_imported_says_why(self, monkeypatch):
        family = families.module_of(self.family or self.model_type).FAMILY
        monkeypatch.setitem(sys.modules, family.mixer.modeling, None)
        for _, found, reason in families.check(family.model_type):
            assert not found and re.search(rf"{family.mixer.modeling}.*ModuleNotFoundError.*Works with", reason)

    def test_a_module_that_is_loaded_already(self, model, mix, checkpoints):
        auto = families.auto_class(tiny.config(self.model_type))
        module = auto.from_pretrained(checkpoints(self.model_type))
        ours = StandardizedTransformer(module, tokenizer=model.tokenizer)
        with model.trace(PROMPT):
            states, logits = mix.states.save(), model.logits.save()
        with ours.trace(PROMPT):
            again, same = self.linear(ours)[0].states.save(), ours.logits.save()
        assert again.equal(states) and same.equal(logits) and ours._module is module

    def test_a_model_without_its_head_is_refused(self, theirs):
        with pytest.raises(UnsupportedFamily, match="language-model head"):
            StandardizedTransformer(theirs.base_model, tokenizer=tiny.tokenizer())

    def test_a_copy_of_the_module_is_a_plain_model(self, model, theirs):
        ids = torch.arange(12)[None]
        want = theirs(ids).logits
        for copied in (pickle.loads(pickle.dumps(model._module)), copy.deepcopy(model._module)):
            assert not is_instrumented(copied)
            near(copied(ids).logits, want, 1e-3)

    def test_the_wrapper_and_its_text_model(self, checkpoints):
        """A multimodal checkpoint as the text model it loads as, and as the wrapper that it is."""
        if self.wrapper is None:
            pytest.skip("there is no wrapper of this family")
        if not tiny.has(self.wrapper):
            pytest.skip(f"transformers {transformers.__version__} has no {self.wrapper}")
        path, found = str(checkpoints(self.wrapper)), []
        text = StandardizedTransformer(path, device="cpu")
        module = transformers.AutoModelForImageTextToText.from_pretrained(path)
        wrapper = StandardizedTransformer(module, tokenizer=text.tokenizer)
        for model in (text, wrapper):
            assert model.family.FAMILY.model_type == (self.family or self.model_type) == model.config.model_type
            mix = self.linear(model)[1]
            with model.trace(PROMPT):
                mix.betas[:, 2] = 0
                found.append((mix.states.save(), model.logits.save()))
            tokens = model.generate(PROMPT, max_new_tokens=3, do_sample=False)
            found[-1] = (*found[-1], tokens)
        assert "ForConditionalGeneration" in type(wrapper._module).__name__
        near(found[0][0], found[1][0]), near(found[0][1], found[1][1])
        assert found[0][2].equal(found[1][2])

    def test_blocks_on_two_devices(self, checkpoints):
        """Each value is on its layer's device. The second is meta, where only shapes are followed, up to the experts."""
        auto = families.auto_class(tiny.config(self.model_type))
        module = auto.from_pretrained(checkpoints(self.model_type))
        model = StandardizedTransformer(module, tokenizer=tiny.tokenizer())
        first, second = self.linear(model)[0], self.linear(model)[-1]
        block = next(layer for layer in model.layers if layer.linear_attn is second)
        block._module.to("meta").register_forward_pre_hook(moved, with_kwargs=True)
        with torch.no_grad(), model.trace(input_ids=torch.arange(9)[None], use_cache=False) as tracer:
            states = first.states.save()
            second.set_state_after(3, torch.zeros(HEADS, self.key_dim, self.value_dim, device="meta"))
            shapes, decays, output = second.states.save(), second.decays.save(), second.attention_output.save()
            tracer.stop()
        assert states.device.type == "cpu" and {x.device.type for x in (shapes, decays, output)} == {"meta"}
        assert states.shape == shapes.shape == (1, 9, HEADS, self.key_dim, self.value_dim)
        with pytest.raises(ArgumentError, match="on cpu.*on meta"):
            with torch.no_grad(), model.trace(input_ids=torch.arange(9)[None], use_cache=False):
                second.set_state_after(3, torch.zeros(HEADS, self.key_dim, self.value_dim))


def moved(module, args, kwargs):
    """What a device map does in front of a block."""

    def move(x):
        return x.to("meta") if isinstance(x, torch.Tensor) else tuple(map(move, x)) if isinstance(x, tuple) else x

    return move(args), {name: move(x) for name, x in kwargs.items()}
