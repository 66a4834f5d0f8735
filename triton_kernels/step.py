"""A few tokens of every row, one after the other, with the state in registers: decoding."""

import triton
import triton.language as tl

from .primitives import program

TOKENS = 16
"""The longest call that is taken token by token."""


@triton.jit(do_not_specialize=["tokens"])
def step_kernel(
    q, k, v, g, beta, initial, outputs, final, updates, scale, tokens,
    Hk: tl.constexpr, Hv: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    NORMALISE: tl.constexpr, CHANNELS: tl.constexpr, GATED: tl.constexpr, BETA: tl.constexpr, INITIAL: tl.constexpr,
    UPDATES: tl.constexpr,
):  # fmt: skip
    """One (row, value head, tile of value channels). `final` may be `initial`: a tile is read before it is written."""
    TILES: tl.constexpr = (V + BV - 1) // BV
    tile, head, row = program(TILES, Hv)
    row = row.to(tl.int64)
    n = tl.arange(0, BK)
    m = tile * BV + tl.arange(0, BV)
    in_k = n < K
    in_v = m < V
    in_state = in_k[:, None] & in_v[None, :]
    offsets = (row * Hv + head) * K * V + n[:, None] * V + m[None, :]
    S = tl.zeros([BK, BV], dtype=tl.float32)
    if INITIAL:
        S = tl.load(initial + offsets, mask=in_state, other=0.0).to(tl.float32)
    for s in range(0, tokens):
        token = row * tokens + s
        at_key = (token * Hk + head // (Hv // Hk)) * K + n
        at_value = (token * Hv + head) * V + m
        key = tl.load(k + at_key, mask=in_k, other=0.0).to(tl.float32)
        query = tl.load(q + at_key, mask=in_k, other=0.0).to(tl.float32)
        update = tl.load(v + at_value, mask=in_v, other=0.0).to(tl.float32)
        if NORMALISE:
            key = key * (1.0 / tl.sqrt(tl.sum(key * key) + 1e-6))
            query = query * (1.0 / tl.sqrt(tl.sum(query * query) + 1e-6))
        if CHANNELS:
            S = S * tl.exp(tl.load(g + (token * Hv + head) * K + n, mask=in_k, other=0.0).to(tl.float32))[:, None]
        elif GATED:
            S = S * tl.exp(tl.load(g + token * Hv + head).to(tl.float32))
        update = update - tl.sum(S * key[:, None], 0)
        if BETA:
            update = update * tl.load(beta + token * Hv + head).to(tl.float32)
        S = S + key[:, None] * update[None, :]
        read = tl.sum(S * query[:, None], 0) * scale
        tl.store(outputs + at_value, read.to(outputs.dtype.element_ty), mask=in_v)
        if UPDATES:
            tl.store(updates + at_value, update.to(updates.dtype.element_ty), mask=in_v)
    tl.store(final + offsets, S, mask=in_state)


def step(launch, q, k, v, g, beta, initial, outputs, final, updates, scale, normalise):
    """`launch.tokens` tokens of each row; q, k, v as they came."""
    row = launch.config("step")
    launch(
        step_kernel, launch.rows * launch.Hv * launch.tiles(row), row,
        q, k, v, g, beta, initial, outputs, final, updates, scale, launch.tokens,
        launch.Hk, launch.Hv, launch.K, launch.V, launch.BK, row.BV,
        normalise, launch.channels, g is not None, beta is not None, initial is not None, updates is not None,
    )  # fmt: skip
