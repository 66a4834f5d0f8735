"""`Trajectory`: every state of a call without loss, and what can be computed from it.

Every write is rank one, so the keys, the updates and the decays, with a state every 64 tokens, hold all of the states:
at key_dim = value_dim = 128 in a thirty-second of their size.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Sequence

import torch
from torch import Tensor

from ..errors import ArgumentError, OutOfRange
from . import after, checks, cpp_replay
from .pieces import ChunkTable, chunk_table
from .precision import exact


@dataclass(eq=False)
class Trajectory:
    """States of a call by what made them. It has its own storage and outlives the call's tensors.

    Attributes:
        chunk_states: `[B, n, Hv, K, V]`, the state entering each chunk; the first is the initial state.
        keys: `[B, T, Hk, K]` as the rule used them (normalised).
        updates: `[B, T, Hv, V]`, what each token wrote: `S_t = decay o S_{t-1} + k_t u_t^T`.
        decays: `[B, T, Hv]` or `[B, T, Hv, K]`, log decays.
        betas: `[B, T, Hv]`.
        chunk_starts: `[B, n]` int64, first token of each chunk; a row with fewer chunks is padded with T.
        written: `[B, n, Hv]` bool, whether that entering state was written (by `StateWrite`).
        final_state: `[B, Hv, K, V]`; packed: `[sequences, Hv, K, V]`.
        cu_seqlens: `[sequences + 1]` int64 on the CPU if the row is packed, else None.
    """

    chunk_states: Tensor
    keys: Tensor
    updates: Tensor
    decays: Tensor
    betas: Tensor
    chunk_starts: Tensor
    written: Tensor
    final_state: Tensor
    cu_seqlens: Tensor | None = None

    # -- states and what is read from them ---------------------------------------------------

    @exact
    def states(self, tokens: Any = None, heads: Sequence[int] | None = None) -> Tensor:
        """The states after `tokens`, `[B, t, Hv, K, V]`, or `[n, Hv, K, V]` for a mask.

        Args:
            tokens: None for all, "all", ints, a slice, or a bool mask `[B, T]`; negative ints count from the end.
            heads: value heads; default all.
        """
        return self._engine().states(self, tokens, heads)

    def state_after(self, token: int) -> Tensor:
        """The state after `token` (negative: from the end), `[B, Hv, K, V]`."""
        return self.states([checks.position("token", token, self.updates.shape[1])])[:, 0]

    @exact
    def norms(self, heads: Sequence[int] | None = None) -> Tensor:
        """Frobenius norm of the state after every token, `[B, T, Hv]`; no state is formed for a decay per head."""
        return self._engine().norms(self, heads)

    @exact
    def read(self, queries: Tensor) -> Tensor:
        """`S_t^T q_t` for queries `[B, T, Hk or Hv, K]` as the rule uses them (normalised, scaled): `[B, T, Hv, V]`."""
        return self._engine(queries).read(self, self._checked(queries))

    @exact
    def effective_attention(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """The attention pattern of the layer, exact, erasures included.

        The rule is linear in the values: `o_t = sum_j C[t, j] v_j` plus what initial and written states give, with

            C = (Q K^T o Gamma) (I + tril(diag(beta) K K^T o Gamma, -1))^-1 diag(beta)

        Args:
            queries: `[B, T, Hk or Hv, K]` as the rule uses them (normalised, scaled).

        Returns:
            weights `[B, Hv, T, T]`, lower triangular, and remainder `[B, T, Hv, V]`.
        """
        return after.effective_attention(self, self._checked(queries))

    # -- as a container ----------------------------------------------------------------------

    def __len__(self) -> int:
        """Rows."""
        return self.updates.shape[0]

    def __getitem__(self, rows: int | slice) -> Trajectory:
        """Some rows, as views. A packed trajectory is one row."""
        if not isinstance(rows, slice):
            if isinstance(rows, bool) or not hasattr(rows, "__index__"):
                raise ArgumentError(f"rows of a trajectory: got {rows!r}, needs an int or a slice")
            n = rows.__index__()
            if not -len(self) <= n < len(self):
                raise OutOfRange(f"row {n} of a trajectory of {len(self)} rows")
            rows = slice(n % len(self), n % len(self) + 1)
        elif (rows.step or 1) < 1:
            raise ArgumentError(f"rows of a trajectory: got {rows}, needs a slice that goes forward")
        if self.cu_seqlens is not None:
            return replace(self) if len(range(*rows.indices(1))) else self._map(lambda x: x[:0])
        return self._map(lambda x: x[rows])

    def to(self, *args: Any, **kwargs: Any) -> Trajectory:
        """As `Tensor.to`; a dtype is applied to the fields that are floating point."""
        to = torch.empty(0).to(*args, **kwargs)
        checks.storage_dtype(to.dtype)
        device_only = to.device if args or kwargs else None
        return self._map(lambda x: x.to(*args, **kwargs) if x.is_floating_point() else x.to(device_only))

    @property
    def nbytes(self) -> int:
        """Bytes of all fields."""
        return sum(x.numel() * x.element_size() for x in self.fields().values())

    def fields(self) -> dict[str, Tensor]:
        """The tensors by name, for storing; `from_fields` is the inverse."""
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: x for name, x in named.items() if x is not None}

    @classmethod
    def from_fields(cls, tensors: dict[str, Tensor]) -> Trajectory:
        """From what `fields` gave; raises `ArgumentError` if one of them is missing, or is none."""
        names = {f.name for f in fields(cls)}
        missing, unknown = names - {"cu_seqlens"} - set(tensors), set(tensors) - names
        if missing or unknown:
            what = f"{sorted(missing)} missing" if missing else f"{sorted(unknown)}"
            raise ArgumentError(f"tensors: got {what}, needs what Trajectory.fields() gives")
        return cls(**tensors)

    def _checked(self, queries: Any) -> Tensor:
        batch, tokens, heads = self.betas.shape
        key_heads, key_dim = self.keys.shape[2:]
        given = queries.shape[2] if isinstance(queries, Tensor) and queries.ndim == 4 else None
        wanted = heads if given == heads else key_heads
        checks.tensor("queries", queries, (batch, tokens, wanted, key_dim), self.keys.device)
        return queries

    def _engine(self, *others: Any) -> Any:
        """What computes states, norms and reads: the C++ kernels where they can, else torch, which autograd follows."""
        return cpp_replay if cpp_replay.takes(self, *others) else after

    def _map(self, f: Any) -> Trajectory:
        own = {name: f(x) for name, x in self.fields().items() if name != "cu_seqlens"}
        return replace(self, **own)

    def table(self) -> ChunkTable:
        """The chunks, as the call that made this cut them."""
        batch, tokens = self.updates.shape[:2]
        bounds = None if self.cu_seqlens is None else tuple(self.cu_seqlens.tolist())
        cuts: list[tuple[int, int]] = []
        if self.written.numel() and bool(self.written.any()):
            row, column = self.written.any(-1).nonzero(as_tuple=True)
            cuts = sorted(zip(row.tolist(), (self.chunk_starts[row, column] - 1).tolist()))
        return chunk_table(batch, tokens, bounds, tuple(cuts))
