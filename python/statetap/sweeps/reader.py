"""Reading a run back: `statetap.open(path)`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ArgumentError, CaptureError
from . import files
from .shard import Shard

if TYPE_CHECKING:
    from ..ops import Trajectory

_CHUNK = 64


def open(path: str | Path) -> Run:  # noqa: A001 - statetap.open reads like the builtin
    """Open a run, finished or not.

    Raises:
        CaptureError: there is no run, or its files are damaged.
    """
    return Run(path)


class Run:
    """A run on disk. Values are read when they are asked for.

    Attributes:
        manifest: what was captured, from which model, over which data.
        finished: whether the sweep came to its end.
        values: names of the captured values, as they are asked for.
        layers: the captured blocks.

    Example:
        >>> run = statetap.open("runs/x")
        >>> run["linear_attn.state_output", 0][3:7]        # [4, heads, key_dim, value_dim]
        >>> run.row(3).text, run.row(3).trajectory(0)
    """

    def __init__(self, path: str | Path, as_numpy: bool = False) -> None:
        self.path = Path(path)
        self.manifest = files.read_json(self.path / "manifest.json")
        if not isinstance(self.manifest, dict) or "identity" not in self.manifest:
            raise CaptureError(f"{self.path / 'manifest.json'} is not the manifest of a run")
        if self.manifest.get("format") != 1:
            raise CaptureError(f"{self.path} is of format {self.manifest.get('format')}; this statetap reads 1")
        self._numpy = as_numpy
        self._shards = self._open("shards")
        self._tokens = self._open("tokens")[: len(self._shards)]
        if len(self._tokens) < len(self._shards):
            raise CaptureError(f"{self.path / 'tokens'} has fewer files than {self.path / 'shards'}")
        self._firsts = np.array([s.metadata["first_document"] for s in self._shards], dtype=np.int64)

    def _open(self, folder: str) -> list[Shard]:
        found = sorted((self.path / folder).glob("*.safetensors"))
        for number, path in enumerate(found):
            if path.name != f"{number:05d}.safetensors":
                raise CaptureError(f"{path.with_name(f'{number:05d}.safetensors')} is missing")
        return [Shard(path) for path in found]

    # -- what it holds -----------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        return self.manifest["finished"] is not None

    @property
    def layers(self) -> list[int]:
        return list(self.manifest["identity"]["spec"]["layers"])

    @property
    def values(self) -> list[str]:
        return [f"linear_attn.{field}" for field in self.manifest["layouts"]]

    def __len__(self) -> int:
        """Documents captured so far."""
        return sum(s.metadata["documents"] for s in self._shards)

    @property
    def tokens(self) -> int:
        """Tokens captured so far."""
        return sum(s.metadata["tokens"] for s in self._shards)

    @property
    def skipped(self) -> list[tuple[int, str]]:
        """Lines that were left out, with reasons."""
        return [(line, why) for s in self._shards for line, why in s.metadata["skipped"]]

    @property
    def overflow(self) -> list[dict[str, Any]]:
        """Values that became infinite in float16: layer, value, head, count; one entry a shard."""
        return [entry for s in self._shards for entry in s.metadata["overflow"]]

    def numpy(self) -> Run:
        """The same run, giving numpy arrays; torch is not imported. bfloat16 needs `ml_dtypes`."""
        return Run(self.path, as_numpy=True)

    def __repr__(self) -> str:
        state = "finished" if self.finished else "unfinished"
        return (
            f"Run({str(self.path)!r}: {len(self)} documents, layers {self.layers}, {', '.join(self.values)}; {state})"
        )

    # -- values ------------------------------------------------------------------------------

    def __getitem__(self, key: tuple[str, int]) -> Column:
        """A value of a layer: `run["linear_attn.state_output", 0]`, lazy, in the corpus's order."""
        if not isinstance(key, tuple) or len(key) != 2:
            raise ArgumentError(f"run[...]: got {key!r}, needs (value, layer), e.g. ('linear_attn.state_output', 0)")
        value, layer = key
        field = str(value).removeprefix("linear_attn.")
        if field not in self.manifest["layouts"]:
            raise ArgumentError(f"value: {value!r} was not captured; there is {', '.join(self.values)}")
        if layer not in self.layers:
            raise ArgumentError(f"layer: {layer} was not captured; there is {', '.join(map(str, self.layers))}")
        return Column(self, field, layer)

    def row(self, document: int) -> Row:
        """A document, by its number in the corpus's order (negative: from the end)."""
        count = len(self)
        if not -count <= document < count:
            raise ArgumentError(f"row: {document} is outside of the run's {count} documents")
        return Row(self, document % count)

    def rows(self) -> Any:
        """All documents, one after the other."""
        return map(self.row, range(len(self)))

    def _give(self, x: np.ndarray, dtype: str) -> Any:
        """An array in the form that is asked for: torch, or numpy."""
        if self._numpy:
            return x.view(_bfloat16()) if dtype == "bfloat16" else x
        import torch

        tensor = torch.from_numpy(np.array(x))
        return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def _bfloat16() -> Any:
    try:
        import ml_dtypes
    except ImportError:
        raise CaptureError("bfloat16 in numpy needs ml_dtypes: pip install ml_dtypes") from None
    return ml_dtypes.bfloat16


class Column:
    """One value of one layer over the whole run; read by slicing.

    Rows are documents, or (for a value a token, a position, a chunk) one flat axis over all documents.
    """

    def __init__(self, run: Run, field: str, layer: int) -> None:
        self._run, self._name = run, f"{layer}.{field}"
        layout = run.manifest["layouts"][field]
        self.dtype, self.row_is, self._row_shape = layout["dtype"], layout["row"], tuple(layout["shape"])
        parts = [s.array(self._name) if s.metadata["documents"] else None for s in run._shards]
        self._parts = [p for p in parts if p is not None]
        self._ends = np.cumsum([0] + [len(p) for p in self._parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *self._row_shape)

    def __getitem__(self, key: Any) -> Any:
        """Rows by an int, a slice, or ints."""
        if isinstance(key, tuple):
            return self[key[0]][(slice(None), *key[1:])] if not hasattr(key[0], "__index__") else self[key[0]][key[1:]]
        if key is Ellipsis:
            key = slice(None)
        if hasattr(key, "__index__"):
            return self._run._give(self._take(np.array([self._inside(key.__index__())]))[0], self.dtype)
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            found = self._range(start, stop) if step == 1 else self._take(np.arange(start, stop, step))
        else:
            wanted = np.asarray(key)
            if wanted.dtype == bool:
                wanted = wanted.nonzero()[0]
            found = self._take(np.array([self._inside(int(n)) for n in wanted], dtype=np.int64))
        return self._run._give(found, self.dtype)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        found = self._run.numpy()[f"linear_attn.{self._name.split('.', 1)[1]}", int(self._name.split(".")[0])][:]
        return found if dtype is None else found.astype(dtype)

    def _inside(self, n: int) -> int:
        if not -len(self) <= n < len(self):
            raise IndexError(f"row {n} of {len(self)}")
        return n % len(self)

    def _range(self, start: int, stop: int) -> np.ndarray:
        parts = []
        for part, first, end in zip(self._parts, self._ends, self._ends[1:]):
            a, b = max(start - first, 0), min(stop - first, end - first)
            if a < b:
                parts.append(part[a:b])
        return np.concatenate(parts) if parts else self._empty()

    def _take(self, wanted: np.ndarray) -> np.ndarray:
        if not len(wanted):
            return self._empty()
        part = np.searchsorted(self._ends, wanted, side="right") - 1
        return np.stack([self._parts[p][n - self._ends[p]] for p, n in zip(part, wanted)])

    def _empty(self) -> np.ndarray:
        dtype = {"bfloat16": np.uint16}.get(self.dtype, self.dtype)
        return np.zeros((0, *self._row_shape), dtype)


class Row:
    """One document of a run.

    Attributes:
        document: its number in the corpus's order.
        line: the input line it is from (counted from 1).
        first_token: where it begins in that line's tokens, if the line was split.
        tokens: its token ids, `[length]` int64.
        text: the line's text, exactly.
        positions: where its `states` were taken.
    """

    def __init__(self, run: Run, document: int) -> None:
        self._run, self.document = run, document
        unit = int(np.searchsorted(run._firsts, document, side="right")) - 1
        while run._shards[unit].metadata["documents"] == 0:
            unit -= 1
        self._unit, self._n = unit, document - int(run._firsts[unit])
        file = run._tokens[unit]
        self._offsets = file.array("offsets")
        self._first, self._last = int(self._offsets[self._n]), int(self._offsets[self._n + 1])
        self.line = int(file.array("line")[self._n])
        self.first_token = int(file.array("first_token")[self._n])
        spans = file.array("position_offsets")
        self._span = int(spans[self._n]), int(spans[self._n + 1])
        self.positions = file.array("positions")[slice(*self._span)].tolist()

    def __len__(self) -> int:
        return self._last - self._first

    @property
    def tokens(self) -> Any:
        return self._run._give(self._run._tokens[self._unit].array("ids")[self._first : self._last], "int64")

    @property
    def text(self) -> str:
        file = self._run._tokens[self._unit]
        start, stop = file.array("text_span")[self._n]
        return file.array("text")[start:stop].tobytes().decode("utf-8")

    def __getitem__(self, key: tuple[str, int]) -> Any:
        """A value of a layer for this document."""
        column = self._run[key]
        array = self._run._shards[self._unit].array(column._name)
        span = {
            "document": (self._n, self._n + 1),
            "token": (self._first, self._last),
            "position": self._span,
            "chunk": self._chunks(),
        }[column.row_is]
        part = array[span[0] : span[1]]
        return self._run._give(part[0] if column.row_is == "document" else part, column.dtype)

    def trajectory(self, layer: int) -> Trajectory:
        """Every state of this document at a layer, as a `Trajectory` of one row."""
        import torch

        from ..ops import Trajectory

        run = self._run if not self._run._numpy else Run(self._run.path)
        row = run.row(self.document)
        names = ("chunk_states", "keys", "updates", "decays", "betas", "final_state")
        fields = {name: row[f"linear_attn.trajectory.{name}", layer][None] for name in names}
        chunks, heads = fields["chunk_states"].shape[1:3]
        starts = torch.arange(chunks)[None] * _CHUNK
        return Trajectory(**fields, chunk_starts=starts, written=torch.zeros(1, chunks, heads, dtype=torch.bool))

    def _chunks(self) -> tuple[int, int]:
        counts = -(-np.diff(self._offsets) // _CHUNK)
        ends = np.concatenate([[0], np.cumsum(counts)])
        return int(ends[self._n]), int(ends[self._n + 1])

    def __repr__(self) -> str:
        return f"Row(document {self.document}, line {self.line}, {len(self)} tokens: {self.text[:40]!r})"
