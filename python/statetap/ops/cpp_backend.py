"""The C++ kernels: a call packed into the struct of `csrc/statetap.h`, results written where they stay."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any, Sequence

import torch
from torch import Tensor

from . import native
from .call import DeltaCall, Wanted
from .pieces import ChunkTable

MAX_KEY_DIM = 256
HUGE = (
    1 << 22
)  # bytes from which a fresh result is asked for in huge pages: 4 KiB ones take longer to clear than to fill

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_CALL = struct.Struct("=12qd28qq21q21q")  # `statetap_delta`
_NO_INPUT = (0,) * 7


def available(device: torch.device) -> str | None:
    """None if the kernels can run on this device, else why not."""
    return native.why_not() if device.type == "cpu" else f"the C++ kernels run on the CPU, not on {device.type}"


def refuses(call: DeltaCall) -> list[str]:
    key_dim = call.k.shape[3]
    return [] if key_dim <= MAX_KEY_DIM else [f"key_dim {key_dim} is above {MAX_KEY_DIM}"]


def forward(call: DeltaCall) -> tuple[Tensor, ...]:
    """Every result of the call; see `backends.Results`."""
    wanted, dtype, v, table = call.wanted, call.dtype, call.v, call.table
    if wanted.looks and _has_repeats(wanted):
        return _repeated(call)
    batch, _, heads, value_dim = v.shape
    key_dim = call.k.shape[3]
    store = wanted.dtype or dtype
    new = _Allocator(call)
    outputs = new("outputs", v.shape, v.dtype)
    final_state = new("final_state", call.state_shape, dtype)
    chunk_states = keys = updates = decays = betas = states = norms = reads = new.nothing
    if wanted.trajectory:
        chunk_states = new("chunk_states", (batch, table.width, heads, key_dim, value_dim), store)
        if len(table.chunks) < batch * table.width:
            chunk_states.zero_()  # rows with fewer chunks end in zeros
        keys, updates = new("keys", call.k.shape, dtype), new("updates", v.shape, store)
        decays = new("decays", v.shape[:3] if call.g is None else call.g.shape, dtype)
        betas = new("betas", v.shape[:3], dtype)
    token_slots = head_slots = probes = None
    kept = heads
    if wanted.looks:
        (states, norms, reads), token_slots, head_slots, kept, probes = _looks(wanted, v, key_dim, store, dtype, new)
    write_heads = write_values = None
    if call.writes is not None:
        write_heads, write_values = call.writes.heads, call.writes.values.to(dtype).contiguous()
    run(
        (call.q, call.k, v, call.g, call.beta, call.initial_state, probes),
        (outputs, final_state, chunk_states, keys, updates, decays, betas, states, norms, reads),
        table,
        dtype,
        store,
        store,
        v.dtype,
        kept,
        (token_slots, head_slots, write_heads, write_values),
        call.scale,
        call.normalise,
    )
    return outputs, final_state, chunk_states, keys, updates, decays, betas, states, norms, reads


class _Allocator:
    """Results: the caller's own buffers where they will do, else fresh memory, in huge pages if it is much."""

    def __init__(self, call: DeltaCall) -> None:
        self.buffers = call.buffers
        self.nothing = torch.empty(0, dtype=call.dtype)
        if self.buffers:
            given = (call.q, call.k, call.v, call.g, call.beta, call.initial_state, call.wanted.probes)
            self.taken = {x.untyped_storage().data_ptr() for x in given if x is not None}

    def __call__(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        buffer = self.buffers.get(name)
        if buffer is None or not self._will_do(buffer, shape, dtype):
            return fresh(shape, dtype)
        self.taken.add(buffer.untyped_storage().data_ptr())
        return buffer

    def _will_do(self, buffer: Tensor, shape: Sequence[int], dtype: torch.dtype) -> bool:
        fits = buffer.shape == torch.Size(shape) and buffer.dtype == dtype and buffer.device.type == "cpu"
        return fits and buffer.is_contiguous() and buffer.untyped_storage().data_ptr() not in self.taken


def fresh(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory for a result, in huge pages if it is much."""
    result = torch.empty(shape, dtype=dtype)
    if result.nbytes >= HUGE:
        native.huge_pages(result.data_ptr(), result.nbytes)
    return result


def _looks(wanted: Wanted, v: Tensor, key_dim: int, store: torch.dtype, dtype: torch.dtype, new: Any) -> tuple:
    """Room for states, norms and reads, and which token and head goes where."""
    batch, tokens, heads, value_dim = v.shape
    states = norms = reads = new.nothing
    token_slots = probes = None
    kept, head_slots = slots_of_heads(wanted.heads, heads)
    if wanted.states:
        shape, token_slots = slots_of_tokens(wanted, batch, tokens)
        states = new("states", (*shape, kept, key_dim, value_dim), store)
    if wanted.norms:
        norms = new("norms", (batch, tokens, kept), dtype)
    if wanted.probes is not None:
        probes = wanted.probes.expand(batch, tokens, heads, -1, -1)
        reads = new("reads", (batch, tokens, kept, probes.shape[3], value_dim), v.dtype)
    return (states, norms, reads), token_slots, head_slots, kept, probes


def slots_of_heads(chosen: Sequence[int] | None, heads: int) -> tuple[int, Tensor | None]:
    """How many heads are kept, and which of them each head is, -1 for none; None for all in order."""
    if chosen is None:
        return heads, None
    slots = torch.full((heads,), -1)
    slots[list(chosen)] = torch.arange(len(chosen))
    return len(chosen), slots


def slots_of_tokens(wanted: Wanted, batch: int, tokens: int) -> tuple[tuple[int, ...], Tensor | None]:
    """The states' first axes, and which of the states each token's is, -1 for none; None for all in order."""
    if wanted.states == "all":
        return (batch, tokens), None
    if wanted.states == "mask":
        mask = wanted.mask.flatten()  # type: ignore[union-attr]
        return (int(mask.sum()),), torch.where(mask, mask.cumsum(0) - 1, -1)
    slots = torch.full((batch, tokens), -1)
    shape = batch, len(wanted.tokens)
    slots[:, list(wanted.tokens)] = torch.arange(batch * len(wanted.tokens)).view(shape)
    return shape, slots


def _has_repeats(wanted: Wanted) -> bool:
    return any(len(set(x)) < len(x) for x in (wanted.tokens, wanted.heads or ()))


def _repeated(call: DeltaCall) -> tuple[Tensor, ...]:
    """A call that asks for a token or a head twice: each is computed once."""
    wanted = call.wanted
    tokens, heads = (tuple(dict.fromkeys(x or ())) for x in (wanted.tokens, wanted.heads))
    once = replace(wanted, tokens=tokens, heads=None if wanted.heads is None else heads)
    *others, states, norms, reads = forward(replace(call, wanted=once, buffers={}))
    if wanted.states == "tokens":
        states = states[:, [tokens.index(t) for t in wanted.tokens]]
    if wanted.heads is not None:
        chosen = [heads.index(h) for h in wanted.heads]
        states = states[..., chosen, :, :] if wanted.states else states
        norms = norms[:, :, chosen] if wanted.norms else norms
        reads = reads[:, :, chosen] if wanted.probes is not None else reads
    return (*others, states, norms, reads)


def run(
    inputs: Sequence[Tensor | None],
    results: Sequence[Tensor],
    table: ChunkTable,
    dtype: torch.dtype,
    store: torch.dtype,
    state_dtype: torch.dtype,
    output_dtype: torch.dtype,
    kept: int,
    places: Sequence[Tensor | None],
    scale: float = 1.0,
    normalise: bool = False,
    replay: bool = False,
) -> None:
    """Pack a call, or the replay of one, and make it.

    inputs: q, k, v, g, beta, initial state and probes, or None. results: as `backends.Results`; what is empty is not
    wanted. places: which state each token's is, which of the kept each head is, the written heads and states; or None.
    """
    q, k, v, g, beta, state, probes = inputs
    token_slots, head_slots, write_heads, write_values = places
    outputs, final_state, chunk_states, keys, updates, decays, betas, states, norms, reads = map(_pointer, results)
    batch, tokens, heads, value_dim = v.shape  # type: ignore[union-attr]
    chunks, first = table.by_sequence
    packed = _CALL.pack(
        _CALL.size,
        torch.get_num_threads(),
        _DTYPES[dtype],
        batch,
        tokens,
        k.shape[2],  # type: ignore[union-attr]
        heads,
        k.shape[3],  # type: ignore[union-attr]
        value_dim,
        table.sequences,
        normalise,
        replay,
        scale,
        *_input(q),
        *_input(k),
        *_input(v),
        *_input(g),
        g is not None and g.ndim == 4,
        *_input(beta),
        *_input(state),
        *_input(probes),
        0 if probes is None else probes.shape[3],
        chunks.buffer_info()[0],
        first.buffer_info()[0],
        _pointer(write_heads),
        _pointer(write_values),
        outputs,
        _DTYPES[output_dtype],
        final_state,
        _DTYPES[store],
        chunk_states,
        keys,
        updates,
        decays,
        betas,
        states,
        _DTYPES[state_dtype],
        _pointer(token_slots),
        _pointer(head_slots),
        kept,
        norms,
        reads,
    )
    native.gated_delta_rule(packed)


def _pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _input(x: Tensor | None) -> tuple[int, ...]:
    """`statetap_input`."""
    if x is None:
        return _NO_INPUT
    strides = x.stride()
    return (x.data_ptr(), _DTYPES[x.dtype], *strides, *_NO_INPUT[: 5 - len(strides)])
