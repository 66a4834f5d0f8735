"""Within a chunk, for a decay per key channel (Kimi delta attention).

The decay sits inside the products over key channels and does not factor, except around a boundary between two tokens:
exp(sum up to it) exp(sum from it), both <= 1. Blocks of 16 tokens meet around the later block's start, as products of
matrices; inside a block the keys are decayed on, token by token. For the scan, queries and keys are written with the
decay from the chunk's start in them, and keys with the decay to its end.
"""

import triton
import triton.language as tl

from .invert import invert
from .primitives import C, chunk_at, load_or_one, matmul, program, store_pieces

BLOCK = tl.constexpr(16)


@triton.jit(do_not_specialize=["tokens", "per_row"])
def decay_kernel(
    x, factor, g, from_start, to_end, total, starts, lengths, tokens, per_row, scale, plane,
    Hk: tl.constexpr, Hv: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, LAYOUT: tl.constexpr,
    NORMALISE: tl.constexpr, KEYS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """One (chunk, value head, tile of key channels): x with the decay from the start; KEYS: also to the end, and `total`."""
    TILES: tl.constexpr = (K + KB - 1) // KB
    tile, head, slot = program(TILES, Hv)
    key_head = head // (Hv // Hk)
    start, length = chunk_at(slot, starts, lengths, tokens, per_row, LAYOUT)
    i = tl.arange(0, C)
    n = tile * KB + tl.arange(0, KB)
    inside = i < length
    in_k = n < K
    mask = inside[:, None] & in_k[None, :]
    value = tl.load(x + (start * Hk + key_head) * K + i[:, None] * (Hk * K) + n[None, :], mask=mask, other=0.0)
    value = value.to(tl.float32) * scale
    if NORMALISE:
        value = value * tl.load(factor + start * Hk + key_head + i * Hk, mask=inside, other=0.0)[:, None]
    here = (start * Hv + head) * K
    offsets = i[:, None] * (Hv * K) + n[None, :]
    decay = tl.load(g + here + offsets, mask=mask, other=0.0).to(tl.float32)
    store_pieces(from_start + here, plane, offsets, value * tl.exp(tl.cumsum(decay, 0)), mask, PIECES)
    if KEYS:
        later = tl.load(g + here + offsets + Hv * K, mask=(i < length - 1)[:, None] & in_k[None, :], other=0.0)
        left = tl.exp(tl.cumsum(later.to(tl.float32), 0, reverse=True))
        store_pieces(to_end + here, plane, offsets, value * left, mask, PIECES)
        tl.store(total + (slot.to(tl.int64) * Hv + head) * K + n, tl.exp(tl.sum(decay, 0)), mask=in_k)


@triton.jit(do_not_specialize=["tokens", "per_row"])
def product_kernel(
    q, k, q_factor, k_factor, g, products, lower, starts, lengths, tokens, per_row, scale, plane,
    Hk: tl.constexpr, Hv: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, LAYOUT: tl.constexpr,
    NORMALISE: tl.constexpr, KEYS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Sixteen rows of a chunk: sum_c x_ic k_jc exp(g_{j+1,c} + .. + g_ic) for j <= i; x the queries, with KEYS the keys too.

    One (chunk, value head, block of rows). `products` in pieces, `lower` `[B, T, Hv, C]` in fp32.
    """
    BLOCKS: tl.constexpr = C // BLOCK
    block, head, slot = program(BLOCKS, Hv)
    key_head = head // (Hv // Hk)
    start, length = chunk_at(slot, starts, lengths, tokens, per_row, LAYOUT)
    first = block * BLOCK
    i = tl.arange(0, C)
    r = tl.arange(0, BLOCK)
    in_rows = first + r < length
    steps = tl.minimum(length - first, BLOCK)
    early = (i < first) & (i < length)
    until = (i < first - 1) & (i < length - 1)  # decays that lie between a token and the block's start, shifted by one
    of_rows = start + first
    qk = tl.zeros([BLOCK, C], dtype=tl.float32)
    kk = tl.zeros([BLOCK, C], dtype=tl.float32)
    own_qk = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    own_kk = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for tile in range(0, (K + KB - 1) // KB):
        n = tile * KB + tl.arange(0, KB)
        in_k = n < K
        in_block = in_rows[:, None] & in_k[None, :]
        before = early[:, None] & in_k[None, :]
        at_rows = (of_rows * Hk + key_head) * K + r[:, None] * (Hk * K) + n[None, :]
        decay_rows = (of_rows * Hv + head) * K + r[:, None] * (Hv * K) + n[None, :]
        decay = tl.exp(tl.cumsum(tl.load(g + decay_rows, mask=in_block, other=0.0).to(tl.float32), 0))
        at_keys = (start * Hk + key_head) * K + i[:, None] * (Hk * K) + n[None, :]
        at_decays = ((start + 1) * Hv + head) * K + i[:, None] * (Hv * K) + n[None, :]
        keys = tl.load(k + at_keys, mask=before, other=0.0).to(tl.float32)
        later = tl.load(g + at_decays, mask=until[:, None] & in_k[None, :], other=0.0).to(tl.float32)
        keys = tl.trans(keys * tl.exp(tl.cumsum(later, 0, reverse=True)))
        query = tl.load(q + at_rows, mask=in_block, other=0.0).to(tl.float32)
        qk += matmul(query * decay, keys, PIECES)
        if KEYS:
            kk += matmul(tl.load(k + at_rows, mask=in_block, other=0.0).to(tl.float32) * decay, keys, PIECES)
        R = tl.zeros([BLOCK, KB], dtype=tl.float32)  # the block's keys, decayed up to token s
        for s in range(0, steps):
            row = of_rows + s
            there = in_k & (first + s < length)
            here = (r == s)[:, None]
            key = tl.load(k + (row * Hk + key_head) * K + n, mask=there, other=0.0).to(tl.float32)
            query_s = tl.load(q + (row * Hk + key_head) * K + n, mask=there, other=0.0).to(tl.float32)
            R = R * tl.exp(tl.load(g + (row * Hv + head) * K + n, mask=there, other=0.0).to(tl.float32))[None, :]
            if KEYS:
                own_kk += tl.where(here, tl.sum(R * key[None, :], 1)[None, :], 0.0)
            R = tl.where(here, key[None, :], R)
            own_qk += tl.where(here, tl.sum(R * query_s[None, :], 1)[None, :], 0.0)
    by_k = load_or_one(k_factor, start * Hk + key_head, i * Hk, i < length, NORMALISE)
    by_own = tl.full([BLOCK], 1.0, tl.float32)
    by_q = by_own
    if NORMALISE:
        by_own = tl.load(k_factor + of_rows * Hk + key_head + r * Hk, mask=in_rows, other=0.0)
        by_q = tl.load(q_factor + of_rows * Hk + key_head + r * Hk, mask=in_rows, other=0.0)
    by_q = by_q * scale
    rows = (of_rows * Hv + head) * C + r[:, None] * (Hv * C)
    outside = in_rows[:, None] & ((i < first) | (i >= first + BLOCK))[None, :]
    within = in_rows[:, None]
    store_pieces(products, plane, rows + i[None, :], qk * by_q[:, None] * by_k[None, :], outside, PIECES)
    store_pieces(
        products, plane, rows + first + r[None, :], own_qk * by_q[:, None] * by_own[None, :], within, PIECES
    )
    if KEYS:
        tl.store(lower + rows + i[None, :], kk * by_own[:, None] * by_k[None, :], mask=outside)
        tl.store(lower + rows + first + r[None, :], own_kk * by_own[:, None] * by_own[None, :], mask=within)


def solve(launch, q, k, q_factor, k_factor, g, beta, scale):
    """q, k as they came `[B, T, Hk, K]`; g `[B, T, Hv, K]`. Gives a `Within` with decayed copies in it."""
    w = project(launch, q, k, q_factor, k_factor, g, scale, keys=True)
    invert(launch, w, beta)
    return w


def project(launch, q, k, q_factor, k_factor, g, scale, keys=False):
    """Products with these queries, and the queries decayed; with `keys` what the solve needs too."""
    w = launch.within(solve=keys)
    _decay(launch, q, q_factor, g, scale, w.queries, None, None)
    if keys:
        _decay(launch, k, k_factor, g, 1.0, w.keys, w.last_keys, w.total)
    row = launch.config("products")
    launch(
        product_kernel, launch.at.slots * launch.Hv * (C.value // BLOCK.value), row,
        q, k, q_factor, k_factor, g, w.products, w.lower,
        launch.at.starts, launch.at.lengths, launch.tokens, launch.at.per_row, scale, w.products[0].numel(),
        launch.Hk, launch.Hv, launch.K, row.KB, launch.at.kind, q_factor is not None, keys, launch.pieces,
    )  # fmt: skip
    return w


def _decay(launch, x, factor, g, scale, from_start, to_end, total):
    row = launch.config("decay")
    launch(
        decay_kernel, launch.at.slots * launch.Hv * triton.cdiv(launch.K, row.KB), row,
        x, factor, g, from_start, to_end, total,
        launch.at.starts, launch.at.lengths, launch.tokens, launch.at.per_row, scale, from_start[0].numel(),
        launch.Hk, launch.Hv, launch.K, row.KB, launch.at.kind, factor is not None, to_end is not None, launch.pieces,
    )  # fmt: skip
