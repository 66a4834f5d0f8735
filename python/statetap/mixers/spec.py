"""What a family says about its mixer: names only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MixerSpec:
    """Where a mixer is and which kernels its forward calls.

    Attributes:
        modeling: the modeling module, e.g. "transformers.models.qwen3_5.modeling_qwen3_5".
        mixer: the mixer's class in that module.
        kernels: every kernel name that the mixer's forward can call.
        convolutions: the short convolutions that it calls in front of them.
        rule: how these kernels' arguments are read: a key of `rules.RULES`.
        attention: the softmax attention's class in that module, or None.
        attention_kernel: the name of its eager kernel there.
        versions: the transformers versions this was tried with, for messages.
    """

    modeling: str
    mixer: str
    kernels: tuple[str, ...]
    rule: str
    convolutions: tuple[str, ...] = ("causal_conv1d_fn", "causal_conv1d_update")
    attention: str | None = None
    attention_kernel: str = "eager_attention_forward"
    versions: str = "5.17 to 5.24"
