"""What is computed from a trajectory after the fact, by the C++ kernels: `after` where nothing needs a gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Sequence

import torch
from torch import Tensor

from . import cpp_backend
from .call import Wanted
from .checks import as_tokens, head_list, token_mask, token_positions
from .reference import repeat_heads
from .transforms import tracked

if TYPE_CHECKING:
    from .trajectory import Trajectory


def takes(t: Trajectory, *others: Any) -> bool:
    """Whether the kernels can replay `t`, read with `others`: on the CPU, with nothing for autograd to follow."""
    if torch.compiler.is_compiling() or cpp_backend.available(t.updates.device):
        return False
    fits = t.decays.dtype in (torch.float32, torch.float64) and t.keys.shape[3] <= cpp_backend.MAX_KEY_DIM
    return fits and not tracked((*t.fields().values(), *others))


def states(t: Trajectory, tokens: Any = None, heads: Sequence[int] | None = None) -> Tensor:
    """As `after.states`."""
    batch, length, all_heads = t.betas.shape
    chosen = None if heads is None else head_list(heads, all_heads)
    tokens = as_tokens(tokens)
    mask = token_mask(tokens, batch, length)
    if mask is not None:
        return _states(t, Wanted(states="mask", mask=mask), chosen)
    if tokens is None or (isinstance(tokens, str) and tokens == "all"):
        return _states(t, Wanted(states="all"), chosen)
    positions = token_positions(tokens, length)
    once = tuple(dict.fromkeys(positions))
    found = _states(t, Wanted(states="tokens", tokens=once), chosen)
    return found if len(once) == len(positions) else found[:, [once.index(n) for n in positions]]


def _states(t: Trajectory, wanted: Wanted, heads: list[int] | None) -> Tensor:
    batch, tokens, all_heads, value_dim = t.updates.shape
    once = None if heads is None else list(dict.fromkeys(heads))
    kept, head_slots = cpp_backend.slots_of_heads(once, all_heads)
    shape, token_slots = cpp_backend.slots_of_tokens(wanted, batch, tokens)
    found = cpp_backend.fresh((*shape, kept, t.keys.shape[3], value_dim), t.chunk_states.dtype)
    _replay(t, states=found, kept=kept, token_slots=token_slots, head_slots=head_slots)
    return found if heads is None or len(heads) == kept else found[..., [once.index(h) for h in heads], :, :]  # type: ignore[union-attr]


def norms(t: Trajectory, heads: Sequence[int] | None = None) -> Tensor:
    """As `after.norms`."""
    found = torch.empty(t.betas.shape, dtype=t.decays.dtype)
    _replay(t, norms=found, kept=t.betas.shape[2])
    return found if heads is None else found[:, :, head_list(heads, t.betas.shape[2])]


def read(t: Trajectory, queries: Tensor) -> Tensor:
    """As `after.read`."""
    found = cpp_backend.fresh(t.updates.shape, t.decays.dtype)
    keys = t.keys if queries.shape[2] == t.keys.shape[2] else repeat_heads(t.keys, queries.shape[2])
    _replay(t, keys, queries, outputs=found)
    return found


def _replay(
    t: Trajectory,
    keys: Tensor | None = None,
    queries: Tensor | None = None,
    outputs: Tensor | None = None,
    states: Tensor | None = None,
    norms: Tensor | None = None,
    kept: int = 0,
    token_slots: Tensor | None = None,
    head_slots: Tensor | None = None,
) -> None:
    """Fill what is given."""
    table, dtype = t.table(), t.decays.dtype
    entering = t.chunk_states[:, : table.width].contiguous()
    written = table.by_chunk(t.written)[table.after_cut].contiguous() if table.cuts else None
    nothing = torch.empty(0)
    results = (outputs, t.final_state.to(dtype).contiguous(), entering, None, None, None, None, states, norms, None)
    cpp_backend.run(
        (queries, t.keys if keys is None else keys, t.updates, t.decays, None, None, None),
        tuple(nothing if x is None else x for x in results),
        table,
        dtype,
        entering.dtype,
        t.chunk_states.dtype if states is None else states.dtype,
        dtype,
        kept,
        (token_slots, head_slots, written, None),
        replay=True,
    )
