"""Kimi-Linear: Kimi delta attention, a decay per key channel; MLA blocks keep their attention under the same name."""

from ..mixers import MixerSpec
from .spec import Family

FAMILY = Family(
    model_type="kimi_linear",
    mixer=MixerSpec(
        modeling="transformers.models.kimi_linear.modeling_kimi_linear",
        mixer="KimiLinearDeltaAttention",
        kernels=("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
        rule="delta",
        attention="KimiLinearAttention",
    ),
)
