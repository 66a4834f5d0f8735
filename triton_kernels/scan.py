"""Across chunks: the state walks from chunk to chunk, in registers, and leaves outputs and whatever else is asked for.

    R = V - (from_start o K) S      U = T R      O = (from_start o Q) S + P U      S <- total o S + (to_end o K)^T U

One program for each (sequence, value head, tile of value channels). For a decay per key channel the decayed queries and
keys come ready, as pieces for each value head, and `total` has key channels.
"""

import torch
import triton
import triton.language as tl

from .primitives import CUT, PLAIN, C, chunk_at, dot, load_or_one, load_pieces, program, split


@triton.jit
def linear(a_decay, a_value, b_decay, b_value):
    """x -> decay x + value, one after the other."""
    return a_decay * b_decay, b_decay * a_value + b_value


@triton.jit(do_not_specialize=["tokens", "per_row"])
def scan_kernel(
    q, k, k_last, v, beta, g,
    solved, products, k_from_start, q_from_start, k_to_end, total, squares,
    initial, outputs, final, states, updates, norms, doubtful,
    write_of, write_heads, write_values,
    starts, lengths, first_slot, chunk_count, tokens, per_row, input_plane, plane, norm_plane, slot_plane,
    Hk: tl.constexpr, Hv: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LAYOUT: tl.constexpr, CHANNELS: tl.constexpr, INITIAL: tl.constexpr, BETA: tl.constexpr, GATED: tl.constexpr,
    OUTPUT: tl.constexpr, STATES: tl.constexpr, UPDATES: tl.constexpr, NORMS: tl.constexpr,
    INPUTS: tl.constexpr, PIECES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """INPUTS: pieces of queries and keys; PIECES: of everything that is fp32. NORMS: of this tile, and where in doubt."""
    TILES: tl.constexpr = (V + BV - 1) // BV
    tile, head, sequence = program(TILES, Hv)
    H: tl.constexpr = Hv if CHANNELS else Hk
    ORDER: tl.constexpr = PIECES if INPUTS == 1 else 3
    THIRD: tl.constexpr = PIECES == 2  # what the triangle meets gets a third piece: a small product for half of the error
    key_head = head if CHANNELS else head // (Hv // Hk)
    i = tl.arange(0, C)
    n = tl.arange(0, BK)
    m = tile * BV + tl.arange(0, BV)
    in_k = n < K
    in_v = m < V
    in_state = in_k[:, None] & in_v[None, :]
    state_offsets = n[:, None] * V + m[None, :]
    key_offsets = i[:, None] * (H * K) + n[None, :]
    value_offsets = i[:, None] * (Hv * V) + m[None, :]
    square_offsets = i[:, None] * (Hv * C) + i[None, :]
    of_sequence = (sequence.to(tl.int64) * Hv + head) * K * V
    if LAYOUT == PLAIN:
        slot0 = sequence * per_row
        chunks = per_row
    else:
        slot0 = tl.load(first_slot + sequence)
        chunks = tl.load(chunk_count + sequence)
    S = tl.zeros([BK, BV], dtype=tl.float32)
    if INITIAL:
        S = tl.load(initial + of_sequence + state_offsets, mask=in_state, other=0.0).to(tl.float32)
    if LAYOUT == PLAIN:
        begin = sequence.to(tl.int64) * tokens
        end = begin + tokens
    else:
        last = slot0 + chunks - 1
        begin = tl.load(starts + slot0, mask=chunks > 0, other=0)
        end = tl.load(starts + last, mask=chunks > 0, other=0) + tl.load(lengths + last, mask=chunks > 0, other=0)
    for c in tl.range(0, chunks, num_stages=STAGES):
        slot = (slot0 + c).to(tl.int64)
        if LAYOUT == CUT:
            start, length = chunk_at(slot, starts, lengths, tokens, per_row, LAYOUT)
            write = tl.load(write_of + slot)
            here = write >= 0
            here = here & (tl.load(write_heads + write * Hv + head, mask=here, other=0) != 0)
            value = write_values + (write.to(tl.int64) * Hv + head) * K * V + state_offsets
            S = tl.where(here, tl.load(value, mask=in_state & here, other=0.0).to(tl.float32), S)
        else:
            start = begin + c * C
            length = tl.minimum(end - start, C).to(tl.int32)
        inside = i < length
        token = start * Hv + head
        keys = (start * H + key_head) * K
        in_keys = inside[:, None] & in_k[None, :]
        in_values = inside[:, None] & in_v[None, :]
        if STATES:
            tl.store(
                states + (slot * Hv + head) * K * V + state_offsets, S.to(states.dtype.element_ty), mask=in_state
            )
        S0, S1, S2 = split(S, PIECES)
        zeros = tl.zeros([C, BV], dtype=tl.float32)
        k0, k1, k2 = load_pieces(k + keys, input_plane, key_offsets, in_keys, INPUTS)
        seen = dot(k0, k1, k2, S0, S1, S2, zeros, INPUTS, PIECES, ORDER)
        if not CHANNELS:
            seen = seen * tl.load(k_from_start + token + i * Hv, mask=inside, other=0.0)[:, None]
        value = tl.load(v + token * V + value_offsets, mask=in_values, other=0.0).to(tl.float32)
        R0, R1, R2 = split(value - seen, 3 if THIRD else PIECES)
        T0, T1, T2 = load_pieces(solved + token * C, plane, square_offsets, inside[:, None], PIECES)
        U = dot(T0, T1, T2, R0, R1, R2, zeros, PIECES, PIECES, PIECES)
        if THIRD:
            U = tl.dot(T0, R2, U)
        if NORMS:
            norm = tl.sum(S * S)
            strength = load_or_one(beta, token, i * Hv, inside, BETA)
            decay = tl.full([C], 1.0, tl.float32)
            if GATED:
                decay = tl.exp(2 * tl.load(g + token + i * Hv, mask=inside, other=0.0).to(tl.float32))
            square = tl.load(squares + token + i * Hv, mask=inside, other=0.0)
            # |S_t|^2 = d^2 |S_t-1|^2 + 2 (v - u / beta) . u + |k|^2 |u|^2
            missed = value - U * tl.where(strength != 0, 1.0 / tl.where(strength != 0, strength, 1.0), 0.0)[:, None]
            written = square * tl.sum(U * U, 1)
            grown = 2 * tl.sum(missed * U, 1) + written
            rounding = 1.2e-7 * (2 * tl.sqrt(tl.sum(missed * missed, 1) * tl.sum(U * U, 1)) + written)
            first = i == 0
            grown = grown + tl.where(first, decay * norm, 0.0)
            rounding = rounding + tl.where(first, decay * norm * 1.2e-7, 0.0)
            _, found = tl.associative_scan((decay, grown), 0, linear)
            _, bound = tl.associative_scan((decay, rounding), 0, linear)
            tl.store(norms + tile.to(tl.int64) * norm_plane + token + i * Hv, found, mask=inside)
            doubt = tl.max(tl.where(inside & (bound > 2e-4 * found), 1, 0), 0)
            tl.store(doubtful + tile.to(tl.int64) * slot_plane + slot * Hv + head, doubt)
            if not STATES:  # a chunk in doubt leaves what a replay needs
                tl.store(states + (slot * Hv + head) * K * V + state_offsets, S, mask=in_state & (doubt != 0))
            if not UPDATES:
                tl.store(updates + token * V + value_offsets, U, mask=in_values & (doubt != 0))
        if UPDATES:
            tl.store(updates + token * V + value_offsets, U.to(updates.dtype.element_ty), mask=in_values)
        if OUTPUT:
            q0, q1, q2 = load_pieces(q + keys, input_plane, key_offsets, in_keys, INPUTS)
            O = dot(q0, q1, q2, S0, S1, S2, zeros, INPUTS, PIECES, ORDER)
            if not CHANNELS:
                O = O * tl.load(q_from_start + token + i * Hv, mask=inside, other=0.0)[:, None]
            P0, P1, P2 = load_pieces(products + token * C, plane, square_offsets, inside[:, None], PIECES)
            U0, U1, U2 = split(U, PIECES)
            O = dot(P0, P1, P2, U0, U1, U2, O, PIECES, PIECES, PIECES)
            tl.store(outputs + token * V + value_offsets, O.to(outputs.dtype.element_ty), mask=in_values)
        if CHANNELS:
            S = S * tl.load(total + (slot * Hv + head) * K + n, mask=in_k, other=0.0)[:, None]
            k0, k1, k2 = load_pieces(k_last + keys, input_plane, key_offsets, in_keys, INPUTS)
        else:
            S = S * tl.load(total + slot * Hv + head)
            U = U * tl.load(k_to_end + token + i * Hv, mask=inside, other=0.0)[:, None]
        U0, U1, U2 = split(U, PIECES)
        S = dot(tl.trans(k0), tl.trans(k1), tl.trans(k2), U0, U1, U2, S, INPUTS, PIECES, ORDER)
    tl.store(final + of_sequence + state_offsets, S, mask=in_state)


def scan(launch, q, k, v, beta, g, w, initial, outputs, final, states, updates, keeps, norms, writes):
    """Fill outputs `[B, T, Hv, V]` (None: the output kernel will), final `[sequences, Hv, K, V]` and, with `keeps`, states
    entering the chunks `[slots, Hv, K, V]` and updates `[B, T, Hv, V]`.

    w: `launch.Within`; writes: (write of each slot or -1, heads `[n, Hv]`, values `[n, Hv, K, V]`) or None. With `norms`
    gives (squared norms of each tile `[tiles, B, T, Hv]`, whether each chunk is in doubt `[tiles, slots, Hv]`): states and
    updates of those are filled.
    """
    row = launch.config("scan with norms" if norms else "scan")
    tiles = launch.tiles(row)
    squares = doubtful = None
    if norms:
        squares = launch.empty(tiles, launch.rows, launch.tokens, launch.Hv)
        doubtful = launch.empty(tiles, launch.at.slots, launch.Hv, dtype=torch.int32)
    write_of, write_heads, write_values = writes or (None, None, None)
    launch(
        scan_kernel, launch.at.sequences * launch.Hv * tiles, row,
        q, k, w.last_keys, v, beta, g,
        w.solved, w.products, w.k_from_start, w.q_from_start, w.k_to_end, w.total, w.squares,
        initial, outputs, final, states, updates, squares, doubtful,
        write_of, write_heads, write_values,
        launch.at.starts, launch.at.lengths, launch.at.first_slot, launch.at.chunk_count, launch.tokens, launch.at.per_row,
        q[0].numel(), w.solved[0].numel(), launch.rows * launch.tokens * launch.Hv, launch.at.slots * launch.Hv,
        launch.Hk, launch.Hv, launch.K, launch.V, launch.BK, row.BV,
        launch.at.kind, launch.channels, initial is not None, beta is not None, g is not None,
        outputs is not None, keeps, keeps, norms,
        q.shape[0], launch.pieces, row.stages,
    )  # fmt: skip
    return squares, doubtful
