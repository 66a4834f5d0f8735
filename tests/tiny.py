"""Tiny random checkpoints, written to disk and loaded as a user would load a released one.

path = checkpoint(folder, "qwen3_5_text", num_hidden_layers=2)
model = transformers.AutoModelForCausalLM.from_pretrained(path)
"""

from __future__ import annotations

from pathlib import Path

import torch

END, PAD = 256, 257
VOCABULARY = 258

_DELTA_HEADS = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=24,
    linear_conv_kernel_dim=4,
)
_BODY = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=2048,
    eos_token_id=END,
    pad_token_id=PAD,
)
_EXPERTS = dict(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
)
_ROPE = dict(
    rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True
)
_LATENT = dict(  # multi-head latent attention
    **{k: v for k, v in _BODY.items() if k not in ("head_dim", "num_key_value_heads")},
    num_key_value_heads=4,
    moe_intermediate_size=32,
    num_experts_per_tok=2,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=16,
    bos_token_id=None,
)
_KIMI_HEADS = dict(linear_head_dim=16, linear_num_heads=4)
_INDEXER = dict(indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=64, indexer_compress_ratio=4)
_THREE_TO_ONE = ["linear_attention"] * 3
_VISION = dict(depth=1, hidden_size=32, intermediate_size=48, num_heads=2, patch_size=4, out_hidden_size=64)
_QWEN_VISION = {**_VISION, "num_position_embeddings": 16}

# model_type -> (configuration class, model class, fields)
CONFIGS = {
    "qwen3_5_text": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {**_BODY, **_DELTA_HEADS, "rope_parameters": _ROPE}),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        {**_BODY, **_DELTA_HEADS, **_EXPERTS, "rope_parameters": _ROPE},
    ),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", {**_BODY, **_DELTA_HEADS}),
    "kimi_linear": (
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {**_LATENT, **_KIMI_HEADS, "num_local_experts": 4, "layer_types": [*_THREE_TO_ONE, "full_attention"]},
    ),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**_BODY, **_DELTA_HEADS, **_EXPERTS}),
    "lara_mini": (
        "LaraMiniConfig",
        "LaraMiniForCausalLM",
        {
            **_BODY,
            **_DELTA_HEADS,
            **_EXPERTS,
            "sliding_window": 8,
            "layer_types": ["linear_attention", "sliding_attention", "linear_attention", "full_attention"],
        },
    ),
    "bailing_hybrid": (
        "BailingHybridConfig",
        "BailingHybridForCausalLM",
        {
            **_LATENT,
            "head_dim": 16,  # of the recurrent heads
            "num_local_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_mtp_layers": 0,
            "layer_types": [*_THREE_TO_ONE, "full_attention"],
        },
    ),
    "glm5_next_text": (
        "Glm5NextTextConfig",
        None,  # only ever inside its wrapper
        {
            **_LATENT,
            **_KIMI_HEADS,
            "qk_rope_head_dim": 0,
            "q_lora_rank": 16,
            "n_routed_experts": 4,
            "index_topk": 64,
            "index_kpool": 4,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "hc_mult": 2,
            "mlp_layer_types": ["dense"] + ["sparse"] * 3,
        },
    ),
    "qwen4_exp_text": (
        "Qwen4ExpTextConfig",
        "Qwen4ExpForCausalLM",
        {
            **{k: v for k, v in _BODY.items() if k != "intermediate_size"},
            **_DELTA_HEADS,
            **_EXPERTS,
            **_INDEXER,
            "hc_count": 2,
            "hc_lowrank": 8,
            "rope_parameters": _ROPE,
        },
    ),
}
# model_type of a multimodal wrapper -> (configuration class, model class, text model, fields of its vision tower)
WRAPPERS = {
    "qwen3_5": ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration", "qwen3_5_text", _QWEN_VISION),
    "qwen3_5_moe": ("Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text", _QWEN_VISION),
    "qwen4_exp": ("Qwen4ExpConfig", "Qwen4ExpForConditionalGeneration", "qwen4_exp_text", _QWEN_VISION),
    "glm5_next": (
        "Glm5NextConfig",
        "Glm5NextForConditionalGeneration",
        "glm5_next_text",
        {**_VISION, "projection_intermediate_size": 48, "image_size": 16},
    ),
}
_IMAGE_TOKENS = dict(image_token_id=250, video_token_id=251)


def has(model_type: str) -> bool:
    """Whether the installed transformers has this model."""
    import transformers

    return hasattr(transformers, (CONFIGS.get(model_type) or WRAPPERS[model_type])[0])


def config(model_type: str, **overrides):
    """A configuration of `model_type` at toy sizes; overrides go to the text model's fields."""
    import transformers

    if model_type in WRAPPERS:
        name, _, text, vision = WRAPPERS[model_type]
        fields = dict(text_config={**CONFIGS[text][2], **overrides}, vision_config=vision, **_IMAGE_TOKENS)
    else:
        name, _, fields = CONFIGS[model_type]
        fields = {**fields, **overrides}
    return getattr(transformers, name)(**fields)


def model(model_type: str, seed: int = 0, **overrides) -> torch.nn.Module:
    """A random model whose gates, states and logits have the spread of a trained one."""
    import transformers

    torch.manual_seed(seed)
    name = (CONFIGS.get(model_type) or WRAPPERS[model_type])[1]
    built = getattr(transformers, name)(config(model_type, **overrides))
    with torch.no_grad():
        for name, weight in built.named_parameters():
            if weight.ndim >= 2 and "conv1d" not in name:
                weight.normal_(0, 1.5 * weight.shape[-1] ** -0.5)
            elif name.endswith(("A_log", "dt_bias")):
                weight.uniform_(-3, 1)
    return built.eval()


def tokenizer(pad: bool = True):
    """One token a byte, id = the byte's rank in GPT-2's byte alphabet; no BOS; pads on the left."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|end|>", "<|pad|>"])
    special = dict(eos_token="<|end|>", pad_token="<|pad|>") if pad else {}
    return PreTrainedTokenizerFast(tokenizer_object=core, padding_side="left", model_max_length=2048, **special)


def checkpoint(
    folder: str | Path,
    model_type: str = "qwen3_5_text",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    pad: bool = True,
    **overrides,
) -> Path:
    """Write a tiny random checkpoint with its tokenizer; returns the folder."""
    folder = Path(folder)
    model(model_type, seed, **overrides).to(dtype).save_pretrained(folder)
    tokenizer(pad).save_pretrained(folder)
    return folder
