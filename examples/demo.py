"""The main job in a minute: capture the states of a corpus, read them back, then trace, read and edit one prompt.

    make demo          or          python examples/demo.py [OUTPUT]

The checkpoint beside this file is a byte-level Qwen3.5 of 0.8 M parameters, trained on the corpus beside it.
"""

import os
import shutil
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch

import statetap
from statetap import StandardizedTransformer

HERE = Path(__file__).parent
CHECKPOINT, CORPUS = HERE / "checkpoint", HERE / "corpus/documents.jsonl"
PROMPT = "And God said, Let there be light: and there was l"


def sweep(output: Path) -> None:
    """The state that each document leaves, and every state of every document as a trajectory, in all layers."""
    if output.exists():
        shutil.rmtree(output)
    run = statetap.capture(
        CHECKPOINT, CORPUS, output, values="state_output,trajectory", batch_tokens=8192, model_dtype="float32"
    )
    print(f"\nThe run is in {run.path}: {len(run)} documents, {run.tokens} tokens, layers {run.layers}")
    for value in run.values:
        column = run[value, run.layers[0]]
        print(f"  {value:38} {column.dtype:9} {list(column.shape)}  a row a {column.row_is}")
    print(f"Checked: {'; '.join(statetap.verify(run.path)) or 'whole'}")
    row = run.row(117)
    norms = row.trajectory(0).norms()[0]
    print(f"Document 117 begins {row.text[:44]!r};")
    print(f"  norm of the state of layer 0, head 0, every 64 tokens: {[round(x, 2) for x in norms[::64, 0].tolist()]}")


def trace() -> None:
    """A state read and a state edit, and what the edit does to the next token."""
    model = StandardizedTransformer(str(CHECKPOINT), device="cpu", dtype=torch.float32)
    layers = [layer.linear_attn for layer in model.layers if layer.linear_attn is not None]
    with model.trace(PROMPT):
        states = layers[0].states.save()
        clean = model.next_token_probs.save()
    print(f"\nTraced {PROMPT!r}")
    print(f"  states of layer 0: {list(states.shape)}, [batch, token, head, key_dim, value_dim]")
    last = len(PROMPT) - 1
    with model.trace(PROMPT):
        for mix in layers:  # forget everything before the last token, in every recurrent layer
            mix.state_after(last)[:] = 0
        edited = model.next_token_probs.save()
    show(model, "next token", clean)
    show(model, "with the last token's states set to zero", edited)
    print(f"  largest change of a probability: {(edited - clean).abs().max():.3f}")


def show(model: StandardizedTransformer, what: str, probs: torch.Tensor) -> None:
    best = probs[0].topk(3)
    tokens = ", ".join(f"{model.tokenizer.decode(i)!r} {p:.3f}" for p, i in zip(best.values, best.indices))
    print(f"  {what}: {tokens}")


if __name__ == "__main__":
    sweep(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo"))
    trace()
