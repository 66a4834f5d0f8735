"""What can be computed from a trajectory after the fact: states, norms, reads, effective attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Sequence

import torch
from torch import Tensor

from . import decay, torch_backend
from .call import Prepared, Writes
from .checks import as_tokens, head_list, token_mask, token_positions
from .pieces import ChunkTable
from .reference import repeat_heads
from .transforms import tracked

if TYPE_CHECKING:
    from .trajectory import Trajectory


def _decays(t: Trajectory) -> Tensor:
    """Log decays `[B, T, Hv, 1 or K]`."""
    return t.decays[..., None] if t.decays.ndim == 3 else t.decays


def _chunks(t: Trajectory) -> torch_backend.Chunks:
    return torch_backend.Chunks.of(t.keys.to(t.decays.dtype), _decays(t), t.table())


def _entering(t: Trajectory, table: ChunkTable) -> Tensor:
    """States entering the chunks `[N, Hv, K, V]`, in the dtype of the computation."""
    return table.by_chunk(t.chunk_states).to(t.decays.dtype)


def _following(t: Trajectory, table: ChunkTable, entering: Tensor) -> Tensor:
    """The state that each chunk hands on `[N, Hv, K, V]`: the next one's entering state, or the final state."""
    return torch.cat([entering, t.final_state[table.order].to(entering.dtype)])[table.following]


# -- states ------------------------------------------------------------------------------------


def states(
    t: Trajectory,
    tokens: Any = None,
    heads: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The states after `tokens` and for `heads`, in `dtype`; see `Trajectory.states`. Fills `out` if given."""
    batch, length, all_heads = t.betas.shape
    tokens = as_tokens(tokens)
    mask = token_mask(tokens, batch, length)
    if mask is not None:
        flat, shape = mask.to(t.keys.device).flatten().nonzero()[:, 0].cpu(), None
    else:
        positions = torch.tensor(token_positions(tokens, length), dtype=torch.long)
        flat, shape = (torch.arange(batch)[:, None] * length + positions).flatten(), (batch, len(positions))
    chosen = None if heads is None else head_list(heads, all_heads)
    found = _replay(t, flat, chosen, dtype or t.chunk_states.dtype, None if out is None else out.flatten(0, -4))
    if out is not None:
        return out
    return found if shape is None else found.unflatten(0, shape)


def _replay(t: Trajectory, flat: Tensor, heads: list[int] | None, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """The states after flat tokens: from the entering state of their chunk, a rank-one write a token.

    All chunks go in step, so it is as many steps as the last wanted position in a chunk. The state after a chunk's last
    token is the one it handed on, bit for bit.
    """
    table = t.table()
    entering = _entering(t, table)
    everything = table.plain and len(flat) == table.batch * table.tokens
    alone = everything and len(flat) and not tracked(t.fields().values())
    if alone and dtype == entering.dtype and (out is None or out.dtype == dtype):
        return _replay_all(t, table, entering, heads, out)
    if not len(flat):
        return entering.new_zeros((0, *_of_heads(entering, heads).shape[1:]), dtype=dtype)
    chunk_of, inside = (x[flat] for x in table.where)
    lengths = torch.tensor([chunk.length for chunk in table.chunks])
    last = inside == lengths[chunk_of] - 1
    used = chunk_of[~last].unique()
    parts, places = [], []
    if last.any():
        handed_on = _of_heads(_following(t, table, entering), heads)
        parts.append(handed_on[chunk_of[last].to(entering.device)].to(dtype))
        places.append(last.nonzero()[:, 0])
    if len(used):
        slot = torch.zeros(len(table.chunks), dtype=torch.long)
        slot[used] = torch.arange(len(used))
        of_position = [(~last & (inside == i)).nonzero()[:, 0] for i in range(int(inside[~last].max()) + 1)]
        walk = _walk(t, table, entering, used.to(entering.device), heads, len(of_position))
        for state, wanted in zip(walk, of_position):
            if len(wanted):
                picked = slot[chunk_of[wanted]]
                everything = len(picked) == len(used) and bool((picked == torch.arange(len(used))).all())
                parts.append((state if everything else state[picked.to(state.device)]).to(dtype))
                places.append(wanted)
    place = torch.cat(places).to(entering.device)
    found = torch.cat(parts)
    if out is not None:
        return out.index_copy_(0, place, found.to(out.dtype))
    return torch.empty_like(found).index_copy(0, place, found)


def _replay_all(
    t: Trajectory, table: ChunkTable, entering: Tensor, heads: list[int] | None, out: Tensor | None
) -> Tensor:
    """The states after every token of plain rows, each computed where it is stored, from the one before it there."""
    chunks, batch, size = _chunks(t), table.batch, table.size
    k, g, u = (_of_heads(x, heads) for x in (chunks.k, chunks.g.exp(), table.split(t.updates.to(entering.dtype))))
    start = _of_heads(entering, heads)
    if out is None:
        out = torch.empty((batch * table.tokens, *start.shape[1:]), dtype=start.dtype, device=start.device)
    rows = out.unflatten(0, (batch, table.tokens))
    handed_on = _of_heads(_following(t, table, entering), heads)
    for first, last in _runs(table):
        length = table.chunks[first * batch].length
        now = slice(first * batch, last * batch)
        tokens = (
            rows[:, first * size : first * size + (last - first) * length].unflatten(1, (-1, length)).transpose(0, 1)
        )
        before, by_step = start[now].unflatten(0, (-1, batch)), lambda x, now=now: x[now].unflatten(0, (-1, batch))
        keys, decays, updates = by_step(k), by_step(g), by_step(u)
        for i in range(length):
            state = tokens[:, :, i]
            if i == length - 1:  # what the chunk handed on, bit for bit
                state.copy_(by_step(handed_on))
            else:
                torch.mul(before, decays[:, :, :, i, :, None], out=state)
                state.addcmul_(keys[:, :, :, i, :, None], updates[:, :, :, i, None, :])
            before = state
    return out


def _runs(table: ChunkTable) -> list[tuple[int, int]]:
    """Steps of the scan whose chunks are of one length: the full ones, and the last if it is shorter."""
    steps, full = len(table.active), table.tokens // table.size
    return [run for run in ((0, full), (full, steps)) if run[0] < run[1]]


def _walk(t: Trajectory, table: ChunkTable, entering: Tensor, used: Tensor, heads: list[int] | None, steps: int) -> Any:
    """The state after each position of the chunks `used`, one after the other: `[n, H, K, V]` each."""
    chunks = _chunks(t)
    updates = table.split(t.updates.to(entering.dtype))
    k, g, u = (_of_heads(x[used], heads)[:, :, :steps] for x in (chunks.k, chunks.g.exp(), updates))
    state = _of_heads(entering[used], heads)
    for i in range(steps):
        state = torch.addcmul(g[:, :, i, :, None] * state, k[:, :, i, :, None], u[:, :, i, None, :])
        yield state


def _of_heads(x: Tensor, heads: list[int] | None) -> Tensor:
    return x if heads is None else x[:, heads]


# -- norms -------------------------------------------------------------------------------------


def norms(t: Trajectory, heads: Sequence[int] | None = None) -> Tensor:
    """Frobenius norms `[B, T, Hv]`."""
    table = t.table()
    chosen = None if heads is None else head_list(heads, t.betas.shape[2])
    if not table.chunks:
        return _of_heads(t.betas.transpose(1, 2), chosen).transpose(1, 2) * 0
    entering = _entering(t, table)
    square = _squares_replayed(t, table, entering) if t.decays.ndim == 4 else _squares(t, table, entering)
    square = table.join(square[..., None])[..., 0]
    if table.cuts:  # the token of a write has the written state's norm
        where = table.cut_places(square.device)
        square = square.index_put(where, (entering[table.after_cut].double() ** 2).sum((-1, -2)))
    found = _root(square).to(t.decays.dtype)
    return found if chosen is None else found[:, :, chosen]


def _squares(t: Trajectory, table: ChunkTable, entering: Tensor) -> Tensor:
    """|S_t|^2 `[N, H, C]` without the states, for a decay per head.

    With S_t = a_t S0 + sum_j Gamma_tj k_j u_j^T it is
    a^2 |S0|^2 + 2 a sum_j Gamma_tj k_j^T S0 u_j + diag(Gamma (KK^T o UU^T) Gamma^T).
    In fp64, since the terms cancel where a write erases the state.
    """
    chunks = _chunks(t)
    k, g, s0 = chunks.k.double(), chunks.g.double(), entering.double()
    u = table.split(t.updates.double())
    gamma, left = decay.to_each(g), decay.from_start(g)[..., 0]
    cross = ((k @ s0) * u).sum(-1, keepdim=True)
    pairs = (k @ k.transpose(-1, -2)) * (u @ u.transpose(-1, -2))
    own = ((gamma @ pairs) * gamma).sum(-1)
    return left**2 * (s0**2).sum((-1, -2))[..., None] + 2 * left * (gamma @ cross)[..., 0] + own


def _squares_replayed(t: Trajectory, table: ChunkTable, entering: Tensor) -> Tensor:
    """The same for a decay per key channel, a state at a time."""
    used = torch.arange(len(table.chunks), device=entering.device)
    walk = _walk(t, table, entering, used, None, table.size)
    return torch.stack([(state.double() ** 2).sum((-1, -2)) for state in walk], -1)


def _root(square: Tensor) -> Tensor:
    """The square root, with gradient zero at zero."""
    positive = square > 0
    return torch.where(positive, torch.where(positive, square, 1).sqrt(), 0)


# -- reads -------------------------------------------------------------------------------------


def read(t: Trajectory, queries: Tensor) -> Tensor:
    """`S_t^T q_t`, `[B, T, Hv, V]`."""
    heads, dtype = t.betas.shape[2], t.decays.dtype
    table, queries = t.table(), queries.to(dtype)
    if not table.chunks:
        return t.updates.to(dtype) * 0
    chunks, entering = _chunks(t), _entering(t, table)
    q = table.split(repeat_heads(queries, heads))
    (qk,) = chunks.products([q])
    reads = qk @ table.split(t.updates.to(dtype)) + (q * decay.from_start(chunks.g)) @ entering
    return torch_backend.reread(table.join(reads), queries, entering, table, _written_heads(t, table))


def read_probes(t: Trajectory, probes: Tensor, heads: Sequence[int] | None = None) -> Tensor:
    """Every state read by probes `[P, K]`, `[Hv, P, K]` or `[B, T, Hv, P, K]`: `[B, T, Hv, P, V]`."""
    batch, length, all_heads = t.betas.shape
    count = probes.shape[-2]
    each = [probes[..., i, :].expand(batch, length, all_heads, -1) for i in range(count)]
    empty = t.updates.new_zeros((batch, length, all_heads, 0, t.updates.shape[-1]), dtype=t.decays.dtype)
    reads = torch.stack([read(t, x) for x in each], 3) if count else empty
    return reads if heads is None else reads[:, :, head_list(heads, all_heads)]


def _written_heads(t: Trajectory, table: ChunkTable) -> Tensor | None:
    """For each cut, the heads that were written, `[cuts, Hv]`; None without writes."""
    return table.by_chunk(t.written)[table.after_cut] if table.cuts else None


# -- effective attention -----------------------------------------------------------------------


def effective_attention(t: Trajectory, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Weights `[B, Hv, T, T]` and remainder `[B, T, Hv, V]`; see `Trajectory.effective_attention`."""
    dtype = t.decays.dtype
    table, queries = t.table(), queries.to(dtype)
    written = _written_heads(t, table)
    weights = _weights(t, queries, table, written)
    # the remainder is the rule with no values: what the initial and the written states alone give
    entering = _entering(t, table)
    writes = None if written is None else Writes(table.cuts, written, entering[table.after_cut])
    nothing = torch.zeros_like(t.updates, dtype=dtype)
    prepared = Prepared(queries, t.keys.to(dtype), nothing, _decays(t), t.betas, _initial(t, table, entering))
    return weights, torch_backend.scan(prepared, table, writes).outputs


def _weights(t: Trajectory, queries: Tensor, table: ChunkTable, written: Tensor | None) -> Tensor:
    """(Q K^T o Gamma) (I + tril(diag(beta) K K^T o Gamma, -1))^-1 diag(beta), over the whole row."""
    heads = t.betas.shape[2]
    q, k = (repeat_heads(x.to(t.decays.dtype), heads).transpose(1, 2) for x in (queries, t.keys))
    beta = t.betas.transpose(1, 2)
    row = torch_backend.Chunks(k, _wiped(_decays(t), table, written).transpose(1, 2))
    kk, qk = row.products([k, q])
    if written is not None:  # the token of a write reads the written state, none of the values
        reads_written = qk.new_zeros(qk.shape[:3], dtype=torch.bool)
        for (b, token), of in zip(table.cuts, written):
            reads_written[b, of, token] = True
        qk = qk.masked_fill(reads_written[..., None], 0)
    return qk @ torch_backend.inverse(kk * beta[..., None]) * beta[..., None, :]


def _wiped(g: Tensor, table: ChunkTable, written: Tensor | None) -> Tensor:
    """Decays with -inf where a written state, or another packed sequence, begins: nothing comes across."""
    g = g.clone()
    for bound in (table.bounds or ())[1:-1]:
        if bound < table.tokens:
            g[0, bound] = float("-inf")
    for (row, token), heads in zip(table.cuts, () if written is None else written):
        if token + 1 < table.tokens:
            g[row, token + 1, heads] = float("-inf")
    return g


def _initial(t: Trajectory, table: ChunkTable, entering: Tensor) -> Tensor:
    """The states the sequences began with, `[sequences, Hv, K, V]`; an empty one's is its final state."""
    initial = list(t.final_state.to(entering.dtype))
    first: dict[int, int] = {}
    for n, chunk in enumerate(table.chunks):
        first.setdefault(chunk.sequence, n)
    for sequence, n in first.items():
        initial[sequence] = entering[n]
    return torch.stack(initial) if initial else entering[:0]
