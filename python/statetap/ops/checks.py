"""Every complaint about an argument: its name, what it got, what it needs."""

from __future__ import annotations

import itertools
import math
from numbers import Real
from typing import Any, Mapping, NoReturn, Sequence

import torch
from torch import Tensor

from ..errors import ArgumentError

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _complain(name: str, got: Any, needs: str) -> NoReturn:
    raise ArgumentError(f"{name}: got {got}, needs {needs}")


def tensor(name: str, x: Any, shape: Sequence[int | str], device: torch.device | None = None) -> None:
    """Complain unless `x` is a floating-point tensor of `shape` (a letter stands for any size)."""
    if not isinstance(x, Tensor):
        _complain(name, type(x).__name__, f"a tensor {_letters(shape)}")
    if x.ndim != len(shape) or any(isinstance(n, int) and n != m for n, m in zip(shape, x.shape)):
        _complain(name, f"shape {list(x.shape)}", _letters(shape))
    if x.dtype not in _FLOATS:
        _complain(name, x.dtype, "a floating-point dtype (float32, float64, bfloat16, float16)")
    if x.layout != torch.strided:
        _complain(name, x.layout, "a dense tensor: .to_dense()")
    if device is not None and x.device != device:
        _complain(name, f"a tensor on {x.device}", f"one on {device}, where v is")


def _letters(shape: Sequence[int | str]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def delta(q: Any, k: Any, v: Any, g: Any, beta: Any, scale: Any, initial_state: Any, cu_seqlens: Any) -> None:
    """Complain about the shapes, dtypes and devices of the delta rule's arguments."""
    tensor("v", v, ("B", "T", "Hv", "V"))
    batch, tokens, heads, value_dim = v.shape
    tensor("k", k, (batch, tokens, "Hk", "K"), v.device)
    key_heads, key_dim = k.shape[2:]
    tensor("q", q, (batch, tokens, key_heads, key_dim), v.device)
    if key_heads == 0 or heads % key_heads:
        _complain("v", f"{heads} heads", f"a multiple of the {key_heads} heads of q and k")
    if key_dim == 0 or value_dim == 0:
        _complain("k" if key_dim == 0 else "v", "a last axis of size 0", "at least 1")
    if g is not None:
        per_channel = isinstance(g, Tensor) and g.ndim == 4
        tensor("g", g, (batch, tokens, heads, key_dim) if per_channel else (batch, tokens, heads), v.device)
    if beta is not None:
        tensor("beta", beta, (batch, tokens, heads), v.device)
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, (Real, torch.SymFloat))):
        _complain("scale", type(scale).__name__, "a number")
    if scale is not None and not math.isfinite(scale):
        _complain("scale", scale, "a finite number")
    rows = batch
    if cu_seqlens is not None:
        rows = _cu_seqlens_shape(cu_seqlens, batch)
    if initial_state is not None:
        tensor("initial_state", initial_state, (rows, heads, key_dim, value_dim), v.device)


def _cu_seqlens_shape(cu_seqlens: Any, batch: int) -> int:
    """Complain about what can be told without looking at the values; the number of sequences."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = (
            f"{list(cu_seqlens.shape)} {cu_seqlens.dtype}"
            if isinstance(cu_seqlens, Tensor)
            else type(cu_seqlens).__name__
        )
        _complain("cu_seqlens", got, "a tensor [N + 1] of int32 or int64")
    if cu_seqlens.shape[0] < 1:
        _complain("cu_seqlens", "no entries", "[0, ..., T]")
    if batch != 1:
        _complain("cu_seqlens", f"{batch} rows", "one row (B = 1) that holds the packed sequences")
    return cu_seqlens.shape[0] - 1


def bounds(cu_seqlens: Sequence[int], tokens: int) -> tuple[int, ...]:
    """The values of `cu_seqlens`, if they are 0, never decreasing, and end at the number of tokens."""
    values = tuple(int(x) for x in cu_seqlens)
    if values[0] != 0:
        _complain("cu_seqlens", f"a first entry of {values[0]}", "0")
    for a, b in itertools.pairwise(values):
        if b < a:
            _complain("cu_seqlens", f"{b} after {a}", "entries that never decrease")
    if values[-1] != tokens:
        _complain("cu_seqlens", f"a last entry of {values[-1]}", f"{tokens}, the number of tokens of the row")
    return values


def position(name: str, token: Any, tokens: int) -> int:
    """A token index as a position from the start."""
    if isinstance(token, bool) or not hasattr(token, "__index__"):
        _complain(name, type(token).__name__, "an int")
    n = token.__index__()
    if not -tokens <= n < tokens:
        _complain(name, f"token {n}", f"one of the call's {tokens} tokens")
    return n + tokens if n < 0 else n


def as_tokens(tokens: Any) -> Any:
    """Tokens of another array library as a tensor."""
    return torch.as_tensor(tokens) if hasattr(tokens, "__array__") and not isinstance(tokens, Tensor) else tokens


def token_mask(tokens: Any, batch: int, length: int) -> Tensor | None:
    """`tokens` if it is a bool mask `[B, T]`, else None."""
    if not (isinstance(tokens, Tensor) and tokens.dtype == torch.bool):
        return None
    if tuple(tokens.shape) != (batch, length):
        _complain("states", f"a mask of shape {list(tokens.shape)}", f"[{batch}, {length}]")
    return tokens


def token_positions(tokens: Any, length: int, name: str = "states") -> list[int]:
    """Token positions from None or "all", an int, ints, or a slice."""
    if tokens is None or (isinstance(tokens, str) and tokens == "all"):
        return list(range(length))
    if isinstance(tokens, slice):
        try:
            return list(range(*tokens.indices(length)))
        except (TypeError, ValueError) as error:
            _complain(name, tokens, f"a slice of ints: {error}")
    if isinstance(tokens, Tensor) and tokens.ndim == 1 and not tokens.is_floating_point():
        tokens = tokens.tolist()
    if hasattr(tokens, "__index__") and not isinstance(tokens, (Tensor, bool)):
        tokens = [tokens]
    if not isinstance(tokens, (list, tuple, range)):
        got = repr(tokens) if isinstance(tokens, str) else type(tokens).__name__
        _complain(name, got, '"all", ints, a slice, or a bool mask [B, T]')
    return [position(name, token, length) for token in tokens]


def head_list(heads: Any, count: int) -> list[int]:
    """Value heads as indices from the start."""
    if isinstance(heads, Tensor):
        heads = heads.tolist()
    if not isinstance(heads, (list, tuple, range)):
        _complain("heads", type(heads).__name__, "a sequence of ints")
    chosen = []
    for head in heads:
        if isinstance(head, bool) or not hasattr(head, "__index__") or not -count <= head < count:
            _complain("heads", repr(head), f"ints from {-count} to {count - 1}")
        chosen.append(int(head) % count)
    return chosen


def probes(x: Any, batch: int, tokens: int, heads: int, key_dim: int, device: torch.device) -> None:
    """Complain unless probes are `[P, K]`, `[Hv, P, K]` or `[B, T, Hv, P, K]`."""
    shapes: dict[int, tuple] = {2: ("P", key_dim), 3: (heads, "P", key_dim), 5: (batch, tokens, heads, "P", key_dim)}
    if not isinstance(x, Tensor) or x.ndim not in shapes:
        got = f"shape {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        _complain(
            "probes", got, f"[P, {key_dim}], [{heads}, P, {key_dim}] or [{batch}, {tokens}, {heads}, P, {key_dim}]"
        )
    tensor("probes", x, shapes[x.ndim], device)


def storage_dtype(dtype: Any) -> None:
    if dtype is not None and dtype not in _FLOATS:
        _complain("dtype", dtype, "a floating-point dtype (float32, float64, bfloat16, float16)")


def buffer(name: str, given: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    """Complain unless `out[name]` is the tensor that the call fills."""
    what = f"out[{name!r}]"
    if not isinstance(given, Tensor):
        _complain(what, type(given).__name__, "a tensor")
    if tuple(given.shape) != tuple(shape):
        _complain(what, f"shape {list(given.shape)}", str(list(shape)))
    if given.dtype != dtype:
        _complain(what, given.dtype, str(dtype))
    if given.device != device:
        _complain(what, f"a tensor on {given.device}", f"one on {device}")
    if any(n > 1 and step == 0 for n, step in zip(given.shape, given.stride())):
        _complain(what, "an expanded tensor", "one whose elements have each a place of their own")


def buffers(given: Mapping[str, Any]) -> None:
    """Complain unless these are tensors to fill, each in memory of its own."""
    places: list[tuple[int, int, str]] = []
    for name, x in given.items():
        if not isinstance(x, Tensor):
            _complain(f"out[{name!r}]", type(x).__name__, "a tensor")
        if x.requires_grad:
            _complain(f"out[{name!r}]", "a tensor that requires a gradient", "a plain one: .detach()")
        if x.numel() and not x.is_meta:
            last = sum((n - 1) * step for n, step in zip(x.shape, x.stride())) + 1
            places.append((x.data_ptr(), x.data_ptr() + last * x.element_size(), name))
    for (_, end, one), (start, _, other) in itertools.pairwise(sorted(places)):
        if start < end:
            _complain(f"out[{other!r}]", f"memory that out[{one!r}] fills", "memory of its own")


def device(given: Any) -> torch.device:
    """A device, if something can be put on it."""
    try:
        return torch.empty(0, device=given).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ArgumentError(f"device: {given!r} cannot be used: {str(error).strip().splitlines()[0]}") from None


def kind(name: str, given: Any, wanted: type, article: str) -> None:
    """An argument that is not of its kind, before anything is read from it."""
    if not isinstance(given, wanted):
        _complain(name, type(given).__name__, article)
