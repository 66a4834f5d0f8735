"""`AttentionCall`: one eager softmax-attention call held open."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor

from .slots import ALL, Argument, Result, Rows, Served, fitting, ordinary, take

_GIVEN = {"queries": "query", "keys": "key", "values": "value"}
_NEEDS = {"scores": ("queries", "keys"), "probabilities": ("scores",), "head_outputs": ("probabilities", "values")}


class AttentionCall:
    """Queries, keys, values, scores, probabilities and head outputs of one call; each can be edited.

    The values follow one from the other: an edit stays, and what was not edited follows from the values before it,
    whatever the order. Untouched, the modeling file's own eager kernel runs. Layouts: queries `[B, H, T, D]`, keys and
    values `[B, Hkv, S, D]`, scores and probabilities `[B, H, T, S]`, head outputs `[B, T, H, D]`.
    """

    recurrent = False

    def __init__(self, original: Callable, layer: int, args: tuple, kwargs: dict[str, Any]) -> None:
        names = ("module", "query", "key", "value", "attention_mask")
        given = {**dict(zip(names, args)), **kwargs}
        self._original, self._args, self._kwargs = original, args, kwargs
        self.layer = layer
        self.closed = False
        self._where = f"layers[{layer}].self_attn"
        self._mask = given.get("attention_mask")
        self._scaling = given.get("scaling", given["query"].shape[-1] ** -0.5)
        self._arguments = {name: Argument(given[of]) for name, of in _GIVEN.items()}
        self._results = {name: Result() for name in _NEEDS}
        self._slots: dict[str, Argument | Result] = {**self._arguments, **self._results}
        self._computed: dict[str, tuple[list[tuple[Tensor, int]], Tensor]] = {}  # stage -> (from what, itself)

    @property
    def edited(self) -> bool:
        return any(slot.edited for slot in self._slots.values())

    @property
    def batch(self) -> int:
        return self._argument("queries").shape[0]

    def part(self, start: int, size: int) -> AttentionPart:
        return AttentionPart(self, slice(start, start + size))

    def read(self, name: str, rows: Rows = ALL) -> Tensor:
        """A stage as it now stands: a copy that may be edited in place."""
        if name in self._arguments:
            return take(self._argument(name), rows)
        return self._results[name].read(self._followed(name), rows)

    def write(self, name: str, value: Tensor, rows: Rows = ALL) -> None:
        """Replace a stage, for some rows; what follows from it is computed anew."""
        current = self.read(name, rows)
        value = fitting(f"{self._where}.attention_{name}", value, current.shape, current.dtype, current.device)
        if name in self._arguments:
            self._arguments[name].write(rows, value)
        else:
            self._results[name].write(self._followed(name), rows, value)

    def served(self) -> Served:
        """What has been handed out so far."""
        return Served(self._where, [(f"attention_{name}", slot.served) for name, slot in self._slots.items()])

    def close(self) -> tuple[Tensor, Tensor | None]:
        """What the attention gets: its own kernel's results, unless something was edited."""
        outputs = (self.read("head_outputs"), self.read("probabilities")) if self.edited else None
        self.closed = True
        self._computed.clear()
        return self._original(*self._args, **self._kwargs) if outputs is None else outputs

    def _argument(self, name: str) -> Tensor:
        return self._arguments[name].read()  # type: ignore[return-value]

    def _followed(self, name: str) -> Tensor:
        """A stage as it follows from those before it; the same tensor as long as they are the same."""
        inputs = [self.read(stage) for stage in _NEEDS[name]]
        versions = [(x, x._version) for x in inputs]
        then, found = self._computed.get(name, ([], None))
        if found is None or not all(x is y and n == m for (x, n), (y, m) in zip(then, versions)):
            with ordinary():
                found = getattr(self, f"_{name}")(*inputs)
            self._computed[name] = versions, found
        return found

    def _scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], 1)
        scores = queries @ keys.transpose(2, 3) * self._scaling
        return scores if self._mask is None else scores + self._mask[..., : keys.shape[-2]]

    def _probabilities(self, scores: Tensor) -> Tensor:
        return torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)

    def _head_outputs(self, probabilities: Tensor, values: Tensor) -> Tensor:
        values = values.repeat_interleave(probabilities.shape[1] // values.shape[1], 1)
        return (probabilities @ values).transpose(1, 2).contiguous()


class AttentionPart:
    """The same call, seen by some rows."""

    def __init__(self, call: AttentionCall, rows: Rows) -> None:
        self._call, self._rows = call, rows

    @property
    def closed(self) -> bool:
        return self._call.closed

    def read(self, name: str) -> Tensor:
        return self._call.read(name, self._rows)

    def write(self, name: str, value: Tensor) -> None:
        self._call.write(name, value, self._rows)
