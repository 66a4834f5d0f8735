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
        final_norm, head: names of the last norm (in the text model) and of the language-model head.
        wrappers: `model_type`s of multimodal configurations that hold this text model.
    """

    model_type: str
    mixer: MixerSpec
    mlp: str = "mlp"
    final_norm: str = "norm"
    head: str = "lm_head"
    wrappers: tuple[str, ...] = field(default=())
