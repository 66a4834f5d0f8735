"""Qwen3-Next: gated delta rule in three blocks of four, fused projections, mixture of experts."""

from ..mixers import MixerSpec
from .spec import Family

FAMILY = Family(
    model_type="qwen3_next",
    mixer=MixerSpec(
        modeling="transformers.models.qwen3_next.modeling_qwen3_next",
        mixer="Qwen3NextGatedDeltaNet",
        kernels=("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
        rule="delta",
        attention="Qwen3NextAttention",
    ),
)
