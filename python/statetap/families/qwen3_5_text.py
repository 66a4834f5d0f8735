"""Qwen3.5: gated delta rule in three blocks of four, separate projections for gate and beta."""

from ..mixers import MixerSpec
from .spec import Family

FAMILY = Family(
    model_type="qwen3_5_text",
    wrappers=("qwen3_5",),
    mixer=MixerSpec(
        modeling="transformers.models.qwen3_5.modeling_qwen3_5",
        mixer="Qwen3_5GatedDeltaNet",
        kernels=("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
        rule="delta",
        attention="Qwen3_5Attention",
    ),
)
