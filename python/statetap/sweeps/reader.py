"""Reading a run back: `statetap.open(path)`. Needs numpy; torch only where torch tensors are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ArgumentError, CaptureError
from . import store
from .column import Column, whole_number
from .row import Row
from .shard import Shard


def open(path: str | Path) -> Run:
    """Open a run, finished or not.

    Raises:
        CaptureError: there is no run, or its files are damaged.
    """
    return Run(path)


class Run:
    """A run on disk. Values are read when they are asked for.

    Attributes:
        path: the run's folder.
        manifest: what was captured, from which model, over which data.
        unit_rows: rows before each unit, by what a row is: `{"document": [units + 1], "token": ...}`.

    Example:
        >>> run = statetap.open("runs/x")
        >>> run["linear_attn.state_output", 0][3:7]        # [4, heads, key_dim, value_dim]
        >>> run.row(3).text, run.row(3).trajectory(0)
    """

    def __init__(self, path: str | Path, as_numpy: bool = False) -> None:
        self.path, self.as_numpy = Path(path), as_numpy
        self.manifest = store.read_manifest(self.path)
        rows = [store.read_record(self.path, unit)["rows"] for unit in range(self._units())]
        kinds = ("document", "token", "position", "chunk")
        self.unit_rows = {k: np.cumsum([0, *(r[k] for r in rows)], dtype=np.int64) for k in kinds}
        # maps of a run's many files are not all kept
        self.shard = lru_cache(64)(lambda unit: Shard(store.shard_path(self.path, store.SHARDS, unit)))
        self.token_file = lru_cache(64)(lambda unit: Shard(store.shard_path(self.path, store.TOKENS, unit)))

    def _units(self) -> int:
        """How many units there are, none missing between them."""
        numbers = store.numbers_of(self.path, store.SHARDS)
        count = self.manifest["totals"]["units"] if self.finished else len(numbers)
        missing = sorted(set(range(count)) - set(numbers))
        if missing:
            path = store.shard_path(self.path, store.SHARDS, missing[0])
            raise CaptureError(f"{path} is missing; the same capture command makes it anew")
        return count

    # -- what it holds -----------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether the sweep came to its end."""
        return self.manifest["finished"] is not None

    @property
    def layers(self) -> list[int]:
        """The captured blocks."""
        return list(self.manifest["identity"]["layers"])

    @property
    def values(self) -> list[str]:
        """Names of what was captured, as they are asked for; a trajectory is several."""
        return [f"linear_attn.{field}" for field in self.manifest["layouts"]]

    def __len__(self) -> int:
        """Documents captured so far."""
        return int(self.unit_rows["document"][-1])

    @property
    def tokens(self) -> int:
        """Tokens captured so far."""
        return int(self.unit_rows["token"][-1])

    @property
    def skipped(self) -> list[tuple[int, str]]:
        """Lines that were left out, with reasons."""
        return [(line, reason) for record in self._records() for line, reason in record["skipped"]]

    @property
    def overflow(self) -> list[dict[str, Any]]:
        """How many values became infinite in float16: layer, value, head, count."""
        counts: dict[tuple[int, str, int], int] = {}
        for record in self._records():
            for where in record["overflow"]:
                key = where["layer"], where["value"], where["head"]
                counts[key] = counts.get(key, 0) + where["count"]
        names = ("layer", "value", "head", "count")
        return [dict(zip(names, (*key, count))) for key, count in sorted(counts.items())]

    def _records(self) -> Iterator[dict[str, Any]]:
        return (store.read_record(self.path, unit) for unit in range(len(self.unit_rows["document"]) - 1))

    def numpy(self) -> Run:
        """The same run, giving numpy arrays; torch is not imported. bfloat16 needs `ml_dtypes`."""
        return Run(self.path, as_numpy=True)

    def __repr__(self) -> str:
        state = "finished" if self.finished else "unfinished"
        held = ", ".join(self.values)
        return f"Run({str(self.path)!r}: {len(self)} documents, layers {self.layers}, {held}; {state})"

    # -- values ------------------------------------------------------------------------------

    def __getitem__(self, key: tuple[str, int]) -> Column:
        """A value of a layer: `run["linear_attn.state_output", 0]`, lazy, in the corpus's order."""
        if not isinstance(key, tuple) or len(key) != 2:
            raise ArgumentError(f"run[...]: got {key!r}, needs (value, layer), e.g. ('linear_attn.state_output', 0)")
        value, layer = key
        if not isinstance(value, str):
            raise ArgumentError(f"value: got {value!r}, needs a name, one of {', '.join(self.values)}")
        field = value.removeprefix("linear_attn.")
        if field not in self.manifest["layouts"]:
            raise ArgumentError(f"value: {value!r} was not captured; there is {', '.join(self.values)}")
        layer = whole_number("layer", layer)
        if layer not in self.layers:
            raise ArgumentError(f"layer: {layer} was not captured; there is {', '.join(map(str, self.layers))}")
        return Column(self, field, layer)

    def row(self, document: int) -> Row:
        """A document, by its number in the corpus's order (negative: from the end)."""
        count, document = len(self), whole_number("row", document)
        if not -count <= document < count:
            raise ArgumentError(f"row: {document} is outside of the run's {count} documents")
        return Row(self, document % count)

    def rows(self) -> Iterator[Row]:
        """All documents, one after the other."""
        return map(self.row, range(len(self)))

    def give(self, x: np.ndarray, dtype: str) -> Any:
        """An array of the run in the form that is asked for: torch, or numpy; a copy."""
        if self.as_numpy:
            return np.array(x).view(_bfloat16()) if dtype == "bfloat16" else np.array(x)
        import torch

        tensor = torch.from_numpy(np.array(x))
        return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def _bfloat16() -> Any:
    try:
        import ml_dtypes
    except ImportError:
        raise CaptureError("bfloat16 in numpy needs ml_dtypes: pip install ml_dtypes") from None
    return ml_dtypes.bfloat16
