"""The reference as a backend: a loop over the tokens of each sequence, and everything from the states it passes."""

from __future__ import annotations

import torch
from torch import Tensor

from . import reference
from .call import DeltaCall, Prepared, prepare
from .reference import repeat_heads


def forward(call: DeltaCall) -> tuple[Tensor, ...]:
    """Every result of the call by its definition; see `backends.Results`."""
    p, wanted = prepare(call), call.wanted
    outputs, updates, states, final = _all(call, p)
    empty = outputs.new_empty(0)
    store = wanted.dtype or call.dtype
    heads = list(range(call.heads)) if wanted.heads is None else list(wanted.heads)
    kept = states[:, :, heads]
    tapped = norms = reads = chunk_states = keys = kept_updates = decays = betas = empty
    if wanted.states == "mask":
        tapped = kept[wanted.mask].to(store)
    elif wanted.states is not None:
        tapped = (kept if wanted.states == "all" else kept[:, list(wanted.tokens)]).to(store)
    if wanted.norms:
        norms = _norm(kept)
    if wanted.probes is not None:
        probes = wanted.probes.to(call.dtype)
        probes = probes.expand(*states.shape[:3], *probes.shape[-2:])[:, :, heads]
        reads = reference.read(kept[:, :, :, None], probes).to(call.v.dtype)
    if wanted.trajectory:
        chunk_states = _entering(call, p, states).to(store)
        keys, betas, kept_updates = p.k, p.beta.clone(), updates.to(store)
        decays = (p.g if call.g is not None and call.g.ndim == 4 else p.g[..., 0]).clone()
    return outputs.to(call.v.dtype), final, chunk_states, keys, kept_updates, decays, betas, tapped, norms, reads


def _all(call: DeltaCall, p: Prepared) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs and updates `[B, T, Hv, V]`, states `[B, T, Hv, K, V]`, final states `[sequences, Hv, K, V]`."""
    batch, tokens, heads, _value_dim = p.v.shape
    q, k = repeat_heads(p.q, heads), repeat_heads(p.k, heads)
    bounds = [(0, tokens)] if call.bounds is None else list(zip(call.bounds, call.bounds[1:]))
    outputs, updates, states, finals = [], [], [], []
    for n, (start, stop) in enumerate(bounds):
        state = p.state if call.bounds is None else p.state[n : n + 1]
        for t in range(start, stop):
            state, update, output = reference.step(state, q[:, t], k[:, t], p.v[:, t], p.g[:, t], p.beta[:, t])
            replaced = _written(call, state, t)
            if replaced is not state:
                state, output = replaced, reference.read(replaced, q[:, t])
            outputs.append(output)
            updates.append(update)
            states.append(state)
        finals.append(state)
    final = torch.cat(finals) if finals else p.state
    if not outputs:
        nothing = p.v[:, :0]
        return nothing.clone(), nothing.clone(), p.v.new_zeros((batch, 0, *call.state_shape[1:])), final.clone()
    return torch.stack(outputs, 1), torch.stack(updates, 1), torch.stack(states, 1), final


def _written(call: DeltaCall, state: Tensor, token: int) -> Tensor:
    """The states after `token`, with those that were written in their place."""
    rows = [] if call.writes is None else [(i, row) for i, (row, t) in enumerate(call.writes.cuts) if t == token]
    for i, row in rows:
        value = torch.where(call.writes.heads[i][:, None, None], call.writes.values[i].to(state), state[row])  # type: ignore[union-attr]
        state = torch.cat([state[:row], value[None], state[row + 1 :]])
    return state


def _entering(call: DeltaCall, p: Prepared, states: Tensor) -> Tensor:
    """The states entering the chunks, `[B, n, Hv, K, V]`: those after the token before."""
    table = call.table
    firsts = {0} if call.bounds is None else set(call.bounds)
    entering = []
    for chunk in table.chunks:
        starts_sequence = chunk.start in firsts and chunk.write < 0
        entering.append(p.state[chunk.sequence] if starts_sequence else states[chunk.row, chunk.start - 1])
    return table.by_row(torch.stack(entering) if entering else p.state[:0])


def _norm(states: Tensor) -> Tensor:
    square = (states * states).sum((-1, -2))
    positive = square > 0
    return torch.where(positive, torch.where(positive, square, 1).sqrt(), 0)
