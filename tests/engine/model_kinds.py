"""The tiny models that the model tests run: every architecture and every switch that changes its arithmetic."""

from __future__ import annotations

from typing import Any

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-odd-groups": ("llama", {"hidden_size": 96, "num_attention_heads": 6, "intermediate_size": 200}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 32}),
    "llama-linear": ("llama", {"rope_parameters": _LINEAR_ROPE}),
    "llama-dynamic": ("llama", {"rope_parameters": _DYNAMIC_ROPE}),
    "llama-yarn": ("llama", {"rope_parameters": _YARN_ROPE}),
    "llama-yarn-mscale": ("llama", {"rope_parameters": {**_YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}}),
    "llama-llama3": ("llama", {"rope_parameters": _LLAMA3_ROPE}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 37}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1, "num_hidden_layers": 3}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-bias": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3-layer-types": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 50, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}
