"""Within a chunk, for a decay per head: the triangular solve, the products of queries and keys, the decays.

    T = (I + tril(diag(beta) K K^T o Gamma, -1))^-1 diag(beta)        P = scale tril(Q K^T o Gamma)

and for every token the decay from the chunk's start and to its end, with the factors of the l2-norm in them. All chunks
at once; no token of another chunk is looked at.
"""

import triton
import triton.language as tl

from .invert import invert
from .primitives import (
    C,
    chunk_at,
    decay_to_each,
    dot,
    load_or_one,
    load_pieces,
    program,
    store_pieces,
    unit_lower_inverse,
)


@triton.jit(do_not_specialize=["tokens", "per_row"])
def solve_kernel(
    q, k, q_factor, k_factor, g, beta,
    solved, lower, products, k_from_start, q_from_start, k_to_end, total, squares,
    starts, lengths, tokens, per_row, scale, input_plane, plane,
    Hk: tl.constexpr, Hv: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, LAYOUT: tl.constexpr,
    NORMALISE: tl.constexpr, GATED: tl.constexpr, BETA: tl.constexpr, SOLVE: tl.constexpr, INVERT: tl.constexpr,
    SQUARES: tl.constexpr,
    INPUTS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """One (chunk, value head). SOLVE off: only the products and what the queries see of the entering state; INVERT off: the
    triangle is left in `lower`, for `invert`."""
    _, head, slot = program(1, Hv)
    key_head = head // (Hv // Hk)
    start, length = chunk_at(slot, starts, lengths, tokens, per_row, LAYOUT)
    i = tl.arange(0, C)
    inside = i < length
    base = start * Hv + head
    token = i * Hv  # offsets within the chunk fit in 32 bits
    of_key = start * Hk + key_head
    rows = of_key * K
    qk = tl.zeros([C, C], dtype=tl.float32)
    kk = tl.zeros([C, C], dtype=tl.float32)
    for tile in range(0, (K + KB - 1) // KB):
        n = tile * KB + tl.arange(0, KB)
        offsets = i[:, None] * (Hk * K) + n[None, :]
        mask = inside[:, None] & (n < K)[None, :]
        k0, k1, k2 = load_pieces(k + rows, input_plane, offsets, mask, INPUTS)
        q0, q1, q2 = load_pieces(q + rows, input_plane, offsets, mask, INPUTS)
        c0, c1, c2 = tl.trans(k0), tl.trans(k1), tl.trans(k2)
        qk = dot(q0, q1, q2, c0, c1, c2, qk, INPUTS, INPUTS, 3)
        if SOLVE:
            kk = dot(k0, k1, k2, c0, c1, c2, kk, INPUTS, INPUTS, 3)
    by_k = load_or_one(k_factor, of_key, i * Hk, inside, NORMALISE)
    by_q = load_or_one(q_factor, of_key, i * Hk, inside, NORMALISE) * scale
    if GATED:
        log_decay = tl.load(g + base + token, mask=inside, other=0.0).to(tl.float32)
        next_log_decay = tl.load(g + base + token + Hv, mask=i < length - 1, other=0.0).to(tl.float32)
        gamma = decay_to_each(log_decay)
        from_start = tl.exp(tl.cumsum(log_decay, 0))
        to_end = tl.exp(tl.cumsum(next_log_decay, 0, reverse=True))
        over_all = tl.exp(tl.sum(log_decay, 0))
    else:
        gamma = tl.where(i[:, None] >= i[None, :], 1.0, 0.0)
        from_start = tl.full([C], 1.0, tl.float32)
        to_end = from_start
        over_all = 1.0
    square = i[:, None] * (Hv * C) + i[None, :]
    gamma = gamma * by_k[None, :]
    tl.store(q_from_start + base + token, from_start * by_q, mask=inside)
    store_pieces(products + base * C, plane, square, qk * gamma * by_q[:, None], inside[:, None], PIECES)
    if SOLVE:
        tl.store(k_from_start + base + token, from_start * by_k, mask=inside)
        tl.store(k_to_end + base + token, to_end * by_k, mask=inside)
        tl.store(total + slot.to(tl.int64) * Hv + head, over_all)
        if SQUARES:
            own = tl.sum(tl.where(i[:, None] == i[None, :], kk, 0.0), 1)
            tl.store(squares + base + token, own * by_k * by_k, mask=inside)
        kk = kk * gamma * by_k[:, None]
        if INVERT:
            strength = load_or_one(beta, base, token, inside, BETA)
            below = tl.where(i[:, None] > i[None, :], kk * strength[:, None], 0.0)
            inverse = unit_lower_inverse(below, PIECES) * strength[None, :]
            store_pieces(solved + base * C, plane, square, inverse, inside[:, None], PIECES)
        else:
            tl.store(lower + base * C + square, kk, mask=inside[:, None])


def solve(launch, q, k, q_factor, k_factor, g, beta, scale, squares=False):
    """q, k: pieces `[n, B, T, Hk, K]`; g, beta `[B, T, Hv]` or None. Gives a `Within`."""
    apart = not launch.config("solve").fused
    within = launch.within(solve=True, squares=squares, lower=apart)
    _launch(launch, within, q, k, q_factor, k_factor, g, beta, scale)
    if apart:
        invert(launch, within, beta)
    return within


def project(launch, q, k, q_factor, k_factor, g, scale):
    """Only what other queries need: the products and what they see of the entering state."""
    within = launch.within(solve=False)
    _launch(launch, within, q, k, q_factor, k_factor, g, None, scale)
    return within


def _launch(launch, w, q, k, q_factor, k_factor, g, beta, scale):
    row = launch.config("solve")
    launch(
        solve_kernel, launch.at.slots * launch.Hv, row,
        q, k, q_factor, k_factor, g, beta,
        w.solved, w.lower, w.products, w.k_from_start, w.q_from_start, w.k_to_end, w.total, w.squares,
        launch.at.starts, launch.at.lengths, launch.tokens, launch.at.per_row, scale, k[0].numel(), w.products[0].numel(),
        launch.Hk, launch.Hv, launch.K, row.KB, launch.at.kind,
        k_factor is not None, g is not None, beta is not None, w.solved is not None, row.fused, w.squares is not None,
        launch.input_pieces, launch.pieces,
    )  # fmt: skip
