"""Qwen4-Exp: gated delta rule beside indexed attention, on several residual streams; and its wrapper."""

from ..mixers import MixerSpec
from .spec import Family

FAMILY = Family(
    model_type="qwen4_exp_text",
    wrappers=("qwen4_exp",),
    final_norm=("hyper_connection_mixer",),
    mixer=MixerSpec(
        modeling="transformers.models.qwen4_exp.modeling_qwen4_exp",
        mixer="Qwen4ExpTextGatedDeltaNet",
        kernels=("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
        rule="delta",
        attention="Qwen4ExpTextAttention",
    ),
)
