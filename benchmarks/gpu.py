"""The Triton kernels on the GPU that is here, beside flash-linear-attention in the same process if it is installed.

    make bench-gpu

Interleaved, median of many, in milliseconds, with errors against fp64 (of one head, on the CPU) and the bytes that the
launches move over the time. A case whose outputs are wrong prints no time. Says "no GPU here" and ends well only if
there is none.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any, Callable

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests")]  # from a checkout that is not installed

import torch  # noqa: E402

from numerics import error  # noqa: E402

ROUNDS = 20
CASES = [(1, 8192, 16, 64), (8, 2048, 16, 64), (16, 1024, 16, 16)]  # rows, tokens, key heads, value heads
DIM = 128


def inputs(rows: int, tokens: int, key_heads: int, heads: int, channels: bool) -> dict[str, Any]:
    r = torch.Generator("cuda").manual_seed(0)
    n = lambda *s: torch.randn(*s, generator=r, device="cuda").bfloat16()
    p = lambda *s: torch.rand(*s, generator=r, device="cuda")
    gate = (rows, tokens, heads, *([DIM] if channels else []))
    return dict(
        q=n(rows, tokens, key_heads, DIM), k=n(rows, tokens, key_heads, DIM), v=n(rows, tokens, heads, DIM),
        g=-0.1 * p(*gate), beta=p(rows, tokens, heads).bfloat16(), use_qk_l2norm_in_kernel=True,
    )  # fmt: skip


def peer(channels: bool) -> Callable[..., Any] | None:
    """flash-linear-attention's function for this rule, or None with a line that says why."""
    try:
        if channels:
            from fla.ops.kda import chunk_kda as function
        else:
            from fla.ops.gated_delta_rule import chunk_gated_delta_rule as function
        return function
    except Exception as error:
        print(f"flash-linear-attention: {type(error).__name__}: {error}; no peer")
        return None


def exact(a: dict[str, Any]) -> tuple[Any, Any]:
    """Outputs and final state of the first row and head in fp64."""
    from statetap.ops import gated_delta_rule

    one = {k: x[:1, :, :1].double().cpu() if torch.is_tensor(x) else x for k, x in a.items()}
    out = gated_delta_rule(**one, backend="torch")
    return out.outputs, out.final_state


def timed(functions: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median milliseconds of each, interleaved, with the L2 cache overwritten before every run."""
    flush = torch.empty(2**26, dtype=torch.int32, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in functions}
    for round_ in range(ROUNDS + 3):
        for name, run in functions.items():
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            if round_ >= 3:
                times[name].append(start.elapsed_time(end))
    return {name: statistics.median(x) for name, x in times.items()}


def bench(rows: int, tokens: int, key_heads: int, heads: int, channels: bool) -> None:
    from statetap.ops import Taps, gated_delta_rule
    from statetap.triton_kernels import traffic

    a = inputs(rows, tokens, key_heads, heads, channels)
    want, final = exact(a)
    ours = lambda precision="high", **taps: gated_delta_rule(
        **a, taps=Taps(**taps), backend="triton", precision=precision
    )
    probes = torch.randn(8, DIM, device="cuda")
    functions: dict[str, Callable[[], Any]] = {
        "fast": lambda: ours("fast"),
        "high": lambda: ours(),
        "exact": lambda: ours("exact"),
        "high, trajectory": lambda: ours(trajectory=True),
        "high, norms": lambda: ours(norms=True),
        "high, 8 probes": lambda: ours(probes=probes),
        "high, state every 64": lambda: ours(states=slice(63, None, 64)),
    }
    other = peer(channels)
    if other is not None:
        repeated = {
            k: x.repeat_interleave(heads // key_heads, 2) if k in "qk" and channels else x for k, x in a.items()
        }
        functions["flash-linear-attention"] = lambda: other(**repeated, output_final_state=True)
    errors = {}
    for name, run in list(functions.items()):
        out = run()
        o, s = (out[0], out[1]) if isinstance(out, tuple) else (out.outputs, out.final_state)
        errors[name] = error(o[:1, :, :1].cpu(), want), error(s[:1, :1].cpu(), final)
        if errors[name][0] > 3e-2:
            print(f"  {name}: outputs off by {errors[name][0]:.1e}: not timed")
            del functions[name]
    times = timed(functions)
    shape = traffic.Shape(rows * tokens, rows, key_heads, heads, DIM, DIM)
    bytes_ = {} if channels else {"high": sum(traffic.plain(shape).values())}
    print(
        f"\n{'Kimi' if channels else 'gated delta rule'}: {rows} x {tokens} tokens, heads {key_heads}/{heads}, dims {DIM}"
    )
    if bytes_:
        print(
            f"  floor by bytes {traffic.seconds(traffic.floor(shape)) * 1e3:.3f} ms, of these kernels {traffic.seconds(bytes_['high']) * 1e3:.3f} ms (estimates)"
        )
    for name, ms in times.items():
        ratio = f"{ms / times['flash-linear-attention']:5.2f}x its time" if "flash-linear-attention" in times else ""
        rate = f"{bytes_[name] / ms / 1e6:6.0f} GB/s" if name in bytes_ else ""
        print(
            f"  {name:24s}{ms:9.3f} ms  outputs {errors[name][0]:.1e}  final state {errors[name][1]:.1e}  {ratio} {rate}"
        )


def decode() -> None:
    from statetap.ops import gated_delta_rule

    a = inputs(32, 1, 16, 64, False)
    state = torch.randn(32, 64, DIM, DIM, device="cuda")
    times = timed(
        {
            "triton": lambda: gated_delta_rule(**a, initial_state=state, backend="triton"),
            "torch": lambda: gated_delta_rule(**a, initial_state=state, backend="torch"),
        }
    )
    print("\none token of 32 rows, 64 heads: " + ", ".join(f"{name} {ms:.3f} ms" for name, ms in times.items()))


def main() -> int:
    if not torch.cuda.is_available():
        print("no GPU here")
        return 0
    import triton

    print(torch.cuda.get_device_name(0), "torch", torch.__version__, "triton", triton.__version__)
    for channels in (False, True):
        for case in CASES:
            bench(*case[:2], case[2], case[3] if not channels else 32, channels)
    decode()
    return 0


if __name__ == "__main__":
    sys.exit(main())
