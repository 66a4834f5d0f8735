"""What a call can be asked for besides its outputs, and what it gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping, Sequence

import torch
from torch import Tensor

from .trajectory import Trajectory


@dataclass(frozen=True)
class Taps:
    """Side outputs of a call; a call without taps does not pay for them.

    Attributes:
        trajectory: every state without loss, as a `Trajectory`.
        states: which states to give: "all", ints, a slice, or a bool mask `[B, T]`.
        heads: value heads that states, norms and reads are restricted to.
        norms: the Frobenius norm of the state after every token.
        probes: vectors to read every state with: `[P, K]`, `[Hv, P, K]` or `[B, T, Hv, P, K]`.
        dtype: storage dtype of states, chunk states and updates; default that of the state.
        out: preallocated tensors to fill, by field name.
    """

    trajectory: bool = False
    states: str | int | slice | Sequence[int] | Tensor | None = None
    heads: Sequence[int] | None = None
    norms: bool = False
    probes: Tensor | None = None
    dtype: torch.dtype | None = None
    out: Mapping[str, Tensor] | None = None


@dataclass(frozen=True)
class StateWrite:
    """Replace the state after `token`: that token's own output reads `value`, later tokens continue from it.

    Attributes:
        token: position in the row, negative from the end; in a packed row it counts along the row.
        value: broadcasts to `[rows, heads, K, V]`.
        rows: rows of the batch, default all.
        heads: value heads, default all.
    """

    token: int
    value: Tensor
    rows: Sequence[int] | None = None
    heads: Sequence[int] | None = None


@dataclass
class RecurrenceOutput:
    """Results of a call; what was not asked for is None.

    Attributes:
        outputs: `[B, T, Hv, V]` in v's dtype.
        final_state: `[B, Hv, K, V]` (packed: `[N, Hv, K, V]`), fp32, or fp64 if an input is.
        trajectory: see `Trajectory`.
        states: `[B, t, Hv, K, V]`; for a mask `[n, Hv, K, V]` in row-major order.
        norms: `[B, T, Hv]`, in the state's dtype.
        reads: `[B, T, Hv, P, V]` in v's dtype.
    """

    outputs: Tensor
    final_state: Tensor
    trajectory: Trajectory | None = None
    states: Tensor | None = None
    norms: Tensor | None = None
    reads: Tensor | None = None

    def __iter__(self) -> Any:
        """Unpacks as flash-linear-attention's functions return: `o, final_state = ...`."""
        return iter((self.outputs, self.final_state))
