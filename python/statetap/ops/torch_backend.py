"""The chunked delta rule in torch: parallel over batch, heads and chunks, one step a chunk across them.

With S0 the state entering a chunk and Gamma the decay between two of its tokens (DeltaNet, arXiv:2406.06484, section 3;
Gated DeltaNet, arXiv:2412.06464, section 3.3):

    M = (I + tril(diag(beta) K K^T o Gamma, -1))^-1      by substitution
    U = M diag(beta) (V - (pre o K) S0)                  what the tokens write
    S1 = tot o S0 + (suf o K)^T U                        the next chunk's entering state
    O = (pre o Q) S0 + tril(Q K^T o Gamma) U             what they read

pre, suf and tot are the decays from the chunk's start, to its end, and over all of it. For Kimi (a decay per key
channel) Gamma sits inside the products over key channels: `decay.decayed_products`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import torch
from torch import Tensor

from . import decay, reference
from .call import DeltaCall, Prepared, Writes, prepare
from .pieces import ChunkTable
from .reference import repeat_heads


@dataclass
class Core:
    """What the recurrence leaves behind; everything else is computed from it.

    outputs: `[B, T, Hv, V]`; final_state: `[sequences, Hv, K, V]`; by chunk: entering `[N, Hv, K, V]` and
    updates `[N, Hv, C, V]`.
    """

    outputs: Tensor
    final_state: Tensor
    entering: Tensor
    updates: Tensor


@dataclass
class Chunks:
    """Keys and log decays of every chunk: `[N, H, C, K]`, and `[N, H, C, 1]` or, per key channel, `[N, H, C, K]`."""

    k: Tensor
    g: Tensor

    @classmethod
    def of(cls, keys: Tensor, g: Tensor, table: ChunkTable) -> Chunks:
        """From keys `[B, T, Hk, K]` and log decays `[B, T, Hv, 1 or K]`."""
        return cls(table.split(repeat_heads(keys, g.shape[2])), table.split(g))

    @property
    def per_channel(self) -> bool:
        return self.g.shape[-1] > 1

    def products(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """x_i . k_j with the decay from j to i, for j <= i: `[N, H, C, C]` for each x `[N, H, C, K]`."""
        if self.per_channel:
            return decay.decayed_products(rows, self.k, self.g)
        gamma = decay.to_each(self.g)
        keys = self.k.transpose(-1, -2)
        return [x @ keys * gamma for x in rows]

    def read_entering(self, matrix: Tensor, x: Tensor) -> Tensor:
        """matrix (pre o x): what `matrix` `[N, H, C, C]` sees of the entering state through x `[N, H, C, K]`."""
        pre = decay.from_start(self.g)
        return matrix @ (x * pre) if self.per_channel else (matrix * pre.transpose(-1, -2)) @ x


def run(call: DeltaCall) -> tuple[Prepared, Core]:
    """The whole call; a decode step needs no chunks."""
    p = prepare(call)
    if call.v.shape[1] == 1 and call.table.plain:
        return p, _one_token(p)
    return p, scan(p, call.table, call.writes)


def _one_token(p: Prepared) -> Core:
    heads = p.v.shape[2]
    q, k = (_flat(repeat_heads(x, heads)[:, 0])[:, None] for x in (p.q, p.k))  # [B H, 1, K]
    decayed = _flat(p.g[:, 0].exp()[..., None] * p.state)
    update = torch.baddbmm(_flat(p.v[:, 0])[:, None], k, decayed, alpha=-1) * _flat(p.beta[:, 0])[:, None, None]
    state = torch.baddbmm(decayed, k.transpose(1, 2), update)
    output = torch.bmm(q, state).view_as(p.v)
    return Core(output, state.view_as(p.state), p.state, update.view_as(p.v[:, 0])[:, :, None])


def scan(p: Prepared, table: ChunkTable, writes: Writes | None = None) -> Core:
    """The chunked algorithm."""
    if not table.chunks:
        nothing = p.v.new_zeros(0, p.v.shape[2], table.size, p.v.shape[3])
        return Core(torch.zeros_like(p.v), p.state.clone(), p.state[:0], nothing)
    chunks = Chunks.of(p.k, p.g, table)
    q, v, beta = (table.split(x) for x in (repeat_heads(p.q, p.v.shape[2]), p.v, p.beta[..., None]))
    kk, qk = chunks.products([chunks.k, q])
    erased = inverse(kk * beta) * beta.transpose(-1, -2)  # M diag(beta)
    entering, updates, final_state = _across(
        chunks, erased @ v, chunks.read_entering(erased, chunks.k), p.state, table, writes
    )
    seen = _flat(q * decay.from_start(chunks.g))
    outputs = torch.baddbmm(torch.bmm(_flat(qk), _flat(updates)), seen, _flat(entering)).view_as(v)
    outputs = reread(table.join(outputs), p.q, entering, table, None if writes is None else writes.heads)
    return Core(outputs, final_state, entering, updates)


def inverse(lower: Tensor) -> Tensor:
    """(I + tril(lower, -1))^-1, by substitution."""
    eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    return torch.linalg.solve_triangular(lower, eye, upper=False, unitriangular=True)


def _across(
    chunks: Chunks, written: Tensor, seen: Tensor, initial: Tensor, table: ChunkTable, writes: Writes | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The serial part: U = written - seen S0 and S1 = tot o S0 + (suf o K)^T U, a chunk of each sequence at a time."""
    suffix = (chunks.k * decay.to_end(chunks.g)).transpose(-1, -2)
    total = chunks.g.sum(-2).exp()[..., None]  # [N, H, 1 or K, 1]
    sorted_already = table.order == list(range(table.sequences))
    state = initial if sorted_already else initial[table.order]
    done, entering, updates, first = [], [], [], 0
    for active in table.active:
        if active < state.shape[0]:
            done.append(state[active:])
            state = state[:active]
        now = slice(first, first + active)
        state = _written_over(state, table, now, writes)
        update = torch.baddbmm(_flat(written[now]), _flat(seen[now]), _flat(state), alpha=-1)
        entering.append(state)
        updates.append(update)
        state = torch.baddbmm(_flat(total[now] * state), _flat(suffix[now]), update).view_as(state)
        first += active
    final = torch.cat([state, *reversed(done)]) if done else state
    if not sorted_already:
        final = final[torch.tensor(table.order, device=final.device).argsort()]
    return torch.cat(entering), torch.cat(updates).view_as(written), final


def _written_over(state: Tensor, table: ChunkTable, now: slice, writes: Writes | None) -> Tensor:
    """The entering states of some chunks, with the states that were written in their place."""
    if writes is None:
        return state
    here = [(i, chunk.write) for i, chunk in enumerate(table.chunks[now]) if chunk.write >= 0]
    if not here:
        return state
    place, write = torch.tensor(here, device=state.device).unbind(1)
    mask = writes.heads.to(state.device)[write][..., None, None]
    return state.index_copy(0, place, torch.where(mask, writes.values.to(state)[write], state[place]))


def reread(outputs: Tensor, q: Tensor, entering: Tensor, table: ChunkTable, heads: Tensor | None) -> Tensor:
    """A token whose state was written reads the written one: that is the state entering the next chunk.

    outputs: `[B, T, Hv, V]`; q: `[B, T, Hk, K]`; entering: `[N, Hv, K, V]`; heads: `[cuts, Hv]` bool, the written ones.
    """
    if heads is None:
        return outputs
    where = table.cut_places(outputs.device)
    read = reference.read(entering[table.after_cut], repeat_heads(q[where], outputs.shape[2]))
    return outputs.index_put(where, torch.where(heads.to(outputs.device)[..., None], read, outputs[where]))


def _flat(x: Tensor) -> Tensor:
    return x.flatten(0, 1)
