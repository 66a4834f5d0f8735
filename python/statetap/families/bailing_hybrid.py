"""Ling 3 (Bailing hybrid): Kimi's rule, its gate rounded to the model's dtype; MLA blocks under the same name."""

from ..mixers import MixerSpec
from .spec import Family

FAMILY = Family(
    model_type="bailing_hybrid",
    mixer=MixerSpec(
        modeling="transformers.models.bailing_hybrid.modeling_bailing_hybrid",
        mixer="BailingHybridDeltaAttention",
        kernels=("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
        rule="delta",
        attention="BailingHybridAttention",
        versions="5.24",
    ),
)
