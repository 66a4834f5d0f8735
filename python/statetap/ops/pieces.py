"""Cutting rows into chunks: at packed sequences, at state writes, and every `CHUNK` tokens.

A sequence is a row, or one of the packed sequences of a row. A write ends a piece of it after its token, so that
the next chunk starts from the written state. Chunks are numbered step by step: the first chunk of every
sequence, then the second of every one that has a second, longest sequences first. So a step of the scan over
chunks is a slice of the chunk axis, and a prefix of the sequences.
"""

from __future__ import annotations

import itertools
from array import array
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64

Cut = tuple[int, int]  # (row, token): a state is written after this token


@dataclass(frozen=True)
class Chunk:
    """Tokens `start` to `start + length` of `row`; `write`: index of the write that made its entering state, or -1."""

    sequence: int
    row: int
    start: int
    length: int
    write: int = -1


class ChunkTable:
    """The chunks of a call.

    Attributes:
        chunks: all of them, step by step.
        active: how many sequences each step of the scan has.
        order: the sequences as the scan numbers them (longest first).
        size: tokens a chunk is padded to.
        plain: whether chunks are simply every `size` tokens of each row.
    """

    def __init__(self, batch: int, tokens: int, bounds: tuple[int, ...] | None, cuts: tuple[Cut, ...]) -> None:
        self.batch, self.tokens, self.bounds, self.cuts = batch, tokens, bounds, cuts
        self.plain = bounds is None and not cuts
        pieces = [(b, 0, tokens) for b in range(batch)] if bounds is None else _between(bounds)
        per_sequence = [_cut(n, *piece, cuts) for n, piece in enumerate(pieces)]
        self.sequences = len(pieces)
        self.order = sorted(range(self.sequences), key=lambda n: -len(per_sequence[n]))
        steps = -(-tokens // CHUNK) if self.plain else max(map(len, per_sequence), default=0)
        self.chunks = [per_sequence[n][i] for i in range(steps) for n in self.order if i < len(per_sequence[n])]
        self.active = [sum(len(chunks) > i for chunks in per_sequence) for i in range(steps)]
        longest = tokens if self.plain else max((chunk.length for chunk in self.chunks), default=1)
        self.size = min(CHUNK, 1 << max(longest - 1, 0).bit_length())

    # -- tokens to chunks and back -----------------------------------------------------------

    def split(self, x: Tensor) -> Tensor:
        """`[B, T, H, D]` to chunks `[N, H, C, D]`; padding is zero."""
        heads, dim = x.shape[2:]
        if self.plain:
            steps = len(self.active)
            if steps * self.size > self.tokens:
                x = F.pad(x, (0, 0, 0, 0, 0, steps * self.size - self.tokens))
            x = x.reshape(self.batch, steps, self.size, heads, dim).permute(1, 0, 3, 2, 4)
            return x.reshape(steps * self.batch, heads, self.size, dim)
        token_of, valid = self._gather(x.device)
        x = x.reshape(self.batch * self.tokens, heads, dim)
        x = x[token_of].masked_fill(~valid[..., None, None], 0)  # a mask, not a product: 0 * nan is nan
        return x.transpose(1, 2)

    def join(self, x: Tensor) -> Tensor:
        """Chunks `[N, H, C, D]` to `[B, T, H, D]`."""
        heads, dim = x.shape[1], x.shape[3]
        if self.plain:
            steps = len(self.active)
            x = x.reshape(steps, self.batch, heads, self.size, dim).permute(1, 0, 3, 2, 4)
            return x.reshape(self.batch, steps * self.size, heads, dim)[:, : self.tokens]
        flat = x.transpose(1, 2).reshape(-1, heads, dim)
        return flat[self._positions(x.device)].reshape(self.batch, self.tokens, heads, dim)

    def _gather(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Flat token of each position of each chunk `[N, C]`, and whether there is one."""
        starts = torch.tensor([c.row * self.tokens + c.start for c in self.chunks], dtype=torch.long)
        lengths = torch.tensor([c.length for c in self.chunks], dtype=torch.long)
        inside = torch.arange(self.size)
        valid = inside < lengths[:, None]
        return torch.where(valid, starts[:, None] + inside, 0).to(device), valid.to(device)

    def _positions(self, device: torch.device) -> Tensor:
        """Flat position among the chunks of each flat token `[B T]`."""
        chunk, inside = self.where
        return (chunk * self.size + inside).to(device)

    @cached_property
    def where(self) -> tuple[Tensor, Tensor]:
        """Chunk of each flat token, and its position there: two `[B T]` on the CPU."""
        chunk, inside = torch.zeros(2, self.batch * self.tokens, dtype=torch.long)
        for n, c in enumerate(self.chunks):
            first = c.row * self.tokens + c.start
            chunk[first : first + c.length] = n
            inside[first : first + c.length] = torch.arange(c.length)
        return chunk, inside

    # -- states ------------------------------------------------------------------------------

    @cached_property
    def following(self) -> list[int]:
        """The chunk after each one in its sequence; past the last, `N +` the sequence's number in the scan."""
        rank = {n: i for i, n in enumerate(self.order)}
        seen: dict[int, int] = {}
        after = [0] * len(self.chunks)
        for n in range(len(self.chunks) - 1, -1, -1):
            sequence = self.chunks[n].sequence
            after[n] = seen.get(sequence, len(self.chunks) + rank[sequence])
            seen[sequence] = n
        return after

    @cached_property
    def after_cut(self) -> list[int]:
        """For each cut, the chunk that begins there."""
        return [n for _, n in sorted((chunk.write, n) for n, chunk in enumerate(self.chunks) if chunk.write >= 0)]

    def cut_places(self, device: torch.device) -> tuple[Tensor, ...]:
        """Rows and tokens of the cuts, to index with."""
        return tuple(torch.tensor(x, device=device) for x in zip(*self.cuts))

    @property
    def width(self) -> int:
        """Chunks of the row that has most."""
        return len(self.active) if self.plain else max(map(len, self.columns), default=0)

    @cached_property
    def columns(self) -> list[list[int]]:
        """For each row of the batch, its chunks in the order of their tokens."""
        rows: list[list[int]] = [[] for _ in range(self.batch)]
        for n in sorted(range(len(self.chunks)), key=lambda n: (self.chunks[n].start, self.chunks[n].length > 0)):
            rows[self.chunks[n].row].append(n)
        return rows

    def by_row(self, states: Tensor) -> Tensor:
        """Chunk states `[N, ...]` to `[B, n, ...]`, in the order of the tokens; a row with fewer ends in zeros."""
        if self.plain:
            return states.reshape(len(self.active), self.batch, *states.shape[1:]).transpose(0, 1)
        pad = [len(self.chunks)]
        index = [row + pad * (self.width - len(row)) for row in self.columns]
        states = torch.cat([states, states.new_zeros(1, *states.shape[1:])])
        return states[torch.tensor(index, dtype=torch.long, device=states.device)]

    def by_chunk(self, states: Tensor) -> Tensor:
        """The inverse of `by_row`."""
        if self.plain:
            return states[:, : len(self.active)].transpose(0, 1).flatten(0, 1)
        column = {n: i for row in self.columns for i, n in enumerate(row)}
        place = torch.tensor([(c.row, column[n]) for n, c in enumerate(self.chunks)], dtype=torch.long).reshape(-1, 2)
        row, col = place.to(states.device).unbind(1)
        return states[row, col]

    @cached_property
    def by_sequence(self) -> tuple[array, array]:
        """For the C++ kernels: (row, start, length, write, place among `by_row`) of each sequence's chunks in turn, and
        the number of each sequence's first chunk."""
        place = {n: row * self.width + i for row, chunks in enumerate(self.columns) for i, n in enumerate(chunks)}
        sequences: list[list[int]] = [[] for _ in range(self.sequences)]
        for n, chunk in enumerate(self.chunks):
            sequences[chunk.sequence].append(n)
        fields, first = array("q"), array("q", [0])
        for numbers in sequences:
            for n in numbers:
                chunk = self.chunks[n]
                fields.extend((chunk.row, chunk.start, chunk.length, chunk.write, place[n]))
            first.append(first[-1] + len(numbers))
        return fields, first

    @cached_property
    def starts(self) -> list[list[int]]:
        """First token of each chunk, for each row; padded with the number of tokens."""
        return [[self.chunks[n].start for n in row] + [self.tokens] * (self.width - len(row)) for row in self.columns]


@lru_cache(maxsize=256)
def chunk_table(
    batch: int, tokens: int, bounds: tuple[int, ...] | None = None, cuts: tuple[Cut, ...] = ()
) -> ChunkTable:
    """The table for these rows, packed sequences and cuts (sorted by row and token)."""
    return ChunkTable(batch, tokens, bounds, cuts)


def _between(bounds: tuple[int, ...]) -> list[tuple[int, int, int]]:
    return [(0, a, b) for a, b in itertools.pairwise(bounds)]


def _cut(sequence: int, row: int, start: int, stop: int, cuts: tuple[Cut, ...]) -> list[Chunk]:
    """The chunks of one sequence."""
    chunks, write = [], -1
    for index, (cut_row, token) in enumerate(cuts):
        if cut_row == row and start <= token < stop:
            chunks += _every_chunk(sequence, row, start, token + 1, write)
            start, write = token + 1, index
    if start < stop:
        chunks += _every_chunk(sequence, row, start, stop, write)
    elif write >= 0:  # written after the last token: an empty piece hands the state on
        chunks.append(Chunk(sequence, row, start, 0, write))
    return chunks


def _every_chunk(sequence: int, row: int, start: int, stop: int, write: int) -> list[Chunk]:
    firsts = range(start, stop, CHUNK)
    return [Chunk(sequence, row, a, min(CHUNK, stop - a), write if a == start else -1) for a in firsts]
