"""The triangular solve within a chunk, where it has a kernel of its own: after the products per key channel, and where a
kernel that does both would spill.

    T = (I + diag(beta) tril(K K^T o Gamma, -1))^-1 diag(beta)
"""

import triton
import triton.language as tl

from .primitives import C, chunk_at, load_or_one, program, store_pieces, unit_lower_inverse


@triton.jit(do_not_specialize=["tokens", "per_row"])
def invert_kernel(
    lower, beta, solved, starts, lengths, tokens, per_row, plane,
    Hv: tl.constexpr, LAYOUT: tl.constexpr, BETA: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """(I + diag(beta) tril(lower, -1))^-1 diag(beta), one (chunk, value head)."""
    _, head, slot = program(1, Hv)
    start, length = chunk_at(slot, starts, lengths, tokens, per_row, LAYOUT)
    i = tl.arange(0, C)
    inside = i < length
    token = start * Hv + head
    offsets = i[:, None] * (Hv * C) + i[None, :]
    strength = load_or_one(beta, token, i * Hv, inside, BETA)
    below = inside[:, None] & (i[:, None] > i[None, :])
    x = tl.load(lower + token * C + offsets, mask=below, other=0.0) * strength[:, None]
    store_pieces(solved + token * C, plane, offsets, unit_lower_inverse(x, PIECES) * strength[None, :], inside[:, None], PIECES)


def invert(launch, w, beta):
    """Fill `w.solved` from `w.lower`."""
    row = launch.config("invert")
    launch(
        invert_kernel, launch.at.slots * launch.Hv, row,
        w.lower, beta, w.solved, launch.at.starts, launch.at.lengths, launch.tokens, launch.at.per_row, w.solved[0].numel(),
        launch.Hv, launch.at.kind, beta is not None, launch.pieces,
    )  # fmt: skip
