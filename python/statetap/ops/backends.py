"""Backends: objects that answer a call with the reasons why they cannot take it, or take it.

`auto` takes the first that has no reason; one that is asked for by name and has some raises them all. A new backend is
an entry of `BACKENDS`, before those that it should be preferred to.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..errors import ArgumentError, UnsupportedCall
from . import after, cpp_backend, reference_backend, torch_backend, triton_backend
from .call import DeltaCall
from .pieces import ChunkTable
from .trajectory import Trajectory

# outputs, final_state, chunk_states, keys, updates, decays, betas, states, norms, reads; empty where not wanted
Results = tuple[Tensor, ...]


class Backend(Protocol):
    """What a backend has to offer."""

    name: str

    def available(self, device: torch.device) -> str | None:
        """None if it can run on this device, else why not, in one line."""

    def refuses(self, call: DeltaCall) -> list[str]:
        """Why it cannot take this call; empty if it can."""

    def forward(self, call: DeltaCall) -> Results:
        """Outputs, final state, and what the call wants besides."""


class Torch:
    """Chunked, differentiable, on any device: `torch_backend`."""

    name = "torch"

    def available(self, device: torch.device) -> str | None:
        return None

    def refuses(self, call: DeltaCall) -> list[str]:
        return []

    def forward(self, call: DeltaCall) -> Results:
        prepared, core = torch_backend.run(call)
        wanted, table, empty = call.wanted, call.table, core.outputs.new_empty(0)
        states = norms = reads = chunk_states = keys = updates = decays = betas = empty
        if wanted.trajectory or wanted.states or wanted.norms or wanted.probes is not None:
            t = trajectory_of(call, table, prepared.k, prepared.g, prepared.beta, core)
            if wanted.states is not None:
                tokens = (
                    wanted.mask if wanted.states == "mask" else wanted.tokens if wanted.states == "tokens" else None
                )
                states = after.states(t, tokens, wanted.heads, wanted.dtype)
            if wanted.norms:
                norms = after.norms(t, wanted.heads)
            if wanted.probes is not None:
                reads = after.read_probes(t, wanted.probes, wanted.heads).to(call.v.dtype)
            if wanted.trajectory:
                store = wanted.dtype or call.dtype
                chunk_states, updates = t.chunk_states.to(store), t.updates.to(store)
                keys, decays, betas = t.keys, t.decays, t.betas
        return (
            core.outputs.to(call.v.dtype),
            core.final_state,
            chunk_states,
            keys,
            updates,
            decays,
            betas,
            states,
            norms,
            reads,
        )


class Reference:
    """The token loop: the definition. Slow, and independent of the others; for tests."""

    name = "reference"

    def available(self, device: torch.device) -> str | None:
        return None

    def refuses(self, call: DeltaCall) -> list[str]:
        return []

    def forward(self, call: DeltaCall) -> Results:
        return reference_backend.forward(call)


class Triton:
    """Triton kernels on CUDA and ROCm: `triton_backend`."""

    name = "triton"

    def available(self, device: torch.device) -> str | None:
        return triton_backend.available(device)

    def refuses(self, call: DeltaCall) -> list[str]:
        return triton_backend.refuses(call)

    def forward(self, call: DeltaCall) -> Results:
        if not call.v.numel() or not call.k.numel():
            return BACKENDS["torch"].forward(call)  # nothing to launch
        return triton_backend.Run(call).forward()


class Cpp:
    """Blocks of tokens against a state that stays in the cache, on the CPU: `cpp_backend` and csrc/."""

    name = "cpp"

    def available(self, device: torch.device) -> str | None:
        return cpp_backend.available(device)

    def refuses(self, call: DeltaCall) -> list[str]:
        return cpp_backend.refuses(call)

    def forward(self, call: DeltaCall) -> Results:
        return cpp_backend.forward(call)


BACKENDS: dict[str, Backend] = {"triton": Triton(), "cpp": Cpp(), "torch": Torch(), "reference": Reference()}
AUTO = ("triton", "cpp", "torch")
"""What `auto` tries, in order; the reference is for those who ask for it by name."""


def choose(name: str, call: DeltaCall) -> Backend:
    """The backend of this name for this call; "auto" takes the first that can.

    Raises:
        ArgumentError: no backend of this name.
        UnsupportedCall: the one that was asked for cannot take the call; all its reasons.
    """
    if name == "auto":
        for backend in map(by_name, AUTO):
            if backend.available(call.v.device) is None and not backend.refuses(call):
                return backend
        name = AUTO[-1]
    backend = by_name(name)
    why_not = reasons(backend, call)
    if why_not:
        raise UnsupportedCall(f"backend {name!r} cannot take {call.describe()}: {'; '.join(why_not)}")
    return backend


def by_name(name: str) -> Backend:
    if name not in BACKENDS:
        raise ArgumentError(f"backend: got {name!r}, needs one of auto, {', '.join(BACKENDS)}")
    return BACKENDS[name]


def reasons(backend: Backend, call: DeltaCall) -> list[str]:
    """Everything that keeps `backend` from taking `call`."""
    why_not = backend.available(call.v.device)
    return ([why_not] if why_not else []) + backend.refuses(call)


def trajectory_of(
    call: DeltaCall, table: ChunkTable, keys: Tensor, g: Tensor, beta: Tensor, core: torch_backend.Core
) -> Trajectory:
    """The trajectory in the dtype of the computation."""
    starts, written = layout(call, table)
    return Trajectory(
        chunk_states=table.by_row(core.entering),
        keys=keys,
        updates=table.join(core.updates),
        decays=g[..., 0] if call.g is None or call.g.ndim == 3 else g,
        betas=beta,
        chunk_starts=starts,
        written=written,
        final_state=core.final_state,
        cu_seqlens=None if call.bounds is None else torch.tensor(call.bounds),
    )


def layout(call: DeltaCall, table: ChunkTable) -> tuple[Tensor, Tensor]:
    """`chunk_starts` `[B, n]` and `written` `[B, n, Hv]` of a call's trajectory."""
    device = call.v.device
    starts = torch.tensor(table.starts, dtype=torch.int64, device=device).reshape(call.v.shape[0], table.width)
    written = torch.zeros(len(table.chunks), call.heads, dtype=torch.bool, device=device)
    if call.writes is not None:
        written[table.after_cut] = call.writes.heads.to(device)
    return starts, table.by_row(written)
