"""What several files of these tests use."""

from __future__ import annotations

import json
import os

import torch

WORDS = "the state of a head is one matrix, rewritten by every token; "


def texts(count: int, seed: int = 0) -> list[str]:
    """Texts of 1 to 200 bytes."""
    lengths = torch.randint(1, 200, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return [f"{n:03d} {WORDS * 4}"[:length] for n, length in enumerate(lengths)]


def begun(work) -> int:
    """Run `work` in a forked process, whose number this is."""
    child = os.fork()
    if not child:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
    return child


def plain_states(model, ids: list[int]) -> dict[int, torch.Tensor]:
    """Final states of one document alone, from transformers' own cache: layer -> `[heads, key_dim, value_dim]`."""
    with torch.no_grad():
        cache = model.model(input_ids=torch.tensor([ids]), use_cache=True).past_key_values
    return {n: x.recurrent_states[0][0] for n, x in enumerate(cache.layers) if hasattr(x, "recurrent_states")}


def near(x: torch.Tensor, y: torch.Tensor, rtol: float = 1e-4) -> None:
    """Equal to rtol of each head's largest value; `[heads, key_dim, value_dim]`."""
    assert x.shape == y.shape, (x.shape, y.shape)
    error, largest = (x.double() - y.double()).abs().amax((-1, -2)), y.double().abs().amax((-1, -2))
    assert (error <= rtol * largest).all(), (error / largest).max()


def contents(run) -> dict[str, bytes]:
    """Every file of a run by name; of the manifest, what does not say when."""
    files = {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file()}
    manifest = json.loads(files.pop("manifest.json"))
    for name in ("started", "finished", "checksum"):
        manifest.pop(name)
    card = files.pop("README.md").replace(run.name.encode(), b"run")
    return {**files, "README.md": card, "manifest.json": json.dumps(manifest).encode()}
