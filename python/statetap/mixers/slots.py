"""What a held call serves: copies that may be edited in place, and how an edit is noticed.

Everything served is a copy of ours, so nothing that the user keeps changes later and nothing that the
op saved for backward is edited. torch counts the in-place edits of a tensor and of all its views
(`_version`), so an edit is a count that moved; no hook, no proxy.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any, Callable, Iterable, Sequence

import torch
from torch import Tensor

from ..errors import ArgumentError

Rows = slice  # rows of the batch: slice(None) or slice(start, stop)
ALL = slice(None)
# what a value is called everywhere but in a call, where `attention_` would say nothing
STANDARD = {name: f"attention_{name}" for name in ("queries", "keys", "values", "head_outputs")}


def ordinary() -> Any:
    """What is made in here is an ordinary tensor: edits of inference tensors are not counted."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def copy_of(x: Tensor) -> Tensor:
    """A copy whose edits are counted."""
    with ordinary():
        return x.clone()


def take(x: Tensor, rows: Rows) -> Tensor:
    return x if rows == ALL else x[rows]


def put(x: Tensor, rows: Rows, value: Tensor) -> Tensor:
    """`x` with `rows` replaced, as a new tensor: earlier views of `x` keep what they show."""
    with ordinary():
        return value.clone() if rows == ALL else torch.cat([x[: rows.start], value, x[rows.stop :]])


def fitting(where: str, value: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`value` in the model's `dtype`, if it can stand where the model has a tensor like this.

    Raises:
        ArgumentError: not a tensor, another shape or device, or a dtype that would be rounded or reinterpreted.
    """
    if not isinstance(value, Tensor):
        raise ArgumentError(f"{where}: got {type(value).__name__}, needs a tensor of shape {list(shape)}")
    if tuple(value.shape) != tuple(shape):
        raise ArgumentError(f"{where}: got shape {list(value.shape)}, needs {list(shape)}")
    if value.device != device:
        raise ArgumentError(f"{where}: got a tensor on {value.device}, and this layer is on {device}")
    fits = value.is_floating_point() and torch.promote_types(value.dtype, dtype) == dtype
    if not fits:
        raise ArgumentError(f"{where}: got {value.dtype}, and the model computes in {dtype}; cast it with .to({dtype})")
    return value.to(dtype)


class Argument:
    """One argument of a call: what the model passed, or the served copy once that was edited."""

    def __init__(self, given: Tensor | None, serve: Callable[[Tensor], Tensor] = copy_of) -> None:
        self.given = given
        self._serve = serve
        self._copy: Tensor | None = None
        self._clean = 0  # version of the copy when it was made
        self._assigned = 0

    def read(self, rows: Rows = ALL) -> Tensor | None:
        """The copy to look at and to edit, `rows` of it."""
        if self._copy is None and self.given is not None:
            with ordinary():
                self._copy = self._serve(self.given)
            self._clean = self._copy._version
        return None if self._copy is None else take(self._copy, rows)

    def write(self, rows: Rows, value: Tensor) -> None:
        whole = self.read()
        self._copy = put(value if whole is None else whole, ALL if whole is None else rows, value)
        self._assigned += 1

    @property
    def served(self) -> Tensor | None:
        return self._copy

    @property
    def edited(self) -> bool:
        return self._copy is not None and (self._assigned > 0 or self._copy._version != self._clean)

    @property
    def stamp(self) -> tuple[int, int] | None:
        """Changes when the value that the op must get changes."""
        return (self._assigned, self._copy._version) if self.edited else None  # type: ignore[union-attr]

    @property
    def value(self) -> Tensor | None:
        """What the op gets: the model's own tensor as long as nothing was edited."""
        return self._copy if self.edited else self.given


class Result:
    """A result that may be edited. What was edited stays; the rest follows when the call is computed anew."""

    def __init__(self) -> None:
        self._computed: Tensor | None = None
        self._copy: Tensor | None = None
        self._clean = 0
        self._kept: Tensor | None = None  # bool: positions that are the user's

    def read(self, computed: Tensor, rows: Rows = ALL) -> Tensor:
        return take(self._rebase(computed), rows)

    def write(self, computed: Tensor, rows: Rows, value: Tensor) -> None:
        copy = self._rebase(computed)
        kept = torch.zeros_like(copy, dtype=torch.bool) if self._kept is None else self._kept.clone()
        kept[rows] = True
        self._copy, self._kept = put(copy, rows, value), kept
        self._clean = self._copy._version

    def value(self, computed: Tensor) -> Tensor:
        """What the model gets: what was computed, with the user's edits."""
        return computed if self._copy is None else self._rebase(computed)

    @property
    def served(self) -> Tensor | None:
        return self._copy

    @property
    def edited(self) -> bool:
        return self._kept is not None or (self._copy is not None and self._copy._version != self._clean)

    def _rebase(self, computed: Tensor) -> Tensor:
        if self._computed is computed:
            return self._copy  # type: ignore[return-value]
        if self.edited:
            with ordinary():
                kept = self._copy != self._computed
                self._kept = kept if self._kept is None else kept | self._kept
                self._copy = torch.where(self._kept, self._copy, computed)  # type: ignore[arg-type]
        else:
            self._copy = copy_of(computed)
        self._computed, self._clean = computed, self._copy._version
        return self._copy


class Served:
    """What a call had served when it closed. An edit of it then reaches nothing; it is not kept alive to see that."""

    def __init__(self, where: str, served: Iterable[tuple[str, Tensor | None]]) -> None:
        self._where = where
        self._served = [(name, weakref.ref(x), x._version) for name, x in served if x is not None]

    def edited(self) -> list[str]:
        """The values that were edited since."""
        found = [(name, ref(), version) for name, ref, version in self._served]
        return [f"{self._where}.{name}" for name, x, version in found if x is not None and x._version != version]


class Snapshot:
    """A copy that is served to be read only: an edit of it would go nowhere, so it is noticed."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._clean = tensor._version if not tensor.is_inference() else None

    @property
    def edited(self) -> bool:
        return self._clean is not None and self.tensor._version != self._clean
