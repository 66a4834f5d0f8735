"""One call as the launchers see it: its sizes, where its chunks lie, its configurations, and how a kernel is started."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .configs import Config, lookup

CHUNK = 64
"""Tokens of a chunk."""

PLAIN, PACKED, CUT = 0, 1, 2
"""Rows of equal length; sequences of any length; cut at state writes as well."""

PIECES = {"fast": 1, "high": 2, "exact": 3}
"""bf16 pieces of fp32 numbers, by `precision`."""

INPUT_PIECES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
"""bf16 pieces that hold a number of this dtype without loss."""


@dataclass
class Within:
    """What the kernels within a chunk hand to the scan; planes of pieces come first. None where it is not needed.

    solved, products: `[pieces, B, T, Hv, 64]` bf16. For a decay per head: k_from_start, q_from_start, k_to_end, squares
    (of the keys) `[B, T, Hv]`, total `[slots, Hv]`. Per key channel: queries, keys, last_keys `[pieces, B, T, Hv, K]`
    bf16, total `[slots, Hv, K]`, lower `[B, T, Hv, 64]`.
    """

    products: Tensor
    solved: Tensor | None = None
    total: Tensor | None = None
    q_from_start: Tensor | None = None
    k_from_start: Tensor | None = None
    k_to_end: Tensor | None = None
    squares: Tensor | None = None
    queries: Tensor | None = None
    keys: Tensor | None = None
    last_keys: Tensor | None = None
    lower: Tensor | None = None


@dataclass(frozen=True)
class Layout:
    """Where the chunks of a call lie. A chunk's number is its slot, row by row.

    kind: PLAIN, PACKED or CUT. starts, lengths, following (the slot after each, or `slots +` its sequence), write_of (the
    write that made its entering state, or -1): `[slots]`; first_slot, chunk_count: `[sequences]`; all None for PLAIN.
    """

    kind: int
    slots: int
    per_row: int
    sequences: int
    starts: Tensor | None = None
    lengths: Tensor | None = None
    following: Tensor | None = None
    first_slot: Tensor | None = None
    chunk_count: Tensor | None = None
    write_of: Tensor | None = None


@dataclass
class Launch:
    """Sizes of a call, where its chunks lie, and what its kernels are started with."""

    device: torch.device
    arch: str
    rows: int
    tokens: int
    Hk: int
    Hv: int
    K: int
    V: int
    channels: bool
    input_pieces: int
    pieces: int
    at: Layout

    bf16 = torch.bfloat16

    @property
    def BK(self) -> int:
        return padded(self.K)

    def config(self, kernel: str) -> Config:
        """The row of the table for this kernel."""
        row = lookup(kernel, self.arch, self.K, self.pieces, self.channels, self.input_pieces)
        return row.at_most(padded(self.V))

    def tiles(self, row: Config) -> int:
        """Tiles of value channels."""
        return -(-self.V // row.BV)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def within(self, solve: bool, squares: bool = False, lower: bool = False) -> Within:
        """Memory for what the kernels within a chunk write."""
        tokens = self.rows, self.tokens, self.Hv
        w = Within(self.empty(self.pieces, *tokens, CHUNK, dtype=self.bf16))
        if solve:
            w.solved = torch.empty_like(w.products)
            w.total = self.empty(self.at.slots, self.Hv, *([self.K] if self.channels else []))
        if self.channels:
            w.queries = self.empty(self.pieces, *tokens, self.K, dtype=self.bf16)
            if solve:
                w.keys, w.last_keys = torch.empty_like(w.queries), torch.empty_like(w.queries)
                lower = True
        else:
            w.q_from_start = self.empty(*tokens)
            if solve:
                w.k_from_start, w.k_to_end = self.empty(*tokens), self.empty(*tokens)
                w.squares = self.empty(*tokens) if squares else None
        w.lower = self.empty(*tokens, CHUNK) if lower else None
        return w

    def __call__(self, kernel: Any, programs: int, row: Config, *args: Any) -> None:
        """Start `programs` programs on the device of the call and its current stream."""
        if not programs:
            return
        guard = torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()
        with guard:
            kernel[(programs,)](*args, num_warps=row.warps, num_stages=row.stages)


def padded(size: int) -> int:
    """The next power of two, at least 16: what a matrix product takes."""
    return max(16, 1 << (size - 1).bit_length())
