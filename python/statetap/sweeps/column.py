"""One value of one layer over a whole run."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ArgumentError, CaptureError, OutOfRange

if TYPE_CHECKING:
    from .reader import Run


class Column:
    """One value of one layer over the whole run; read by an int, a slice, ints or a mask over its rows.

    Rows are documents or, for a value a token, a position or a chunk, one flat axis over all documents in order:
    document `i` has the rows `offsets[i]` to `offsets[i + 1]`. Further indices are taken as of the result.

    Attributes:
        row_is: "document", "token", "position" or "chunk".
        dtype: its name.
        shape: `[rows, ...]`.
    """

    def __init__(self, run: Run, field: str, layer: int) -> None:
        self._run, self.name = run, f"{layer}.{field}"
        layout = run.manifest["layouts"][field]
        self.dtype, self.row_is = layout["dtype"], layout["row"]
        self._ends = run.unit_rows[self.row_is]
        self.shape = (len(self), *layout["shape"])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __repr__(self) -> str:
        return f"Column({self.name}: {self.dtype} {list(self.shape)}, a row a {self.row_is})"

    @property
    def offsets(self) -> np.ndarray:
        """`[documents + 1]` int64: the first row of each document."""
        units = range(len(self._ends) - 1)
        parts = [unit_offsets(self._run, unit, self.row_is)[:-1] + self._ends[unit] for unit in units]
        return np.concatenate([*parts, self._ends[-1:]])

    def __getitem__(self, key: Any) -> Any:
        key, rest = (key[0], key[1:]) if isinstance(key, tuple) and key else (key, ())
        if key is Ellipsis or (isinstance(key, tuple) and not key):
            key = slice(None)
        if _is_int(key):
            found = self._take(self._inside(np.array([operator.index(key)])))[0]
            return self._run.give(found, self.dtype)[rest] if rest else self._run.give(found, self.dtype)
        if isinstance(key, slice):
            try:
                start, stop, step = key.indices(len(self))
            except (TypeError, ValueError):
                raise OutOfRange(f"rows by {key}; the ends and the step of a slice are whole numbers") from None
            found = self._range(start, stop) if step == 1 else self._take(np.arange(start, stop, step))
        else:
            wanted = _array(key)
            if wanted.dtype == bool and wanted.shape != (len(self),):
                raise OutOfRange(f"a mask of shape {list(wanted.shape)} for {len(self)} rows")
            found = self._take(wanted.nonzero()[0] if wanted.dtype == bool else self._inside(wanted))
        return self._run.give(found, self.dtype)[(slice(None), *rest)]

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        run = self._run if self._run.as_numpy else self._run.numpy()
        layer, field = self.name.split(".", 1)
        found = run[field, int(layer)][:]
        return found if dtype is None else found.astype(dtype)

    def _inside(self, rows: np.ndarray) -> np.ndarray:
        rows = rows.astype(np.int64) if rows.size == 0 else rows
        if rows.ndim != 1 or not np.issubdtype(rows.dtype, np.integer):
            raise OutOfRange(f"rows by {rows.dtype} of shape {list(rows.shape)}; needs an int, a slice, ints or a mask")
        outside = rows[(rows < -len(self)) | (rows >= len(self))]
        if len(outside):
            raise OutOfRange(f"row {outside[0]} of {len(self)}")
        return rows % max(len(self), 1)

    def _range(self, start: int, stop: int) -> np.ndarray:
        parts = [self._empty()]
        first_unit = int(np.searchsorted(self._ends, start, side="right")) - 1
        for unit in range(first_unit, len(self._ends) - 1):
            first, end = int(self._ends[unit]), int(self._ends[unit + 1])
            if first >= stop:
                break
            if start < end and first < end:
                parts.append(self._part(unit)[max(start - first, 0) : stop - first])
        return np.concatenate(parts) if len(parts) != 2 else parts[1]

    def _take(self, rows: np.ndarray) -> np.ndarray:
        units = np.searchsorted(self._ends, rows, side="right") - 1
        picked = [self._part(int(unit))[row - self._ends[unit]] for unit, row in zip(units, rows)]
        return np.stack(picked) if picked else self._empty()

    def _part(self, unit: int) -> np.ndarray:
        """A unit's rows."""
        array = self._run.shard(unit).array(self.name)
        if array.shape != (self._ends[unit + 1] - self._ends[unit], *self.shape[1:]):
            raise CaptureError(f"{self._run.shard(unit).path} is damaged: {self.name!r} has shape {list(array.shape)}")
        return array

    def _empty(self) -> np.ndarray:
        return np.zeros((0, *self.shape[1:]), np.uint16 if self.dtype == "bfloat16" else self.dtype)


def _array(key: Any) -> np.ndarray:
    try:
        return np.asarray(key)
    except (TypeError, ValueError):  # a list of lists of different lengths, say
        raise OutOfRange(f"rows by {key!r}; needs an int, a slice, ints or a mask") from None


def _is_int(key: Any) -> bool:
    try:
        operator.index(key)
    except TypeError:
        return False
    return not isinstance(key, (bool, np.bool_))


def whole_number(name: str, key: Any) -> int:
    """A key that must be one; `ArgumentError` says what it is instead."""
    if not _is_int(key):
        raise ArgumentError(f"{name}: got {key!r}, needs a whole number")
    return operator.index(key)


def unit_offsets(run: Run, unit: int, row_is: str) -> np.ndarray:
    """`[documents + 1]`: where each of a unit's documents begins, in values whose rows are of this kind."""
    file = run.token_file(unit)
    offsets = file.array("offsets")
    if row_is == "document":
        return np.arange(len(offsets))
    if row_is == "token":
        return offsets
    if row_is == "position":
        return file.array("position_offsets")
    return np.concatenate([[0], np.cumsum(-(-np.diff(offsets) // run.manifest["chunk"]))]).astype(np.int64)
