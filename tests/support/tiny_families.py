"""Tiny random checkpoints of every family, made by transformers: config.json, safetensors and a byte tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.tiny_models import write_byte_tokenizer

_COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "pad_token_id": 257,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "tie_word_embeddings": False,
}
_WINDOWS = {"sliding_window": 24}
_GPT = {"vocab_size": 320, "n_positions": 2048, "n_embd": 64, "n_layer": 3, "n_head": 4, "initializer_range": 0.2}
_GPT |= {"bos_token_id": 256, "eos_token_id": 258}
_DEEPSEEK: dict[str, Any] = {
    "moe_intermediate_size": 48, "n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    "n_shared_experts": 2, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 24, "num_key_value_heads": 4,
}  # fmt: skip
_ROUTED = {key: value for key, value in _DEEPSEEK.items() if "lora" not in key and "head_dim" not in key}
_LATENT = {key: value for key, value in _DEEPSEEK.items() if "lora" in key or "head_dim" in key}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}
_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 10000.0, "long_factor": [1.0 + i for i in range(8)],
    "short_factor": [1.0 + 0.1 * i for i in range(8)], "original_max_position_embeddings": 48,
}  # fmt: skip
_FEW_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2}
_KINDS = ["sliding_attention", "full_attention"] * 2
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24}

_LLAMA4 = {
    "head_dim": 16, "intermediate_size_mlp": 128, "num_local_experts": 6, "interleave_moe_layer_step": 2,
    "attention_chunk_size": 24, "floor_scale": 10, "attn_scale": 0.4,
}  # fmt: skip
_MINISTRAL3 = {
    "head_dim": 16, "rope_parameters": {**_YARN, "original_max_position_embeddings": 20, "llama_4_scaling_beta": 0.4},
}  # fmt: skip
_VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
_IMAGES: dict[str, Any] = {
    "vision_config": {**_VISION, **dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 16)}
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "arcee": ("arcee", {"head_dim": 16}),
    "cohere": ("cohere", {"logit_scale": 0.3}),
    "cohere, qk norm": ("cohere", {"logit_scale": 0.3, "use_qk_norm": True}),
    "cohere2": ("cohere2", {**_WINDOWS, "head_dim": 16, "logit_scale": 0.3}),
    "deepseek_v2": ("deepseek_v2", {**_DEEPSEEK, "head_dim": 16}),
    "deepseek_v2, groups": (
        "deepseek_v2",
        {**_DEEPSEEK, "head_dim": 16, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "q_lora_rank": None},
    ),
    "deepseek_v3": ("deepseek_v3", {**_DEEPSEEK, "n_group": 4, "topk_group": 2}),
    "deepseek_v3, yarn": (
        "deepseek_v3",
        {**_DEEPSEEK, "n_group": 2, "topk_group": 1, "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
    "dots1": ("dots1", {**_ROUTED, "head_dim": 16, "num_key_value_heads": 2}),
    "ernie4_5": ("ernie4_5", {"head_dim": 16, "use_bias": True}),
    "ernie4_5_moe": (
        "ernie4_5_moe", {"moe_intermediate_size": 48, "moe_num_experts": 8, "moe_k": 2, "moe_layer_end_index": 3, "head_dim": 16},
    ),
    "exaone4": ("exaone4", {**_WINDOWS, "head_dim": 16}),
    "exaone4, no windows": ("exaone4", {"sliding_window": None, "head_dim": 16, "layer_types": ["full_attention"] * 4}),
    "falcon": ("falcon", {"ffn_hidden_size": 96, "bias": False}),
    "falcon, new": ("falcon", {"ffn_hidden_size": 96, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon, sequential": ("falcon", {"ffn_hidden_size": 96, "multi_query": False, "parallel_attn": False, "bias": True}),
    "gemma": ("gemma", {"head_dim": 24, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", {**_GEMMA, **_WINDOWS}),
    "gemma3": ("gemma3", {**_IMAGES, "text_config": {**_COMMON, **_GEMMA, **_WINDOWS}}),
    "gemma3_text": ("gemma3_text", {**_GEMMA, **_WINDOWS, "num_hidden_layers": 7}),
    "glm": ("glm", {"head_dim": 16}),
    "glm4": ("glm4", {"head_dim": 16}),
    "glm4_moe": ("glm4_moe", {**_ROUTED, "num_key_value_heads": 2, "head_dim": 16, "use_qk_norm": True, "attention_bias": True}),
    "gpt2": ("gpt2", _GPT),
    "gpt_bigcode": ("gpt_bigcode", _GPT),
    "gpt_bigcode, own heads": ("gpt_bigcode", {**_GPT, "multi_query": False}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox, sequential": (
        "gpt_neox",
        {"use_parallel_residual": False, "rope_parameters": {**_PLAIN_ROPE, "partial_rotary_factor": 0.5}},
    ),
    "gpt_oss": ("gpt_oss", {**_WINDOWS, "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "gptj": ("gptj", {**_GPT, "rotary_dim": 8}),
    "granite": (
        "granite",
        {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3},
    ),
    "granitemoe": ("granitemoe", {"num_local_experts": 6, "embedding_multiplier": 2.0, "attention_multiplier": 0.2}),
    "granitemoeshared": (
        "granitemoeshared",
        {"num_local_experts": 6, "shared_intermediate_size": 48, "attention_multiplier": 0.2},
    ),
    "helium": ("helium", {"head_dim": 16, "num_key_value_heads": 4}),
    "hunyuan_v1_dense": (
        "hunyuan_v1_dense",
        {"head_dim": 16, "rope_parameters": {**_PLAIN_ROPE, "rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}},
    ),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {"head_dim": 16, "num_experts": 6, "moe_topk": 2}),
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, yarn": ("llama", {"rope_parameters": _YARN}),
    "llama4": ("llama4", {**_IMAGES, "text_config": {**_COMMON, **_LLAMA4}}),
    "llama4_text": ("llama4_text", _LLAMA4),
    "minicpm3": (
        "minicpm3",
        {**_LATENT, "num_key_value_heads": 4, "scale_emb": 2.0, "dim_model_base": 32},
    ),
    "ministral": (
        "ministral",
        {
            **_WINDOWS, "head_dim": 16, "rope_parameters": _PLAIN_ROPE,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "ministral3": ("ministral3", _MINISTRAL3),
    "mistral": ("mistral", _WINDOWS),
    "mistral3": ("mistral3", {**_IMAGES, "text_config": {**_COMMON, **_MINISTRAL3, "model_type": "ministral3"}}),
    "mixtral": ("mixtral", {"num_local_experts": 6}),
    "nanochat": ("nanochat", {}),
    "nemotron": ("nemotron", {"head_dim": 16, "mlp_bias": True}),
    "olmo": ("olmo", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", _WINDOWS),
    "olmoe": ("olmoe", {**_FEW_EXPERTS, "norm_topk_prob": True}),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.2, "tie_word_embeddings": True}),
    "phi": ("phi", {}),
    "phi, qk norm": ("phi", {"qk_layernorm": True}),
    "phi3": ("phi3", {"sliding_window": 40}),
    "phi3, longrope": ("phi3", {"original_max_position_embeddings": 48, "rope_parameters": _LONGROPE}),
    "phimoe": ("phimoe", {"num_local_experts": 6, "lm_head_bias": True, "attention_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen2_moe": (
        "qwen2_moe",
        {**_FEW_EXPERTS, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 2},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_moe": ("qwen3_moe", {**_FEW_EXPERTS, "moe_intermediate_size": 48, "mlp_only_layers": [1], "head_dim": 16}),
    "seed_oss": ("seed_oss", {"head_dim": 16}),
    "smollm3": ("smollm3", {}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm, parallel": ("stablelm", {"use_parallel_residual": True}),
    "stablelm, qk norm": ("stablelm", {"qk_layernorm": True, "use_parallel_residual": True}),
    "starcoder2": ("starcoder2", {**_WINDOWS, "tie_word_embeddings": True}),
    "apertus": ("apertus", {"head_dim": 16, "rope_parameters": _PLAIN_ROPE}),
    "biogpt": ("biogpt", {"tie_word_embeddings": True, "initializer_range": 0.4}),
    "codegen": ("codegen", {**_GPT, "rotary_dim": 8}),
    "cwm": ("cwm", {**_WINDOWS, "head_dim": 16, "rope_parameters": _PLAIN_ROPE}),
    "exaone_moe": ("exaone_moe", {**_WINDOWS, **_FEW_EXPERTS, "moe_intermediate_size": 48, "head_dim": 16}),
    "flex_olmo": ("flex_olmo", _FEW_EXPERTS),
    "glm4_moe_lite": ("glm4_moe_lite", {key: value for key, value in _DEEPSEEK.items() if key != "first_k_dense_replace"}),
    "gpt_neo": (
        "gpt_neo",
        {"num_layers": 4, "num_heads": 4, "window_size": 24, "attention_types": [[["global", "local"], 2]],
         "tie_word_embeddings": True},
    ),
    "granite_swa": ("granite_swa", {**_WINDOWS, "attention_multiplier": 0.3, "layer_rope_theta": [10000.0, 500.0, 500.0, 0]}),
    "granitemoe_swa": ("granitemoe_swa", {**_WINDOWS, "num_local_experts": 6, "attention_multiplier": 0.2}),
    "hy_v3": ("hy_v3", {**_FEW_EXPERTS, "moe_intermediate_size": 48, "head_dim": 16}),
    "hyperclovax": ("hyperclovax", {"logits_scaling": 0.5, "residual_multiplier": 0.4}),
    "iquestcoder": ("iquestcoder", {"head_dim": 16}),
    "jais2": ("jais2", {"head_dim": 16}),
    "mellum": ("mellum", {**_WINDOWS, **_FEW_EXPERTS, "moe_intermediate_size": 48, "head_dim": 16, "layer_types": _KINDS}),
    "minimax_m2": ("minimax_m2", {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 8}),
    "persimmon": ("persimmon", {}),
    "solar_open": ("solar_open", {**_ROUTED, "first_k_dense_replace": 0, "num_key_value_heads": 2, "head_dim": 16}),
    "vaultgemma": ("vaultgemma", {**_GEMMA, **_WINDOWS}),
    "youtu": ("youtu", {**_LATENT, "num_key_value_heads": 4}),
}  # fmt: skip
"""Names of variants: (model_type, fields of the config that differ from the common ones)."""


def tiny_config(variant: str, **overrides: Any) -> Any:
    """Return transformers' config of a variant."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type, fields = VARIANTS[variant]
    kind = CONFIG_MAPPING[model_type]
    common = {key: value for key, value in _COMMON.items() if key in kind().to_dict()}
    return kind(**{**common, **fields, **overrides})


def reads_images(variant: str) -> bool:
    """Return whether it has a text model among others."""
    return "text_config" in VARIANTS[variant][1]


def make_tiny_family(folder: str | Path, variant: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random checkpoint of a variant to `folder`, and return it. Biases, norm weights and sinks are random too."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(seed)
    kind = AutoModelForImageTextToText if reads_images(variant) else AutoModelForCausalLM
    model = kind.from_config(tiny_config(variant, **overrides), dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("inv_freq") or not tensor.is_floating_point():
                continue
            if tensor.dim() <= 1 or "norm" in name or "bias" in name:
                tensor.add_(torch.randn_like(tensor) * 0.2)
            elif "router" in name or ".gate." in name:
                tensor.copy_(torch.randn_like(tensor) * 0.5)
            elif not tensor.any():
                tensor.copy_(torch.randn_like(tensor) * 0.2)
    folder = Path(folder)
    model.eval().save_pretrained(folder)
    write_byte_tokenizer(folder, max_context=2048)
    return folder
