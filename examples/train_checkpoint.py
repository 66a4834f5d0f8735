"""Trains the small Qwen3.5 that the demo uses, on the corpus beside it: `python examples/train_checkpoint.py`.

A byte-level language model of 0.8 M parameters. The backward pass goes through statetap's kernels. A quarter of an hour
on one core; the result is committed as `examples/checkpoint`, so nobody needs to.
"""

import json
import sys
import time
from pathlib import Path

import torch
import transformers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

import tiny  # noqa: E402
from statetap.families import family_of  # noqa: E402
from statetap.mixers import instrument  # noqa: E402

SIZES = dict(
    hidden_size=128,
    intermediate_size=320,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    linear_num_key_heads=4,
    linear_num_value_heads=4,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    tie_word_embeddings=True,
)
ROWS, LENGTH = 16, 192


def main(minutes: float = 9.0) -> None:
    torch.manual_seed(0)
    tokenizer = tiny.tokenizer()
    texts = [json.loads(line)["text"] for line in (HERE / "corpus/documents.jsonl").open(encoding="utf-8")]
    ids = torch.tensor([i for text in texts for i in [*tokenizer(text)["input_ids"], tiny.END]])
    model = transformers.Qwen3_5ForCausalLM(tiny.config("qwen3_5_text", **SIZES))
    instrument(model, family_of(model.config).mixer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05, betas=(0.9, 0.95))
    started, step = time.time(), 0
    while (share := (time.time() - started) / (60 * minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, (step + 1) / 50) * (1 - share) + 1e-5
        first = torch.randint(len(ids) - LENGTH, (ROWS,))
        batch = ids[first[:, None] + torch.arange(LENGTH)]
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
        step += 1
    model.half().save_pretrained(HERE / "checkpoint")
    tokenizer.save_pretrained(HERE / "checkpoint")
    print(f"{step} steps, last loss {loss.item():.3f}")


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
