"""Lara Mini: the mixer of Qwen3.5 with a mixture of experts; sliding and full attention between."""

from ..mixers import MixerSpec
from .spec import Family

FAMILY = Family(
    model_type="lara_mini",
    mixer=MixerSpec(
        modeling="transformers.models.lara_mini.modeling_lara_mini",
        mixer="LaraMiniGatedDeltaNet",
        kernels=("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
        rule="delta",
        attention="LaraMiniAttention",
        versions="5.24",
    ),
)
