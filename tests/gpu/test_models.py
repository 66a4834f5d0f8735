"""Models on the card, traced: what the CPU gives, and plain transformers' own logits."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("nnsight")
DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
FAMILIES = ["qwen3_5_text", "qwen3_next", "olmo_hybrid", "kimi_linear"]
PROMPT = "a state of many tokens"


def seen(path, device):
    """Logits, and the first linear layer's values, of one trace."""
    from statetap import StandardizedTransformer

    model = StandardizedTransformer(path, device=device)
    layer = next(i for i in range(len(model.layers)) if model.layers[i].linear_attn is not None)
    with torch.no_grad(), model.trace(PROMPT):
        mix = model.layers[layer].linear_attn
        states, decays = mix.states.save(), mix.decays.save()
        logits = model.logits.save()
    return {"states": states, "decays": decays, "logits": logits}, model


@pytest.mark.parametrize("family", FAMILIES)
def test_traced(family, checkpoints):
    from transformers import AutoModelForCausalLM

    path = checkpoints(family)
    ours, model = seen(path, DEVICE)
    want, _ = seen(path, "cpu")
    for name, x in ours.items():
        assert x.device.type == DEVICE, name
        torch.testing.assert_close(x.cpu(), want[name], rtol=1e-3, atol=1e-4)
    plain = AutoModelForCausalLM.from_pretrained(path).to(DEVICE).eval()
    ids = model.tokenizer(PROMPT, return_tensors="pt").input_ids.to(DEVICE)
    with torch.no_grad():
        torch.testing.assert_close(ours["logits"], plain(ids).logits, rtol=1e-3, atol=1e-4)


def test_generated(checkpoints):
    from statetap import StandardizedTransformer

    model = StandardizedTransformer(checkpoints("qwen3_5_text"), device=DEVICE)
    with torch.no_grad(), model.generate(PROMPT, max_new_tokens=4, do_sample=False) as tracer:
        before, after = [].save(), [].save()
        for _ in tracer.iter[:4]:
            before.append(model.layers[0].linear_attn.state_input)
            after.append(model.layers[0].linear_attn.state_output)
    assert len(after) == 4 and all(after[i].equal(before[i + 1]) for i in range(3))
