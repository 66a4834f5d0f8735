"""`Family`: what statetap knows of a model family. Names only, no code."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..mixers import MixerSpec


@dataclass(frozen=True)
class Family:
    """A family of checkpoints, by the `model_type` of its text model.

    Attributes:
        model_type: `config.model_type` of the text model.
        mixer: the recurrent mixer and its kernels.
        mlp: what a block calls its MLP.
        final_norm: what the text model runs after its last block, in order: the final norm, and where the residual
            stream is several, what makes one of them.
        head: the language-model head.
        post_norms: part of a block -> the norm that its output goes through before it is added, on blocks that have it.
        handed_on: what a block returns beside its residual stream, by the name under which it comes in.
        wrappers: `model_type`s of multimodal configurations that hold this text model.
    """

    model_type: str
    mixer: MixerSpec
    mlp: str = "mlp"
    final_norm: tuple[str, ...] = ("norm",)
    head: str = "lm_head"
    post_norms: dict[str, str] = field(default_factory=dict)
    handed_on: tuple[str, ...] = ()
    wrappers: tuple[str, ...] = ()
