"""One document of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .column import Column, unit_offsets

if TYPE_CHECKING:
    from ..ops import Trajectory
    from .reader import Run


class Row:
    """One document of a run.

    Attributes:
        document: its number in the corpus's order.
        line: the input line it is from (counted from 1).
        first_token: where it begins in that line's tokens, if the line was split.
    """

    def __init__(self, run: Run, document: int) -> None:
        self._run, self.document = run, document
        ends = run.unit_rows["document"]
        self._unit = int(np.searchsorted(ends, document, side="right")) - 1
        self._n = document - int(ends[self._unit])
        self.line = int(self._file.array("line")[self._n])
        self.first_token = int(self._file.array("first_token")[self._n])

    @property
    def _file(self) -> Any:
        return self._run.token_file(self._unit)

    def _span(self, row_is: str) -> slice:
        """Its rows in its unit."""
        start, stop = unit_offsets(self._run, self._unit, row_is)[self._n : self._n + 2]
        return slice(int(start), int(stop))

    def __len__(self) -> int:
        """Its tokens."""
        span = self._span("token")
        return span.stop - span.start

    @property
    def tokens(self) -> Any:
        """Its token ids, `[length]` int64."""
        return self._run.give(self._file.array("ids")[self._span("token")], "int64")

    @property
    def positions(self) -> list[int]:
        """The tokens after which its `states` were taken."""
        return self._file.array("positions")[self._span("position")].tolist()

    @property
    def text(self) -> str:
        """The input line's text, exactly, and whole even where the line was split or truncated."""
        start, stop = self._file.array("text_span")[self._n]
        return self._file.array("text")[start:stop].tobytes().decode("utf-8")

    def __getitem__(self, key: tuple[str, int]) -> Any:
        """A value of a layer for this document: `[heads, ...]`, or `[tokens, positions or chunks, heads, ...]`."""
        column: Column = self._run[key]
        part = column._part(self._unit)[self._span(column.row_is)]
        return self._run.give(part[0] if column.row_is == "document" else part, column.dtype)

    def trajectory(self, layer: int) -> Trajectory:
        """Every state of this document at a layer, as a `statetap.Trajectory` of one row (of torch tensors)."""
        import torch

        from ..ops import Trajectory

        if self._run.as_numpy:
            return type(self._run)(self._run.path).row(self.document).trajectory(layer)
        names = ("chunk_states", "keys", "updates", "decays", "betas", "final_state")
        fields = {name: self[f"linear_attn.trajectory.{name}", layer][None] for name in names}
        chunks, heads = fields["chunk_states"].shape[1:3]
        starts = torch.arange(chunks)[None] * self._run.manifest["chunk"]
        return Trajectory(**fields, chunk_starts=starts, written=torch.zeros(1, chunks, heads, dtype=torch.bool))

    def __repr__(self) -> str:
        return f"Row(document {self.document}, line {self.line}, {len(self)} tokens: {self.text[:40]!r})"
