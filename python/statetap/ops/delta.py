"""`gated_delta_rule`: the public function."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import torch
from torch import Tensor

from ..errors import ArgumentError
from . import checks
from .backends import by_name
from .library import FIELDS, followable
from .taps import RecurrenceOutput, StateWrite, Taps
from .trajectory import Trajectory
from .transforms import followed, tracked

_TRAJECTORY = ("chunk_states", "keys", "updates", "decays", "betas", "chunk_starts", "written")


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    taps: Taps | None = None,
    state_writes: Sequence[StateWrite] | None = None,
    backend: str = "auto",
    precision: str = "high",
) -> RecurrenceOutput:
    """The gated delta rule, and Kimi delta attention: outputs, final state, and the side outputs that `taps` asks for.

    For each value head, over a state S `[K, V]`:

        S~ = exp(g_t) o S_{t-1},  u_t = beta_t (v_t - S~^T k_t),  S_t = S~ + k_t u_t^T,  o_t = S_t^T q_t

    Gated DeltaNet (arXiv:2412.06464, eq. 10) for a decay per head, Kimi delta attention (arXiv:2510.26692, eq. 1) for
    one per key channel. Differentiable in q, k, v, g, beta, initial_state, written values and probes, through every
    result.

    Args:
        q, k: `[B, T, Hk, K]`; value head `h` uses head `h // (Hv // Hk)`.
        v: `[B, T, Hv, V]`, Hv a multiple of Hk.
        g: log decay, <= 0: `[B, T, Hv]`, or `[B, T, Hv, K]` per key channel; None for no decay.
        beta: write strength `[B, T, Hv]`; None for ones.
        scale: of the queries; default `1 / sqrt(K)`.
        initial_state: `[B, Hv, K, V]`, or `[N, Hv, K, V]` with `cu_seqlens`; default zero.
        use_qk_l2norm_in_kernel: divide q and k by `sqrt(sum x^2 + 1e-6)` first.
        cu_seqlens: `[N + 1]` int32 or int64: N sequences packed into one row (B = 1), `0 = c_0 <= ... <= c_N = T`.
        taps: side outputs; see `Taps`.
        state_writes: states to replace; see `StateWrite`.
        backend: "auto", or one by name.
        precision: "high", "exact" or "fast": how fp32 is fed to tensor cores; other backends are always exact.

    Returns:
        `RecurrenceOutput`; outputs in v's dtype, states in fp32 (fp64 if any input is).

    Raises:
        ArgumentError: an argument of the wrong shape, dtype or value.
        UnsupportedCall: a backend asked for by name cannot take the call.
    """
    checks.delta(q, k, v, g, beta, scale, initial_state, cu_seqlens)
    if precision not in ("high", "exact", "fast"):
        raise ArgumentError(f"precision: got {precision!r}, needs 'high', 'exact' or 'fast'")
    checks.kind("backend", backend, str, "'auto' or a backend's name")
    if backend != "auto":
        by_name(backend)
    taps = Taps() if taps is None else taps
    _kinds(taps, state_writes, use_qk_l2norm_in_kernel)
    states, tokens, mask, heads = _tapped(taps, q, v)
    cuts, write_heads, write_values = _writes(state_writes, k, v) if state_writes else ([], None, None)
    args = (
        q,
        k,
        v,
        g,
        beta,
        float(k.shape[3] ** -0.5 if scale is None else scale),
        initial_state,
        use_qk_l2norm_in_kernel,
        cu_seqlens,
        cuts,
        write_heads,
        write_values,
        taps.trajectory,
        states,
        tokens,
        mask,
        heads,
        taps.norms,
        taps.probes,
        taps.dtype,
        backend,
        precision,
    )
    results = dict(zip(FIELDS, _call_operator(args))) if taps.out is None else _filled(taps.out, args, taps)
    return _output(results, taps, cu_seqlens)


def _kinds(taps: Any, writes: Any, normalise: Any) -> None:
    checks.kind("taps", taps, Taps, "Taps")
    checks.kind("use_qk_l2norm_in_kernel", normalise, bool, "True or False")
    checks.kind("trajectory", taps.trajectory, bool, "True or False")
    checks.kind("norms", taps.norms, bool, "True or False")
    if writes is not None:
        checks.kind("state_writes", writes, Sequence, "a sequence of StateWrite")


def _call_operator(args: tuple) -> tuple[Tensor, ...]:
    return followable(*args) if followed(args) else torch.ops.statetap.gated_delta_rule(*args)


def _tapped(taps: Taps, q: Tensor, v: Tensor) -> tuple[str, list[int], Tensor | None, list[int] | None]:
    """`states` as (kind, tokens, mask), and the heads."""
    batch, length, count = v.shape[:3]
    checks.storage_dtype(taps.dtype)
    if taps.probes is not None:
        checks.probes(taps.probes, batch, length, count, q.shape[3], v.device)
    heads = None if taps.heads is None else checks.head_list(taps.heads, count)
    if taps.states is None:
        return "", [], None, heads
    wanted = checks.as_tokens(taps.states)
    mask = checks.token_mask(wanted, batch, length)
    if mask is not None:
        return "mask", [], mask, heads
    if isinstance(wanted, str) and wanted == "all":
        return "all", [], None, heads
    return "tokens", checks.token_positions(wanted, length), None, heads


def _writes(writes: Sequence[StateWrite], k: Tensor, v: Tensor) -> tuple[list[int], Tensor, Tensor]:
    """Writes as one value a (row, token): cuts (flattened pairs), heads `[n, Hv]`, values `[n, Hv, K, V]`."""
    batch, tokens, heads, value_dim = v.shape
    double = torch.float64 in (k.dtype, v.dtype)
    merged: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    for n, write in enumerate(writes):
        if not isinstance(write, StateWrite):
            raise ArgumentError(f"state_writes[{n}]: got {type(write).__name__}, needs a StateWrite")
        where = f"state_writes[{n}]"
        token = checks.position(f"{where}.token", write.token, tokens)
        rows = _indices(f"{where}.rows", write.rows, batch)
        chosen = _indices(f"{where}.heads", write.heads, heads)
        value = _value(where, write.value, (len(rows), len(chosen), k.shape[3], value_dim), v, double)
        if not chosen:
            continue
        mask = torch.zeros(heads, dtype=torch.bool, device=v.device)
        mask[chosen] = True
        for row, x in zip(rows, value):
            whole = x.new_zeros((heads, *x.shape[1:])).index_copy(0, torch.tensor(chosen, device=x.device), x)
            if (row, token) in merged:
                old_mask, old = merged[row, token]
                whole = torch.where(mask[:, None, None], whole, old.to(whole.dtype))
                merged[row, token] = mask | old_mask, whole
            else:
                merged[row, token] = mask, whole
    places = sorted(merged)
    if not places:
        return [], None, None  # type: ignore[return-value]
    flat = [n for place in places for n in place]
    return flat, torch.stack([merged[p][0] for p in places]), torch.stack([merged[p][1] for p in places])


def _indices(name: str, given: Any, count: int) -> list[int]:
    if given is None:
        return list(range(count))
    if isinstance(given, Tensor):
        given = given.tolist()
    if not isinstance(given, (list, tuple, range)):
        raise ArgumentError(f"{name}: got {type(given).__name__}, needs a sequence of ints")
    for n in given:
        if isinstance(n, bool) or not hasattr(n, "__index__") or not -count <= n < count:
            raise ArgumentError(f"{name}: got {n!r}, needs ints from {-count} to {count - 1}")
    return [int(n) % count for n in given]


def _value(where: str, value: Any, shape: tuple[int, ...], v: Tensor, double: bool) -> Tensor:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ArgumentError(f"{where}.value: got {got}, needs a floating-point tensor that broadcasts to {list(shape)}")
    if value.device != v.device:
        raise ArgumentError(f"{where}.value: got a tensor on {value.device}, needs one on {v.device}, where v is")
    tail = (1,) * (len(shape) - value.ndim) + tuple(value.shape)
    if value.ndim > len(shape) or any(a not in (1, b) for a, b in zip(tail, shape)):
        raise ArgumentError(f"{where}.value: got shape {list(value.shape)}, needs one that broadcasts to {list(shape)}")
    return value.to(torch.float64 if double else torch.promote_types(value.dtype, torch.float32)).expand(shape)


def _filled(out: Any, args: tuple, taps: Taps) -> dict[str, Tensor]:
    """Results written into the caller's tensors."""
    if not isinstance(out, Mapping):
        raise ArgumentError(f"out: got {type(out).__name__}, needs a dict of tensors by field name")
    wanted = {"outputs", "final_state"}
    wanted |= set(_TRAJECTORY) if taps.trajectory else set()
    wanted |= {
        n
        for n, on in (("states", taps.states is not None), ("norms", taps.norms), ("reads", taps.probes is not None))
        if on
    }
    for name in out:
        if name not in FIELDS:
            raise ArgumentError(f"out: {name!r} is not a field; fields: {', '.join(FIELDS)}")
        if name not in wanted:
            raise ArgumentError(f"out[{name!r}]: this call does not give it; ask for it in Taps")
    if tracked(args):
        raise ArgumentError("out: cannot be filled while gradients are recorded; use torch.no_grad()")
    checks.buffers(out)
    results = dict(zip(FIELDS, torch.ops.statetap.gated_delta_rule_out(*args, list(out), list(out.values()))))
    return {**results, **out}


def _output(results: dict[str, Tensor], taps: Taps, cu_seqlens: Tensor | None) -> RecurrenceOutput:
    trajectory = None
    if taps.trajectory:
        fields = {name: results[name] for name in _TRAJECTORY}
        packed = None if cu_seqlens is None else cu_seqlens.detach().to("cpu", torch.int64, copy=True)
        trajectory = Trajectory(**fields, final_state=results["final_state"].clone(), cu_seqlens=packed)
    return RecurrenceOutput(
        results["outputs"],
        results["final_state"],
        trajectory,
        results["states"] if taps.states is not None else None,
        results["norms"] if taps.norms else None,
        results["reads"] if taps.probes is not None else None,
    )
