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
_VISION = dict(
    depth=1,
    hidden_size=32,
    intermediate_size=48,
    num_heads=2,
    patch_size=4,
    out_hidden_size=64,
    num_position_embeddings=16,
)

# model_type -> (configuration class, model class, fields)
CONFIGS = {
    "qwen3_5_text": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {**_BODY, **_DELTA_HEADS, "rope_parameters": _ROPE}),
    "qwen3_5": ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration", {}),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        {**_BODY, **_DELTA_HEADS, **_EXPERTS, "rope_parameters": _ROPE},
    ),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", {**_BODY, **_DELTA_HEADS}),
    "kimi_linear": (
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        dict(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            moe_intermediate_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=16,
            num_experts_per_tok=2,
            num_local_experts=4,
            linear_head_dim=16,
            linear_num_heads=4,
            max_position_embeddings=2048,
            eos_token_id=END,
            pad_token_id=PAD,
            bos_token_id=None,
            layer_types=["linear_attention"] * 3 + ["full_attention"],
        ),
    ),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**_BODY, **_DELTA_HEADS, **_EXPERTS}),
}


def config(model_type: str, **overrides):
    """A configuration of `model_type` at toy sizes; overrides go to the text model's fields."""
    import transformers

    name, _, fields = CONFIGS[model_type]
    if model_type == "qwen3_5":
        text = dict(CONFIGS["qwen3_5_text"][2], **overrides)
        return transformers.Qwen3_5Config(
            text_config=text,
            vision_config=_VISION,
            image_token_id=250,
            video_token_id=251,
            vision_start_token_id=252,
            vision_end_token_id=253,
        )
    return getattr(transformers, name)(**dict(fields, **overrides))


def model(model_type: str, seed: int = 0, **overrides) -> torch.nn.Module:
    """A random model whose gates, states and logits have the spread of a trained one."""
    import transformers

    torch.manual_seed(seed)
    built = getattr(transformers, CONFIGS[model_type][1])(config(model_type, **overrides))
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
