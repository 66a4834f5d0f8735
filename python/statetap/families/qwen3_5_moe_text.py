"""Qwen3.5 with a mixture of experts: the mixer of Qwen3.5."""

from ..mixers import MixerSpec
from .spec import Family

FAMILY = Family(
    model_type="qwen3_5_moe_text",
    wrappers=("qwen3_5_moe",),
    mixer=MixerSpec(
        modeling="transformers.models.qwen3_5_moe.modeling_qwen3_5_moe",
        mixer="Qwen3_5MoeGatedDeltaNet",
        kernels=("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
        rule="delta",
        attention="Qwen3_5MoeAttention",
    ),
)
