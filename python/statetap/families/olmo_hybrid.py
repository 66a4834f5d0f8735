"""OLMo-Hybrid: gated delta rule whose betas go up to 2 with `linear_allow_neg_eigval`."""

from ..mixers import MixerSpec
from .spec import Family

FAMILY = Family(
    model_type="olmo_hybrid",
    post_norms={"self_attn": "post_attention_layernorm", "mlp": "post_feedforward_layernorm"},
    mixer=MixerSpec(
        modeling="transformers.models.olmo_hybrid.modeling_olmo_hybrid",
        mixer="OlmoHybridGatedDeltaNet",
        kernels=("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
        rule="delta",
        attention="OlmoHybridAttention",
    ),
)
