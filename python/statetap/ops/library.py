"""The rule as torch operators, so that autograd, `torch.compile` and opcheck know it.

`statetap::gated_delta_rule` and its backward are opaque: values are checked, and Python decides, inside them. The
`_out` variant fills the caller's tensors. Defined with `Library.define`, whose calls cost a fifteenth of `custom_op`'s.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import Error
from . import backends, checks
from .call import DeltaCall, Wanted, Writes
from .pieces import chunk_table
from .precision import full_precision

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, float scale, Tensor? initial_state, bool normalise, "
    "Tensor? cu_seqlens, int[] cuts, Tensor? write_heads, Tensor? write_values, "
    "bool trajectory, str states, SymInt[] tokens, Tensor? mask, int[]? heads, bool norms, Tensor? probes, "
    "ScalarType? dtype, str backend, str precision"
)
FIELDS = (
    "outputs",
    "final_state",
    "chunk_states",
    "keys",
    "updates",
    "decays",
    "betas",
    "states",
    "norms",
    "reads",
    "chunk_starts",
    "written",
)
_DIFFERENTIABLE = ("q", "k", "v", "g", "beta", "initial_state", "write_values", "probes")
_NAMES = [argument.split()[-1] for argument in _ARGUMENTS.split(", ")]
_FLOATING = len(FIELDS) - 2  # of the fields, those that have a gradient

library = torch.library.Library("statetap", "DEF")
_results = ", ".join(["Tensor"] * len(FIELDS))
library.define(f"gated_delta_rule({_ARGUMENTS}) -> ({_results})", tags=(torch.Tag.needs_fixed_stride_order,))
library.define(f"gated_delta_rule_out({_ARGUMENTS}, str[] names, Tensor(a!)[] out) -> ({_results})")
library.define(f"gated_delta_rule_backward({_ARGUMENTS}, Tensor?[] grads) -> Tensor[]")

_read_bounds: Any = WeakTensorKeyDictionary()  # cu_seqlens -> (its version, its values): a GPU is asked once a tensor


def _call(args: Sequence[Any]) -> tuple[DeltaCall, str]:
    """The operator's arguments as a `DeltaCall`, and the backend's name."""
    a = dict(zip(_NAMES, args))
    bounds = None if a["cu_seqlens"] is None else _bounds(a["cu_seqlens"], a["v"].shape[1])
    cuts = tuple(zip(a["cuts"][::2], a["cuts"][1::2]))
    writes = Writes(cuts, a["write_heads"], a["write_values"]) if cuts else None
    heads = None if a["heads"] is None else tuple(a["heads"])
    wanted = Wanted(
        a["trajectory"], a["states"] or None, tuple(a["tokens"]), a["mask"], heads, a["norms"], a["probes"], a["dtype"]
    )
    call = DeltaCall(
        a["q"],
        a["k"],
        a["v"],
        a["g"],
        a["beta"],
        a["scale"],
        a["initial_state"],
        a["normalise"],
        bounds,
        writes,
        wanted,
        a["precision"],
    )
    return call, a["backend"]


def _bounds(cu_seqlens: Tensor, tokens: int) -> tuple[int, ...]:
    version = None if cu_seqlens.is_inference() else cu_seqlens._version
    known = _read_bounds.get(cu_seqlens)
    if known is None or known[0] != version or version is None:
        known = _read_bounds[cu_seqlens] = version, cu_seqlens.tolist()
    return checks.bounds(known[1], tokens)


def _forward(*args: Any) -> tuple[Tensor, ...]:
    given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
    seen: set[int] = set()
    return tuple(_own(x, given, seen) for x in _results_of(args))


def _results_of(args: Sequence[Any], buffers: dict[str, Tensor] | None = None) -> tuple[Tensor, ...]:
    """As the backend gives them, in the order of `FIELDS`."""
    call, name = _call(args)
    call = replace(call, buffers=buffers) if buffers else call
    with full_precision():
        return _with_layout(call, backends.choose(name, call).forward(call))


def followable(*args: Any) -> tuple[Tensor, ...]:
    """The operator as plain torch operations, by the torch backend: see `transforms.followed`."""
    call, _ = _call(args)
    with full_precision():
        return _with_layout(call, backends.BACKENDS["torch"].forward(call))


def _with_layout(call: DeltaCall, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A backend's results, and the two fields of a trajectory that follow from the call alone."""
    if call.wanted.trajectory:
        return results + backends.layout(call, call.table)
    return (*results, call.v.new_empty(0, dtype=torch.int64), call.v.new_empty(0, dtype=torch.bool))


def _own(x: Tensor, given: set[int], seen: set[int]) -> Tensor:
    """`x`, contiguous, in a storage that no argument and no other result shares, and not a view of anything.

    torch refuses in-place edits of a view that an operator with several results returns.
    """
    if not x.numel():
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    x = x.contiguous()
    storage = x.untyped_storage()
    if storage.data_ptr() in given | seen or storage.nbytes() > x.numel() * x.element_size():
        x = x.clone()
    elif x._is_view():
        x = x.new_empty(0).set_(x)
    seen.add(x.untyped_storage().data_ptr())
    return x


def _forward_out(*args: Any) -> tuple[Tensor, ...]:
    *args, names, out = args  # type: ignore[assignment]
    buffers = dict(zip(names, out))
    results = dict(zip(FIELDS, _results_of(args, buffers)))
    for name, buffer in buffers.items():
        result = results[name]
        checks.buffer(name, buffer, result.shape, result.dtype, result.device)
    for name, buffer in buffers.items():
        if results[name].data_ptr() != buffer.data_ptr():  # else the backend has written it there
            buffer.copy_(results[name])
        results[name] = buffer.new_empty(0)  # the caller has it
    given = {x.untyped_storage().data_ptr() for x in (*args, *out) if isinstance(x, Tensor)}
    seen: set[int] = set()
    return tuple(_own(x, given, seen) for x in results.values())


def _fake(*args: Any) -> tuple[Tensor, ...]:
    """Shapes and dtypes of the results."""
    a = dict(zip(_NAMES, args))
    v, k = a["v"], a["k"]
    batch, tokens, heads, value_dim = v.shape
    key_dim = k.shape[3]
    given = (a["q"], k, v, a["g"], a["beta"], a["initial_state"])
    computed = dtype = (
        torch.float64 if any(x is not None and x.dtype == torch.float64 for x in given) else torch.float32
    )
    store = a["dtype"] or dtype
    exact = lambda dtype: not dtype.is_floating_point  # noqa: E731
    rows = batch if a["cu_seqlens"] is None else a["cu_seqlens"].shape[0] - 1
    kept = heads if a["heads"] is None else len(a["heads"])

    def shape(*sizes: Any, dtype: torch.dtype = dtype, wanted: bool = True) -> Tensor:
        return v.new_empty(sizes, dtype=dtype) if wanted else v.new_empty(0, dtype=dtype if exact(dtype) else computed)

    t = a["trajectory"]
    chunks = _chunk_count(a, batch, tokens) if t else 0
    decay = () if a["g"] is None or a["g"].ndim == 3 else (key_dim,)
    if a["states"] == "mask":
        n = torch.library.get_ctx().new_dynamic_size()
        states = shape(n, kept, key_dim, value_dim, dtype=store)
    else:
        count = tokens if a["states"] == "all" else len(a["tokens"])
        states = shape(batch, count, kept, key_dim, value_dim, dtype=store, wanted=bool(a["states"]))
    probes = 0 if a["probes"] is None else a["probes"].shape[-2]
    return (
        shape(batch, tokens, heads, value_dim, dtype=v.dtype),
        shape(rows, heads, key_dim, value_dim),
        shape(batch, chunks, heads, key_dim, value_dim, dtype=store, wanted=t),
        shape(*k.shape, wanted=t),
        shape(batch, tokens, heads, value_dim, dtype=store, wanted=t),
        shape(batch, tokens, heads, *decay, wanted=t),
        shape(batch, tokens, heads, wanted=t),
        states,
        shape(batch, tokens, kept, wanted=a["norms"]),
        shape(batch, tokens, kept, probes, value_dim, dtype=v.dtype, wanted=a["probes"] is not None),
        shape(batch, chunks, dtype=torch.int64, wanted=t),
        shape(batch, chunks, heads, dtype=torch.bool, wanted=t),
    )


def _chunk_count(a: dict[str, Any], batch: int, tokens: int) -> Any:
    if a["cu_seqlens"] is not None:
        return torch.library.get_ctx().new_dynamic_size()
    if a["cuts"]:
        cuts = tuple(zip(a["cuts"][::2], a["cuts"][1::2]))
        return max(map(len, chunk_table(int(batch), int(tokens), None, cuts).columns), default=0)
    return (tokens + 63) // 64


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.places = [i for i, x in enumerate(inputs) if isinstance(x, Tensor)]
    ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
    ctx.save_for_backward(*(inputs[i] for i in ctx.places))
    ctx.mark_non_differentiable(*output[_FLOATING:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple:
    args = list(ctx.others)
    for i, x in zip(ctx.places, ctx.saved_tensors):
        args[i] = x
    found = torch.ops.statetap.gated_delta_rule_backward(*args, list(grads[:_FLOATING]))
    by_name = dict(zip(_DIFFERENTIABLE, found))
    needed = dict(zip(_NAMES, ctx.needs_input_grad))
    return tuple(by_name[name] if name in by_name and needed[name] else None for name in _NAMES)


def _gradients(*args: Any) -> list[Tensor]:
    """Recompute through the torch backend, which autograd can follow, and differentiate that."""
    *args, grads = args  # type: ignore[assignment]
    a = dict(zip(_NAMES, args))
    inputs = {n: a[n].detach().requires_grad_() for n in _DIFFERENTIABLE if a[n] is not None}
    call, _ = _call([inputs.get(name, a[name]) for name in _NAMES])
    with _autograd(), torch.enable_grad(), full_precision():
        results = backends.BACKENDS["torch"].forward(call)
        pairs = [(y, g) for y, g in zip(results, grads) if g is not None and y.requires_grad]
        found: Sequence[Any] = (None,) * len(inputs)
        if pairs:
            outputs, weights = zip(*((y, g.to(y.dtype)) for y, g in pairs))
            found = torch.autograd.grad(outputs, list(inputs.values()), weights, allow_unused=True)
    by_name = dict(zip(inputs, found))
    return [_gradient(a[name], by_name.get(name)) for name in _DIFFERENTIABLE]


def _gradient(x: Tensor | None, found: Tensor | None) -> Tensor:
    if x is None:
        return torch.empty(0)
    return torch.zeros_like(x, memory_format=torch.contiguous_format) if found is None else found.contiguous()


def _gradients_fake(*args: Any) -> list[Tensor]:
    a = dict(zip(_NAMES, args))
    given = [a[name] for name in _DIFFERENTIABLE]
    return [torch.empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in given]


def _second_derivative(ctx: Any, *grads: Any) -> Any:
    raise Error("gated_delta_rule: second derivatives are not implemented")


def _autograd() -> Any:
    """An operator runs below autograd; its backward needs autograd inside it."""
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradCPU", "AutogradCUDA", "AutogradOther", "ADInplaceOrView"):
        exclude = exclude.remove(getattr(torch._C.DispatchKey, key)) if hasattr(torch._C.DispatchKey, key) else exclude
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), exclude)


library.impl("gated_delta_rule", _forward, "CompositeExplicitAutograd")
library.impl("gated_delta_rule_out", _forward_out, "CompositeExplicitAutograd")
library.impl("gated_delta_rule_backward", _gradients, "CompositeExplicitAutograd")
torch.library.register_fake("statetap::gated_delta_rule", _fake, lib=library)
torch.library.register_fake("statetap::gated_delta_rule_backward", _gradients_fake, lib=library)
torch.library.register_autograd("statetap::gated_delta_rule", _backward, setup_context=_setup, lib=library)
torch.library.register_autograd("statetap::gated_delta_rule_backward", _second_derivative, lib=library)
