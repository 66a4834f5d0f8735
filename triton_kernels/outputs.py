"""What queries read of every state, from the states entering the chunks and the updates; all chunks at once.

    O = (from_start o Q) S + P U
"""

import triton
import triton.language as tl

from .primitives import C, chunk_at, dot, load_pieces, program, split


@triton.jit(do_not_specialize=["tokens", "per_row", "token_stride"])
def output_kernel(
    q, q_from_start, products, states, updates, outputs,
    starts, lengths, tokens, per_row, input_plane, plane, token_stride,
    Hk: tl.constexpr, Hv: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KB: tl.constexpr, BV: tl.constexpr,
    LAYOUT: tl.constexpr, CHANNELS: tl.constexpr, INPUTS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """One (chunk, value head, tile of value channels); outputs have `token_stride` elements a (token, head)."""
    TILES: tl.constexpr = (V + BV - 1) // BV
    tile, head, slot = program(TILES, Hv)
    H: tl.constexpr = Hv if CHANNELS else Hk
    ORDER: tl.constexpr = PIECES if (CHANNELS or INPUTS == 1) else 3
    key_head = head if CHANNELS else head // (Hv // Hk)
    start, length = chunk_at(slot, starts, lengths, tokens, per_row, LAYOUT)
    i = tl.arange(0, C)
    m = tile * BV + tl.arange(0, BV)
    inside = i < length
    in_values = inside[:, None] & (m < V)[None, :]
    token = start * Hv + head
    O = tl.zeros([C, BV], dtype=tl.float32)
    for part in range(0, (K + KB - 1) // KB):
        n = part * KB + tl.arange(0, KB)
        S = tl.load(
            states + (slot.to(tl.int64) * Hv + head) * K * V + n[:, None] * V + m[None, :],
            mask=(n < K)[:, None] & (m < V)[None, :], other=0.0,
        )  # fmt: skip
        S0, S1, S2 = split(S, PIECES)
        q0, q1, q2 = load_pieces(
            q + (start * H + key_head) * K, input_plane, i[:, None] * (H * K) + n[None, :],
            inside[:, None] & (n < K)[None, :], INPUTS,
        )  # fmt: skip
        O = dot(q0, q1, q2, S0, S1, S2, O, INPUTS, PIECES, ORDER)
    if not CHANNELS:
        O = O * tl.load(q_from_start + token + i * Hv, mask=inside, other=0.0)[:, None]
    square = i[:, None] * (Hv * C) + i[None, :]
    P0, P1, P2 = load_pieces(products + token * C, plane, square, inside[:, None], PIECES)
    U = tl.load(updates + token * V + i[:, None] * (Hv * V) + m[None, :], mask=in_values, other=0.0)
    U0, U1, U2 = split(U, PIECES)
    O = dot(P0, P1, P2, U0, U1, U2, O, PIECES, PIECES, PIECES)
    into = outputs + token * token_stride + i[:, None].to(tl.int64) * Hv * token_stride + m[None, :]
    tl.store(into, O.to(outputs.dtype.element_ty), mask=in_values)


def read(launch, q, within, states, updates, outputs):
    """Fill `outputs` `[B, T, Hv, V]`, any stride a (token, head), from q in pieces and `within`'s products."""
    row = launch.config("output")
    launch(
        output_kernel, launch.at.slots * launch.Hv * launch.tiles(row), row,
        q, within.q_from_start, within.products, states, updates, outputs,
        launch.at.starts, launch.at.lengths, launch.tokens, launch.at.per_row, q[0].numel(), within.products[0].numel(),
        outputs.stride(2),
        launch.Hk, launch.Hv, launch.K, launch.V, row.KB, row.BV,
        launch.at.kind, launch.channels, q.shape[0], launch.pieces,
    )  # fmt: skip
