"""`DeltaCall`: one checked call, as every backend gets it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Mapping, Sequence

import torch
from torch import Tensor

from .pieces import ChunkTable, chunk_table
from .reference import l2norm


@dataclass(frozen=True)
class Wanted:
    """Which side outputs a call wants; `states` is None, "all", "tokens" or "mask"."""

    trajectory: bool = False
    states: str | None = None
    tokens: tuple[int, ...] = ()
    mask: Tensor | None = None
    heads: tuple[int, ...] | None = None
    norms: bool = False
    probes: Tensor | None = None
    dtype: torch.dtype | None = None

    @property
    def looks(self) -> bool:
        """Whether it wants anything of single states."""
        return self.states is not None or self.norms or self.probes is not None


@dataclass(frozen=True)
class Writes:
    """State writes, one for each (row, token), in that order.

    heads: `[n, Hv]` bool; values: `[n, Hv, K, V]`.
    """

    cuts: tuple[tuple[int, int], ...]
    heads: Tensor
    values: Tensor


@dataclass(frozen=True)
class DeltaCall:
    """The arguments of `gated_delta_rule`, checked and with defaults filled in."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    scale: float
    initial_state: Tensor | None = None
    normalise: bool = False
    bounds: tuple[int, ...] | None = None
    writes: Writes | None = None
    wanted: Wanted = field(default_factory=Wanted)
    precision: str = "high"
    buffers: Mapping[str, Tensor] = field(default_factory=dict)

    def buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for a result: the caller's (`out=`) if it is of this kind, else new."""
        given = self.buffers.get(name)
        fits = given is not None and given.shape == tuple(shape) and given.dtype == dtype and given.is_contiguous()
        if fits and given.device == self.v.device:  # type: ignore[union-attr]
            return given  # type: ignore[return-value]
        return torch.empty(tuple(shape), dtype=dtype, device=self.v.device)

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in: fp64 if any input is, else fp32."""
        given = (self.q, self.k, self.v, self.g, self.beta, self.initial_state)
        double = any(x is not None and x.dtype == torch.float64 for x in given)
        return torch.float64 if double else torch.float32

    @property
    def heads(self) -> int:
        return self.v.shape[2]

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """`[sequences, Hv, K, V]`."""
        rows = self.v.shape[0] if self.bounds is None else len(self.bounds) - 1
        return rows, self.heads, self.k.shape[3], self.v.shape[3]

    @property
    def table(self) -> ChunkTable:
        cuts = () if self.writes is None else self.writes.cuts
        return chunk_table(self.v.shape[0], self.v.shape[1], self.bounds, cuts)

    def describe(self) -> str:
        """The call's shapes, for messages."""
        g = "none" if self.g is None else list(self.g.shape)
        return f"q {list(self.q.shape)} {self.q.dtype} on {self.q.device}, v {list(self.v.shape)}, g {g}"


@dataclass(frozen=True)
class Prepared:
    """The call's tensors as the rule uses them, in the dtype of the computation.

    q, k: `[B, T, Hk, K]`, normalised if asked for, q scaled; v: `[B, T, Hv, V]`; g: `[B, T, Hv, 1]` or `[B, T, Hv, K]`;
    beta: `[B, T, Hv]`; state: `[sequences, Hv, K, V]`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor


def prepare(call: DeltaCall) -> Prepared:
    """Cast, normalise, scale, and fill in what was left out."""
    dtype = call.dtype
    q, k, v = (x.to(dtype) for x in (call.q, call.k, call.v))
    if call.normalise:
        q, k = l2norm(q, call.scale), l2norm(k)
    else:
        q = q * call.scale
    ones = v.new_ones(())
    beta = ones.expand(v.shape[:3]) if call.beta is None else call.beta.to(dtype)
    g = v.new_zeros(()).expand(v.shape[:3]) if call.g is None else call.g.to(dtype)
    state = v.new_zeros(call.state_shape) if call.initial_state is None else call.initial_state.to(dtype)
    return Prepared(q, k, v, g[..., None] if g.ndim == 3 else g, beta, state)
