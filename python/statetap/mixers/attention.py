"""`AttentionCall`: one eager softmax-attention call held open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch import Tensor

from ..errors import ArgumentError
from .slots import ALL, Rows, ordinary, put, take

_WRITTEN = -1
_NEEDS = {"scores": ("queries", "keys"), "probabilities": ("scores",), "head_outputs": ("probabilities", "values")}


@dataclass
class _Served:
    tensor: Tensor
    clean: int  # its version when it was made; _WRITTEN if the user's own
    stamp: Any  # of what it was computed from

    @property
    def edited(self) -> bool:
        return self.tensor._version != self.clean


class AttentionCall:
    """Queries, keys, values, scores, probabilities and head outputs of one call; each can be edited.

    The values follow one from the other; editing one changes those after it. Untouched, the modeling file's own
    eager kernel runs. Layouts: queries `[B, H, T, D]`, keys and values `[B, Hkv, S, D]`, scores and
    probabilities `[B, H, T, S]`, head outputs `[B, T, H, D]`.
    """

    recurrent = False

    def __init__(self, original: Callable, layer: int, args: tuple, kwargs: dict[str, Any]) -> None:
        names = ("module", "query", "key", "value", "attention_mask")
        given = {**dict(zip(names, args)), **kwargs}
        self._original, self._args, self._kwargs = original, args, kwargs
        self.layer = layer
        self.closed = False
        self._mask = given.get("attention_mask")
        self._scaling = given.get("scaling", given["query"].shape[-1] ** -0.5)
        self._given = {"queries": given["query"], "keys": given["key"], "values": given["value"]}
        self._served: dict[str, _Served] = {}

    @property
    def edited(self) -> bool:
        return any(served.edited for served in self._served.values())

    @property
    def batch(self) -> int:
        return self._given["queries"].shape[0]

    def part(self, start: int, size: int) -> AttentionPart:
        return AttentionPart(self, slice(start, start + size))

    def read(self, name: str, rows: Rows = ALL) -> Tensor:
        """A stage as it now stands: a copy that may be edited in place."""
        served = self._served.get(name)
        if served is None or not (served.edited or served.stamp == self._inputs(name)):
            with ordinary():
                fresh = self._given[name].clone() if name in self._given else self._compute(name)
            served = self._served[name] = _Served(fresh, fresh._version, self._inputs(name))
        return take(served.tensor, rows)

    def write(self, name: str, value: Tensor, rows: Rows = ALL) -> None:
        """Replace a stage, for some rows; what follows from it is computed anew."""
        current = self.read(name)
        shape = tuple(take(current, rows).shape)
        if not isinstance(value, Tensor) or tuple(value.shape) != shape:
            got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ArgumentError(
                f"layers[{self.layer}].self_attn.{name}: got {got}, needs a tensor of shape {list(shape)}"
            )
        self._served[name] = _Served(put(current, rows, value.to(current.dtype)), _WRITTEN, self._inputs(name))

    def close(self) -> tuple[Tensor, Tensor | None]:
        """What the attention gets: its own kernel's results, unless something was edited."""
        outputs = (self.read("head_outputs"), self.read("probabilities")) if self.edited else None
        self.closed = True
        self._served.clear()
        return self._original(*self._args, **self._kwargs) if outputs is None else outputs

    def _inputs(self, name: str) -> Any:
        """Changes when a stage that `name` is computed from changes."""
        return tuple((self._inputs(stage), self._edits(stage)) for stage in _NEEDS.get(name, ()))

    def _edits(self, name: str) -> int | None:
        served = self._served.get(name)
        return served.tensor._version if served is not None and served.edited else None

    def _compute(self, name: str) -> Tensor:
        if name == "scores":
            queries, keys = self.read("queries"), self.read("keys")
            keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], 1)
            scores = queries @ keys.transpose(2, 3) * self._scaling
            return scores if self._mask is None else scores + self._mask[..., : keys.shape[-2]]
        if name == "probabilities":
            scores = self.read("scores")
            return torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)
        probabilities, values = self.read("probabilities"), self.read("values")
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
