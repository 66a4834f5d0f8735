"""The delta rule on CUDA and ROCm: a call prepared for `triton_kernels`, and its results put together.

Importing this does not import triton: a machine without a GPU, or with a broken driver, loses nothing.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..triton_kernels.launch import CUT, INPUT_PIECES, PACKED, PIECES, PLAIN, Launch, Layout
from . import reference
from .call import DeltaCall
from .pieces import CHUNK, ChunkTable
from .reference import l2norm, repeat_heads

# -- whether it can -----------------------------------------------------------------------------


def available(device: torch.device) -> str | None:
    """None if the kernels can run on this device, else why not."""
    if device.type == "cpu" and not interpreted():
        return "triton runs on CUDA and ROCm devices, not on cpu (TRITON_INTERPRET=1 emulates one, slowly)"
    return _available(device)


@cache  # asked at every call
def _available(device: torch.device) -> str | None:
    if device.type not in ("cpu", "cuda"):
        return f"triton runs on CUDA and ROCm devices, not on {device.type}"
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return f"triton needs compute capability 8.0 (bf16 tensor cores): {torch.cuda.get_device_name(device)} has less"
    loaded = kernels()
    if isinstance(loaded, str):
        return loaded
    if device.type == "cuda" and architecture(device) in ("sm_100", "sm_103") and loaded.version < (3, 7):
        return "triton before 3.7 compiles this recurrence with a race on sm_100: install triton 3.7 or later"
    return None


def refuses(call: DeltaCall) -> list[str]:
    """Why the kernels cannot take this call."""
    why_not = []
    if call.dtype == torch.float64:
        why_not.append("triton computes in fp32, not in fp64")
    if max(call.state_shape[2:]) > 256:
        why_not.append(f"triton takes key_dim and value_dim up to 256, not {max(call.state_shape[2:])}")
    return why_not


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def kernels() -> Any:
    """The kernel modules, or in one line why they do not import."""
    try:
        import triton

        from ..triton_kernels import channels, configs, outputs, prepare, scan, solve, step, taps
    except Exception as error:  # triton missing, or broken in any of its many ways
        line = (str(error).strip() or "no reason given").splitlines()[0]
        return f"triton does not import: {type(error).__name__}: {line}"
    version = tuple(int(n) for n in triton.__version__.split(".")[:2])
    modules = (channels, configs, outputs, prepare, scan, solve, step, taps)
    return SimpleNamespace(version=version, **{module.__name__.rsplit(".", 1)[1]: module for module in modules})


@cache
def architecture(device: torch.device) -> str:
    """ "sm_90", "gfx942"; what the interpreter emulates is an "sm_90"."""
    if device.type == "cpu":
        return "sm_90"
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


# -- where the chunks lie -----------------------------------------------------------------------


def slot_of(table: ChunkTable) -> dict[int, int]:
    """The slot of each chunk of the table."""
    return {n: row * table.width + column for row, of in enumerate(table.columns) for column, n in enumerate(of)}


@lru_cache(maxsize=256)
def layout(table: ChunkTable, device: torch.device) -> Layout:
    """A `ChunkTable` for the kernels, uploaded once for each table and device."""
    slots = table.batch * table.width
    if table.plain:
        return Layout(PLAIN, slots, table.width, table.sequences)
    starts, lengths, write_of = [0] * slots, [0] * slots, [-1] * slots
    following = list(range(slots))
    first, count = [0] * table.sequences, [0] * table.sequences
    for n, slot in slot_of(table).items():
        chunk = table.chunks[n]
        starts[slot], lengths[slot] = chunk.row * table.tokens + chunk.start, chunk.length
        write_of[slot] = chunk.write
        if not count[chunk.sequence]:
            first[chunk.sequence] = slot
        else:
            following[slot - 1] = slot
        count[chunk.sequence] += 1
        following[slot] = slots + chunk.sequence

    def upload(x: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(x, dtype=dtype).to(device, non_blocking=True)

    return Layout(
        CUT if table.cuts else PACKED,
        slots,
        table.width,
        table.sequences,
        upload(starts, torch.int64),
        upload(lengths),
        upload(following),
        upload(first),
        upload(count),
        upload(write_of),
    )


# -- the call -----------------------------------------------------------------------------------


class Run:
    """One call. `forward` is the order of the launches."""

    def __init__(self, call: DeltaCall) -> None:
        self.call, self.table, self.wanted = call, call.table, call.wanted
        self.kernels = kernels()
        device = call.v.device
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        at = layout(self.table, device)
        wide = max((call.q.dtype, call.k.dtype), key=lambda dtype: INPUT_PIECES[dtype])
        self.q, self.k = (x.to(wide).contiguous() for x in (call.q, call.k))
        self.v = call.v.contiguous()
        self.g, self.beta, self.initial = (
            None if x is None else x.contiguous() for x in (call.g, call.beta, call.initial_state)
        )
        self.channels = self.g is not None and self.g.ndim == 4
        pieces, inputs = PIECES[call.precision], INPUT_PIECES[wide]
        if wide == torch.float32:  # to the precision of the other backends, unless speed was asked for
            pieces, inputs = (1, 1) if call.precision == "fast" else (3, 3)
        rows, tokens = call.v.shape[:2]
        self.launch = Launch(
            device, architecture(device), rows, tokens, call.k.shape[2], call.heads, call.k.shape[3], call.v.shape[3],
            self.channels, inputs, pieces, at,
        )  # fmt: skip

    def forward(self) -> tuple[Tensor, ...]:
        """Outputs, final state, and what the call wants besides; `backends.Results`."""
        wanted = self.wanted
        self._needs()
        self._memory()
        if self.stepping:
            self._step()
        else:
            self._chunks()
        empty = self.v.new_empty(0)
        states = self._states() if wanted.states is not None else empty
        norms = self._norms() if wanted.norms else empty
        reads = self._reads() if wanted.probes is not None else empty
        chunk_states = keys = updates = decays = betas = empty
        if wanted.trajectory:
            store = wanted.dtype or torch.float32
            chunk_states, updates = self.states_in.to(store), self.updates.to(store)
            keys, decays, betas = self.keys, self._decays(), self._betas()
        return self.outputs, self.final, chunk_states, keys, updates, decays, betas, states, norms, reads

    def _needs(self) -> None:
        """Which intermediates are kept, and in which dtype."""
        wanted = self.wanted
        self.stepping = self.launch.at.kind == PLAIN and self.launch.tokens <= self.kernels.step.TOKENS
        self.fused = self.stepping or self.launch.config("scan").fused
        self.norms_by_scan = wanted.norms and not self.channels and not self.stepping
        self.replayed = wanted.states is not None or (wanted.norms and not self.norms_by_scan)
        exact = self.replayed or wanted.probes is not None or not self.fused
        self.keeps = wanted.trajectory or exact
        self.store = torch.float32 if exact or self.norms_by_scan else wanted.dtype or torch.float32
        self.needs_keys = wanted.trajectory or self.replayed or wanted.norms or wanted.probes is not None

    def _memory(self) -> None:
        launch, call = self.launch, self.call
        self.outputs = torch.empty_like(self.v)
        self.final = call.buffer("final_state", call.state_shape, torch.float32)
        self.states_in: Any = None
        self.updates: Any = None
        if self.keeps or self.norms_by_scan:
            shape = launch.rows, launch.at.per_row, *call.state_shape[1:]
            self.states_in = call.buffer("chunk_states", shape, self.store)
            if self.keeps and launch.at.slots != len(self.table.chunks):
                self.states_in.zero_()  # a row with fewer chunks ends in zeros
            self.updates = call.buffer("updates", self.v.shape, self.store)

    def _step(self) -> None:
        call = self.call
        if self.keeps:  # before the step: the caller's final state may be the initial one
            self.states_in[:, 0] = 0 if self.initial is None else self.initial
        self.kernels.step.step(
            self.launch, self.q, self.k, self.v, self.g, self.beta, self.initial, self.outputs, self.final,
            self.updates if self.keeps else None, call.scale, call.normalise,
        )  # fmt: skip
        if self.needs_keys:
            self.keys = self.kernels.prepare.prepare(self.launch, self.k, call.normalise, keep=True)[2]

    def _chunks(self) -> None:
        call, launch, k_ = self.call, self.launch, self.kernels
        q, q_factor, _ = k_.prepare.prepare(launch, self.q, call.normalise)
        k, k_factor, self.keys = k_.prepare.prepare(launch, self.k, call.normalise, keep=self.needs_keys)
        if self.channels:
            w = k_.channels.solve(launch, self.q, self.k, q_factor, k_factor, self.g, self.beta, call.scale)
            q, k = w.queries, w.keys
        else:
            w = k_.solve.solve(
                launch, q, k, q_factor, k_factor, self.g, self.beta, call.scale, squares=self.norms_by_scan
            )
        self.found = k_.scan.scan(
            launch, q, k, self.v, self.beta, self.g, w, self.initial, self.outputs if self.fused else None, self.final,
            self.states_in, self.updates, self.keeps, self.norms_by_scan, self._writes(),
        )  # fmt: skip
        if not self.fused:
            k_.outputs.read(launch, q, w, self.states_in, self.updates, self.outputs)
        if call.writes is not None:
            where = self.table.cut_places(launch.device)
            query = repeat_heads(call.q[where].float(), call.heads)
            query = l2norm(query, call.scale) if call.normalise else query * call.scale
            self._at_writes(self.outputs, reference.read(call.writes.values.float(), query))

    def _writes(self) -> tuple[Tensor, Tensor, Tensor] | None:
        writes = self.call.writes
        if writes is None:
            return None
        device = self.launch.device
        heads, values = writes.heads.to(device, torch.uint8), writes.values.to(device).contiguous()
        return self.launch.at.write_of, heads, values  # type: ignore[return-value]

    # -- side outputs ---------------------------------------------------------------------------

    def _states(self) -> Tensor:
        """The states after the wanted tokens, for the wanted heads."""
        wanted, launch, table = self.wanted, self.launch, self.table
        heads = self._heads()
        unique = list(dict.fromkeys(wanted.tokens))
        batch, tokens = launch.rows, launch.tokens
        dtype = wanted.dtype or torch.float32
        tail = heads.numel(), launch.K, launch.V
        if wanted.states == "all":
            flat: Any = None
            rows: tuple[int, ...] = (batch, tokens)
        elif wanted.states == "mask":
            assert wanted.mask is not None
            flat = wanted.mask.flatten().nonzero()[:, 0].tolist()
            rows = (len(flat),)
        else:
            flat = [row * tokens + token for row in range(batch) for token in unique]
            rows = (batch, len(unique))
        out = self.call.buffer("states", (*rows, *tail), dtype)
        if out.numel():
            chosen, until, place = _places(table, None if flat is None else tuple(flat), launch.device)
            self.kernels.taps.replay(
                launch, self.keys, self.updates, self.g, self.states_in, self.final,
                chosen=chosen, heads=heads, until=until, place=place, out=out,
            )  # fmt: skip
        if len(unique) != len(wanted.tokens):
            out = out[:, [unique.index(token) for token in wanted.tokens]]
        return out

    def _norms(self) -> Tensor:
        launch, call = self.launch, self.call
        every = torch.arange(call.heads, dtype=torch.int32, device=launch.device)
        slots = torch.arange(launch.at.slots, dtype=torch.int32, device=launch.device)
        if self.norms_by_scan:
            squares, doubtful = self.found
        else:
            tiles = launch.tiles(launch.config("scan with norms"))
            squares, doubtful = launch.empty(tiles, launch.rows, launch.tokens, call.heads), None
        self.kernels.taps.replay(
            launch, self.keys, self.updates, self.g, self.states_in, self.final,
            chosen=slots, heads=every, norms=squares, doubtful=doubtful,
        )  # fmt: skip
        norms = squares.sum(0).clamp_min(0).sqrt()
        if call.writes is not None:
            self._at_writes(norms, (call.writes.values.double() ** 2).sum((-1, -2)).sqrt().float())
        return norms if self.wanted.heads is None else norms[:, :, list(self.wanted.heads)]

    def _reads(self) -> Tensor:
        launch, call, wanted = self.launch, self.call, self.wanted
        probes: Tensor = wanted.probes.contiguous()  # type: ignore[union-attr]
        if probes.ndim == 2:
            probes = probes.expand(call.heads, *probes.shape).contiguous()
        shared = probes.ndim == 3
        heads = self._heads()
        if shared and not self.channels:
            shape = *self.v.shape[:2], heads.numel(), probes.shape[1], launch.V
            reads = call.buffer("reads", shape, self.v.dtype)
            if reads.numel():
                self.kernels.taps.probe(launch, probes, self.keys, self.updates, self.g, self.states_in, heads, reads)
        else:
            each = probes if not shared else probes.expand(*self.v.shape[:2], *probes.shape)
            reads = self._read_queries(each)
            if wanted.heads is not None:
                reads = reads[:, :, list(wanted.heads)]
        if call.writes is not None:
            at = probes[self.table.cut_places(launch.device)] if not shared else probes
            values = call.writes.values.float()
            of = slice(None) if wanted.heads is None else list(wanted.heads)
            read = (at.float()[..., None] * values[:, :, None]).sum(-2)
            self._at_writes(reads, read[:, of], call.writes.heads[:, of])
        return reads

    def _read_queries(self, queries: Tensor) -> Tensor:
        """Reads by queries `[B, T, Hv, P, K]` of their own at every token: `[B, T, Hv, P, V]`."""
        launch = replace(self.launch, Hk=self.call.heads, input_pieces=3)
        count = queries.shape[3]
        reads = launch.empty(*self.v.shape[:3], count, launch.V, dtype=self.v.dtype)
        keys = repeat_heads(self.keys, self.call.heads).contiguous()
        k = keys if self.channels else self.kernels.prepare.prepare(launch, keys, False)[0]
        for i in range(count if reads.numel() else 0):
            query = queries[:, :, :, i].float().contiguous()
            if self.channels:
                w = self.kernels.channels.project(launch, query, keys, None, None, self.g, 1.0)
                q = w.queries
            else:
                q = self.kernels.prepare.prepare(launch, query, False)[0]
                w = self.kernels.solve.project(launch, q, k, None, None, self.g, 1.0)
            self.kernels.outputs.read(launch, q, w, self.states_in, self.updates, reads[:, :, :, i])
        return reads

    # -- small things ---------------------------------------------------------------------------

    def _heads(self) -> Tensor:
        device = self.launch.device
        if self.wanted.heads is None:
            return torch.arange(self.call.heads, dtype=torch.int32, device=device)
        return torch.tensor(self.wanted.heads, dtype=torch.int32).to(device, non_blocking=True)

    def _decays(self) -> Tensor:
        return self.v.new_zeros(self.v.shape[:3], dtype=torch.float32) if self.g is None else self.g.float()

    def _betas(self) -> Tensor:
        return self.v.new_ones(self.v.shape[:3], dtype=torch.float32) if self.beta is None else self.beta.float()

    def _at_writes(self, x: Tensor, value: Tensor, heads: Tensor | None = None) -> None:
        """A token whose state was written reads the written one, and has its norm: x `[B, T, H, ...]`, in place."""
        heads = self.call.writes.heads if heads is None else heads  # type: ignore[union-attr]
        where = self.table.cut_places(x.device)
        heads = heads.to(x.device).reshape(*heads.shape, *[1] * (value.ndim - 2))
        x.index_put_(where, torch.where(heads, value.to(x.dtype), x[where]))


@lru_cache(maxsize=64)
def _places(table: ChunkTable, flat: tuple[int, ...] | None, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For states after flat tokens (None: all): the chunks to walk, how far in each, the row of each token or -1."""
    count = table.batch * table.tokens
    if flat is None:
        chosen = torch.arange(table.batch * table.width, dtype=torch.int32, device=device)
        return chosen, torch.full_like(chosen, CHUNK), torch.arange(count, dtype=torch.int64, device=device)
    wanted = torch.tensor(flat, dtype=torch.long)
    place = torch.full((count,), -1, dtype=torch.int64)
    place[wanted] = torch.arange(len(flat))
    chunk, inside = (x[wanted] for x in table.where)
    slots, until = slot_of(table), dict[int, int]()
    for n, i in zip(chunk.tolist(), inside.tolist()):
        until[slots[n]] = max(until.get(slots[n], 0), i + 1)
    upload = lambda x: torch.tensor(list(x), dtype=torch.int32).to(device, non_blocking=True)  # noqa: E731
    return upload(until), upload(until.values()), place.to(device, non_blocking=True)
