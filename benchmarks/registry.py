"""The cases: two functions that are timed against each other, a check that they agree, and the target."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Callable

import torch

sys.path[:0] = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1] / "tests/ops")]

from numerics import error  # noqa: E402
from statetap.ops import Taps, gated_delta_rule  # noqa: E402

BATCH, TOKENS, HEADS, KEY_DIM, VALUE_DIM = 1, 1024, 16, 128, 128


@dataclass(frozen=True)
class Case:
    """`prepare()` gives (ours, other, agree): two calls without arguments, and the largest relative error between them.

    kind "speed": other's time over ours, at least `target`. "cost": ours over other's, at most `target`. "memory":
    other's peak memory over ours, at least `target`.
    """

    name: str
    what: str
    prepare: Callable[[], tuple[Callable, Callable, Callable[[], float]]]
    target: float
    kind: str = "speed"
    rounds: int = 15


@lru_cache(maxsize=1)
def inputs() -> dict[str, torch.Tensor]:
    r = torch.Generator().manual_seed(0)
    n = lambda *s: torch.randn(*s, generator=r)
    p = lambda *s: torch.rand(*s, generator=r)
    shape = BATCH, TOKENS, HEADS
    return dict(
        q=n(*shape, KEY_DIM),
        k=n(*shape, KEY_DIM),
        v=n(*shape, VALUE_DIM),
        g=-0.1 * p(*shape),
        gk=-0.1 * p(*shape, KEY_DIM),
        beta=p(*shape),
        state=n(BATCH, HEADS, KEY_DIM, VALUE_DIM),
    )


def ours(gate: str = "g", tokens: int = TOKENS, backend: str = "cpp", **kw) -> Callable:
    """Our op on the first `tokens` of the inputs."""
    a = inputs()
    args = [a[x][:, :tokens] for x in ("q", "k", "v", gate, "beta")]
    return lambda: gated_delta_rule(*args, use_qk_l2norm_in_kernel=True, backend=backend, **kw)


def transformers_kernel(module: str, name: str, gate: str = "g", tokens: int = TOKENS, **kw) -> Callable:
    """transformers' own kernel on the same."""
    import importlib

    kernel, a = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name), inputs()
    q, k, v, g, beta = (a[x][:, :tokens] for x in ("q", "k", "v", gate, "beta"))
    return lambda: kernel(q, k, v, g=g, beta=beta, output_final_state=True, use_qk_l2norm_in_kernel=True, **kw)


def outputs_agree(left: Callable, right: Callable) -> Callable[[], float]:
    def agree() -> float:
        (a, s), (b, t) = left(), right()
        return max(error(a, b, 2), error(s, t, 1))

    return agree


def against(
    module: str, name: str, gate: str = "g", tokens: int = TOKENS, state: bool = False, backend: str = "cpp"
) -> Callable:
    def prepare():
        extra = dict(initial_state=inputs()["state"]) if state else {}
        left = ours(gate, tokens, backend, **extra)
        right = transformers_kernel(module, name, gate, tokens, **extra)
        return left, right, outputs_agree(left, right)

    return prepare


def tapped(taps: Taps, gate: str = "g", backend: str = "cpp") -> Callable:
    def prepare():
        left, right = ours(gate, backend=backend, taps=taps), ours(gate, backend=backend)
        return left, right, outputs_agree(left, right)

    return prepare


def probes(count: int = 8) -> torch.Tensor:
    return torch.randn(count, KEY_DIM, generator=torch.Generator().manual_seed(1))


def over_the_floor():
    """Ours, over a matrix product of as many multiply-adds as the loop over tokens has: three a state element and token."""
    size = 1024
    count = 3 * BATCH * TOKENS * HEADS * KEY_DIM * VALUE_DIM
    left, right = torch.randn(count // size**2, size), torch.randn(size, size)
    run = ours()
    return run, lambda: left @ right, outputs_agree(run, ours(backend="torch"))


def states_over_filling():
    """Every state into a buffer that is used again, over the plain call and 1.3 times filling that buffer."""
    buffer = torch.empty(BATCH, TOKENS, HEADS, KEY_DIM, VALUE_DIM)
    left, plain = ours(taps=Taps(states="all", out={"states": buffer})), ours()

    def right():
        result = plain()
        buffer.fill_(1.0)
        buffer[:, : TOKENS * 3 // 10].fill_(1.0)
        return result

    return left, right, outputs_agree(left, right)


def all_states_against_the_token_loop():
    """Every state: ours into fresh memory, against a loop over transformers' decode kernel that keeps each state."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule as kernel

    a = inputs()

    def loop():
        state, states, out = torch.zeros(BATCH, HEADS, KEY_DIM, VALUE_DIM), [], []
        for t in range(TOKENS):
            now = {x: a[x][:, t : t + 1] for x in ("q", "k", "v", "g", "beta")}
            o, state = kernel(
                now["q"],
                now["k"],
                now["v"],
                g=now["g"],
                beta=now["beta"],
                initial_state=state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            out.append(o)
            states.append(state)
        return torch.cat(out, 1), torch.stack(states, 1)

    left = ours(taps=Taps(states="all"))

    def agree():
        result, (out, states) = left(), loop()
        return max(error(result.outputs, out, 2), error(result.states, states, 2))

    return left, loop, agree


@lru_cache(maxsize=1)
def wide_checkpoint() -> str:
    """Four layers at the widths of Qwen3.5-0.8B."""
    import tiny

    folder = tempfile.mkdtemp(prefix="statetap-bench-")
    return str(
        tiny.checkpoint(
            folder,
            "qwen3_5_text",
            hidden_size=1024,
            intermediate_size=3584,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=256,
            linear_num_key_heads=16,
            linear_num_value_heads=16,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            rope_parameters=dict(
                rope_type="default",
                rope_theta=1e7,
                partial_rotary_factor=0.25,
                mrope_section=[11, 11, 10],
                mrope_interleaved=True,
            ),
        )
    )


def traced_model(untraced: str):
    """A traced forward that reads every layer's trajectory, against an untraced one with `untraced` kernels."""

    def prepare():
        from statetap import StandardizedTransformer

        models = [StandardizedTransformer(wide_checkpoint(), device="cpu", backend=b) for b in ("auto", untraced)]
        ids = torch.randint(0, 250, (1, TOKENS), generator=torch.Generator().manual_seed(0))
        recurrent = [layer.linear_attn for layer in models[0].layers if layer.linear_attn is not None]
        kept: list = []

        def traced():
            kept.clear()
            with torch.no_grad(), models[0].trace(ids):
                for mix in recurrent:
                    kept.append(mix.trajectory)
                logits = models[0].logits.save()
            return logits

        def plain():
            with torch.no_grad():
                return models[1]._module(ids).logits

        return traced, plain, lambda: error(traced(), plain())

    return prepare


CHUNK = ("qwen3_5", "torch_chunk_gated_delta_rule")
STEP = ("qwen3_5", "torch_recurrent_gated_delta_rule")
KIMI = ("kimi_linear", "chunk_kimi_delta_attention")

TRAJECTORY = Taps(trajectory=True)

CASES = [
    Case("forward", "C++ against transformers' chunk kernel", against(*CHUNK), 6.0),
    Case("floor", "C++ over a matrix product of as many multiply-adds", over_the_floor, 1.3, "cost"),
    Case("kimi", "C++ against transformers' Kimi chunk kernel", against(*KIMI, gate="gk"), 60.0, rounds=3),
    Case("trajectory", "C++ with trajectory over plain", tapped(TRAJECTORY), 1.15, "cost"),
    Case("norms", "C++ with norms over plain", tapped(Taps(norms=True)), 1.5, "cost"),
    Case("probes", "C++ with 8 probes over plain", tapped(Taps(probes=probes())), 1.5, "cost"),
    Case(
        "states-buffer", "every state into a buffer, over plain and 1.3 fillings", states_over_filling, 1.0, "cost", 7
    ),
    Case(
        "states",
        "every state, fresh memory, against a loop that keeps every state",
        all_states_against_the_token_loop,
        8.0,
        rounds=3,
    ),
    Case(
        "decode", "one token against transformers' decode kernel", against(*STEP, tokens=1, state=True), 5.0, rounds=300
    ),
    Case("torch-forward", "torch backend against the chunk kernel", against(*CHUNK, backend="torch"), 1.0),
    Case("torch-kimi", "the same, Kimi", against(*KIMI, gate="gk", backend="torch"), 8.0, rounds=3),
    Case("torch-kimi-memory", "peak memory of the same", against(*KIMI, gate="gk", backend="torch"), 10.0, "memory"),
    Case("torch-trajectory", "with trajectory over plain", tapped(TRAJECTORY, backend="torch"), 1.1, "cost"),
    Case("torch-kimi-trajectory", "the same, Kimi", tapped(TRAJECTORY, "gk", "torch"), 1.1, "cost", 9),
    Case(
        "torch-decode",
        "one token against transformers' decode kernel",
        against(*STEP, tokens=1, state=True, backend="torch"),
        0.7,
        rounds=300,
    ),
    Case(
        "traced", "every layer's trajectory traced, over the same model untraced", traced_model("auto"), 1.1, "cost", 7
    ),
    Case(
        "traced-default",
        "the same over the model untraced with transformers' kernels",
        traced_model("default"),
        1.0,
        "cost",
        7,
    ),
]
