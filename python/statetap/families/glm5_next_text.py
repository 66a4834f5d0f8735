"""GLM 5 Next: Kimi's rule beside indexed MLA blocks, on several residual streams; only ever inside its wrapper."""

from ..mixers import MixerSpec
from .spec import Family

FAMILY = Family(
    model_type="glm5_next_text",
    wrappers=("glm5_next",),
    final_norm=("hc_head", "norm"),
    handed_on=("prev_topk_indices",),
    mixer=MixerSpec(
        modeling="transformers.models.glm5_next.modeling_glm5_next",
        mixer="Glm5NextTextLinearAttention",
        kernels=("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
        rule="delta",
        attention="Glm5NextTextAttention",
    ),
)
