"""What is looked at: states after chosen tokens, norms, and reads by probes; from entering states and updates.

A replay walks through one chunk in registers, a rank-one write a token, and stores the states that are wanted where the
caller wants them. It is bound by the bytes it stores.
"""

import triton
import triton.language as tl

from .primitives import PLAIN, C, chunk_at, decay_to_each, matmul, program


@triton.jit
def handed_on(slot, following, states, final, head, offsets, mask, per_row, slots, Hv, K, V, LAYOUT: tl.constexpr):
    """The state that a chunk hands on: the one entering the next chunk, or the final state of its sequence."""
    if LAYOUT == PLAIN:
        row = slot // per_row
        after = tl.where(slot + 1 < (row + 1) * per_row, slot + 1, slots + row)
    else:
        after = tl.load(following + slot)
    inner = after < slots
    chunk = tl.load(states + (after.to(tl.int64) * Hv + head) * K * V + offsets, mask=mask & inner, other=0.0)
    last = tl.load(final + ((after - slots).to(tl.int64) * Hv + head) * K * V + offsets, mask=mask & (after >= slots), other=0.0)
    return tl.where(inner, chunk, last)


@triton.jit(do_not_specialize=["tokens", "per_row", "slots", "norm_plane", "slot_plane", "chosen_heads"])
def replay_kernel(
    k, updates, g, states, final, following, place, heads, doubtful, out, norms, chosen, until,
    starts, lengths, tokens, per_row, slots, norm_plane, slot_plane, chosen_heads,
    Hk: tl.constexpr, Hv: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LAYOUT: tl.constexpr, CHANNELS: tl.constexpr, GATED: tl.constexpr,
    STATES: tl.constexpr, NORMS: tl.constexpr, DOUBTFUL: tl.constexpr,
):  # fmt: skip
    """One (chosen chunk, chosen head, tile of value channels).

    k: normalised fp32 `[B, T, Hk, K]`; following: the chunk after each one, or `slots +` its sequence; place: row of `out`
    for each token, or -1; until: tokens to walk in each chosen chunk. With DOUBTFUL only tiles in doubt run.
    """
    TILES: tl.constexpr = (V + BV - 1) // BV
    tile, rank, n_chosen = program(TILES, chosen_heads)
    slot = tl.load(chosen + n_chosen)
    head = tl.load(heads + rank)
    key_head = head // (Hv // Hk)
    start, length = chunk_at(slot, starts, lengths, tokens, per_row, LAYOUT)
    if DOUBTFUL:
        length = tl.where(tl.load(doubtful + tile.to(tl.int64) * slot_plane + slot * Hv + head) != 0, length, 0)
    n = tl.arange(0, BK)
    m = tile * BV + tl.arange(0, BV)
    in_k = n < K
    in_v = m < V
    in_state = in_k[:, None] & in_v[None, :]
    offsets = n[:, None] * V + m[None, :]
    S = tl.load(
        states + (slot.to(tl.int64) * Hv + head) * K * V + offsets, mask=in_state & (length > 0), other=0.0
    )
    steps = length
    if STATES:
        steps = tl.minimum(length, tl.load(until + n_chosen))
    for s in range(0, steps):
        token = start + s
        key = tl.load(k + (token * Hk + key_head) * K + n, mask=in_k, other=0.0)
        update = tl.load(updates + (token * Hv + head) * V + m, mask=in_v, other=0.0)
        if CHANNELS:
            S = S * tl.exp(tl.load(g + (token * Hv + head) * K + n, mask=in_k, other=0.0).to(tl.float32))[:, None]
        elif GATED:
            S = S * tl.exp(tl.load(g + token * Hv + head).to(tl.float32))
        S = S + key[:, None] * update[None, :]
        if STATES:
            row = tl.load(place + token)
            last = s == length - 1  # what the chunk hands on, bit for bit
            after = handed_on(
                slot, following, states, final, head, offsets, in_state & last & (row >= 0), per_row, slots, Hv, K, V, LAYOUT
            )
            into = out + (row.to(tl.int64) * chosen_heads + rank) * K * V + offsets
            after = tl.where(last, after, S).to(out.dtype.element_ty)
            tl.store(into, after, mask=in_state & (row >= 0), cache_modifier=".cs")
        if NORMS:
            tl.store(norms + tile.to(tl.int64) * norm_plane + token * Hv + head, tl.sum(S * S))


def replay(
    launch, keys, updates, g, states, final, *, chosen, heads, until=None, place=None, out=None, norms=None, doubtful=None
):
    """Walk through the chunks `chosen` for `heads`; `out` `[rows, heads, K, V]` and `norms` `[tiles, B, T, Hv]` are filled.

    keys: fp32 as the rule used them; states `[slots, Hv, K, V]` and final `[sequences, Hv, K, V]` in fp32.
    """
    row = launch.config("replay" if norms is None else "scan with norms")
    launch(
        replay_kernel, chosen.numel() * heads.numel() * launch.tiles(row), row,
        keys, updates, g, states, final, launch.at.following, place, heads, doubtful, out, norms, chosen, until,
        launch.at.starts, launch.at.lengths, launch.tokens, launch.at.per_row, launch.at.slots,
        0 if norms is None else norms[0].numel(), launch.at.slots * launch.Hv, heads.numel(),
        launch.Hk, launch.Hv, launch.K, launch.V, launch.BK, row.BV,
        launch.at.kind, launch.channels, g is not None, out is not None, norms is not None, doubtful is not None,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "per_row", "probes", "chosen_heads"])
def probe_kernel(
    probe, k, updates, g, states, heads, reads, starts, lengths, tokens, per_row, probes, chosen_heads,
    Hk: tl.constexpr, Hv: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LAYOUT: tl.constexpr, GATED: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Reads by the same probes at every token, for a decay per head: S_t^T p = Gamma ((K p) o U) + from_start o (S^T p).

    One (chunk, chosen head, tile of value channels), all probes in it.
    """
    TILES: tl.constexpr = (V + BV - 1) // BV
    tile, rank, slot = program(TILES, chosen_heads)
    head = tl.load(heads + rank)
    start, length = chunk_at(slot, starts, lengths, tokens, per_row, LAYOUT)
    i = tl.arange(0, C)
    n = tl.arange(0, BK)
    m = tile * BV + tl.arange(0, BV)
    inside = i < length
    in_k = n < K
    in_v = m < V
    in_values = inside[:, None] & in_v[None, :]
    token = start * Hv + head
    key_offsets = (start * Hk + head // (Hv // Hk)) * K + i[:, None] * (Hk * K) + n[None, :]
    key = tl.load(k + key_offsets, mask=inside[:, None] & in_k[None, :], other=0.0)
    S = tl.load(
        states + (slot.to(tl.int64) * Hv + head) * K * V + n[:, None] * V + m[None, :],
        mask=in_k[:, None] & in_v[None, :], other=0.0,
    )  # fmt: skip
    U = tl.load(updates + token * V + i[:, None] * (Hv * V) + m[None, :], mask=in_values, other=0.0)
    gamma = tl.where(i[:, None] >= i[None, :], 1.0, 0.0)
    from_start = tl.full([C], 1.0, tl.float32)
    if GATED:
        log_decay = tl.load(g + token + i * Hv, mask=inside, other=0.0).to(tl.float32)
        gamma = decay_to_each(log_decay)
        from_start = tl.exp(tl.cumsum(log_decay, 0))
    into = reads + (start * chosen_heads + rank) * probes * V + i[:, None].to(tl.int64) * chosen_heads * probes * V + m[None, :]
    for p in range(0, probes):
        vector = tl.load(probe + (head * probes + p) * K + n, mask=in_k, other=0.0).to(tl.float32)
        written = tl.sum(key * vector[None, :], 1)[:, None] * U
        read = matmul(gamma, written, PIECES) + from_start[:, None] * tl.sum(S * vector[:, None], 0)[None, :]
        tl.store(into + p * V, read.to(reads.dtype.element_ty), mask=in_values)


def probe(launch, probes, keys, updates, g, states, heads, reads):
    """probes `[Hv, P, K]`, keys as in `replay`; fills `reads` `[B, T, heads, P, V]`."""
    row = launch.config("probe")
    launch(
        probe_kernel, launch.at.slots * heads.numel() * launch.tiles(row), row,
        probes, keys, updates, g, states, heads, reads,
        launch.at.starts, launch.at.lengths, launch.tokens, launch.at.per_row, probes.shape[1], heads.numel(),
        launch.Hk, launch.Hv, launch.K, launch.V, launch.BK, row.BV,
        launch.at.kind, g is not None, launch.pieces,
    )  # fmt: skip
