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


def ours(gate: str = "g", tokens: int = TOKENS, backend: str = "torch", **kw) -> Callable:
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
    module: str, name: str, gate: str = "g", tokens: int = TOKENS, state: bool = False, backend: str = "torch"
) -> Callable:
    def prepare():
        extra = dict(initial_state=inputs()["state"]) if state else {}
        left, right = ours(gate, tokens, backend, **extra), transformers_kernel(module, name, gate, tokens, **extra)
        return left, right, outputs_agree(left, right)

    return prepare


def tapped(taps: Taps, gate: str = "g", backend: str = "torch") -> Callable:
    def prepare():
        left, right = ours(gate, backend=backend, taps=taps), ours(gate, backend=backend)
        same, judge = outputs_agree(left, right), ours(gate, backend="torch", taps=taps)

        def agree() -> float:
            found, want = left(), judge()
            parts = [(found.norms, want.norms, 2), (found.reads, want.reads, 2)]
            if taps.trajectory:
                parts.append((found.trajectory.chunk_states, want.trajectory.chunk_states, 2))
            return max(same(), *(error(a, b, head) for a, b, head in parts if a is not None))

        return left, right, agree

    return prepare


def probes() -> torch.Tensor:
    return torch.randn(8, KEY_DIM, generator=torch.Generator().manual_seed(1))


def states_into_a_buffer():
    """Every state into a buffer that is used again, over the plain call and 1.3 times the fill of as many bytes."""
    buffer = torch.zeros(BATCH, TOKENS, HEADS, KEY_DIM, VALUE_DIM)
    left = ours(backend="cpp", taps=Taps(states="all", out={"states": buffer}))
    plain = ours(backend="cpp")

    def right():
        result = plain()
        buffer.fill_(1.0)
        buffer[:, : 3 * TOKENS // 10].fill_(1.0)
        return result

    def agree() -> float:
        want, found = right(), left()
        state = error(found.states[:, -1], want.final_state, 1)
        return max(error(found.outputs, want.outputs, 2), state)

    return left, right, agree


def the_product():
    """The forward, over a matrix product of as many multiply-adds: 3 an element of the state and token."""
    left = ours(backend="cpp")
    a, b = torch.randn(1024, 1024), torch.randn(1024, 3 * BATCH * TOKENS * HEADS * KEY_DIM * VALUE_DIM // 1024**2)
    return left, lambda: a @ b, outputs_agree(left, ours(backend="torch"))


def all_states_against_the_token_loop(backend: str = "torch"):
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

    left = ours(backend=backend, taps=Taps(states="all"))

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

CPP = [
    Case("cpp", "cpp against transformers' chunk kernel", against(*CHUNK, backend="cpp"), 6.0, rounds=30),
    Case("cpp-floor", "cpp over a matrix product of as many multiply-adds", the_product, 1.3, "cost", 60),
    Case(
        "cpp-kimi",
        "cpp against transformers' Kimi chunk kernel",
        against(*KIMI, gate="gk", backend="cpp"),
        60.0,
        rounds=4,
    ),
    Case(
        "cpp-decode",
        "one token, cpp against transformers' decode kernel",
        against(*STEP, tokens=1, state=True, backend="cpp"),
        5.0,
        rounds=1000,
    ),
    Case(
        "cpp-trajectory",
        "cpp with trajectory over plain",
        tapped(Taps(trajectory=True), backend="cpp"),
        1.15,
        "cost",
        60,
    ),
    Case("cpp-norms", "cpp with norms over plain", tapped(Taps(norms=True), backend="cpp"), 1.5, "cost", 60),
    Case("cpp-probes", "cpp with 8 probes over plain", tapped(Taps(probes=probes()), backend="cpp"), 1.5, "cost", 60),
    Case(
        "cpp-buffer",
        "cpp, every state into a buffer, over plain and 1.3 fills of it",
        states_into_a_buffer,
        1.0,
        "cost",
    ),
    Case(
        "cpp-states",
        "cpp, every state, fresh memory, against a loop that keeps every state",
        lambda: all_states_against_the_token_loop("cpp"),
        8.0,
        rounds=3,
    ),
]

CASES = [
    *CPP,
    Case("forward", "torch backend against transformers' chunk kernel", against(*CHUNK), 1.0),
    Case("kimi", "torch backend against transformers' Kimi chunk kernel", against(*KIMI, gate="gk"), 8.0, rounds=4),
    Case("kimi-memory", "peak memory of the same", against(*KIMI, gate="gk"), 10.0, "memory"),
    Case("trajectory", "with trajectory over plain", tapped(Taps(trajectory=True)), 1.1, "cost"),
    Case("kimi-trajectory", "Kimi with trajectory over plain", tapped(Taps(trajectory=True), "gk"), 1.1, "cost", 9),
    Case(
        "decode", "one token against transformers' decode kernel", against(*STEP, tokens=1, state=True), 0.7, rounds=300
    ),
    Case(
        "states",
        "every state, fresh memory, against a loop that keeps every state",
        all_states_against_the_token_loop,
        1.0,
        rounds=3,
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
