"""Drop-ins under flash-linear-attention's names: `from statetap.ops import chunk_gated_delta_rule`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..errors import ArgumentError
from .delta import gated_delta_rule


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """`(o, final_state)` as flash-linear-attention's function of this name; see `gated_delta_rule` for shapes.

    `**options`: what else `gated_delta_rule` takes (backend, precision).
    """
    unknown = set(options) - {"backend", "precision"}
    if unknown:
        raise ArgumentError(f"{sorted(unknown)[0]}: not an argument here; call gated_delta_rule for taps and writes")
    result = gated_delta_rule(q, k, v, g, beta, scale, initial_state, use_qk_l2norm_in_kernel, cu_seqlens, **options)
    return result.outputs, result.final_state if output_final_state else None


fused_recurrent_gated_delta_rule = chunk_gated_delta_rule
"""The same function: the backend chooses between chunks and a step."""


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """`(o, final_state)` as flash-linear-attention's function of this name: `g` is `[B, T, Hv, K]`."""
    if not isinstance(g, Tensor) or g.ndim != 4:
        got = f"shape {list(g.shape)}" if isinstance(g, Tensor) else type(g).__name__
        raise ArgumentError(f"g: got {got}, needs [B, T, Hv, K], a decay per key channel")
    return chunk_gated_delta_rule(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, **options
    )
