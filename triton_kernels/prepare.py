"""Queries and keys as the other kernels take them: factors of the l2-norm, and bf16 pieces of wider inputs.

Keys are never rounded after normalisation: they stay as they came, and the factor of a token goes into its decays.
"""

import triton
import triton.language as tl

from .primitives import store_pieces


@triton.jit(do_not_specialize=["count"])
def prepare_kernel(
    x, pieces, factor, normalised, count, plane,
    K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr,
    SPLIT: tl.constexpr, NORMALISE: tl.constexpr, KEEP: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Some (token, head) rows of x `[count, K]`: factor `1 / sqrt(sum x^2 + 1e-6)`, the normalised row, the pieces."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, BK)
    inside = row < count
    mask = inside[:, None] & (k < K)[None, :]
    offsets = row[:, None] * K + k[None, :]
    raw = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    if SPLIT:
        store_pieces(pieces, plane, offsets, raw, mask, PIECES)
    if NORMALISE:
        by = 1.0 / tl.sqrt(tl.sum(raw * raw, 1) + 1e-6)
        tl.store(factor + row, by, mask=inside)
        raw = raw * by[:, None]
    if KEEP:
        tl.store(normalised + offsets, raw, mask=mask)


def prepare(launch, x, normalise, keep=False):
    """x `[B, T, Hk, K]`; gives (pieces `[n, B, T, Hk, K]` bf16, factor `[B, T, Hk]` or None, normalised fp32 or None).

    bf16 is its own one piece; an fp16 number is two and an fp32 number three, without loss.
    """
    wide = x.dtype != launch.bf16
    planes = launch.empty(launch.input_pieces, *x.shape, dtype=launch.bf16) if wide else x[None]
    factor = launch.empty(*x.shape[:3]) if normalise else None
    normalised = launch.empty(*x.shape) if keep else None
    if wide or normalise or keep:
        row = launch.config("prepare")
        count = x.numel() // x.shape[3]
        launch(
            prepare_kernel, triton.cdiv(count, row.rows), row,
            x, planes, factor, normalised, count, x.numel(),
            launch.K, launch.BK, row.rows, wide, normalise, keep, launch.input_pieces,
        )  # fmt: skip
    return planes, factor, normalised
