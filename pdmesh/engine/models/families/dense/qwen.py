"""Qwen 2 and 2.5 (biases of queries, keys and values) and Qwen 3 (norms of query and key heads)."""

from __future__ import annotations

from pdmesh.engine.models.config import Defaults, ModelConfig, decoder, layer_windows
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.reader import ConfigReader


def read_qwen2(config: ConfigReader) -> ModelConfig:
    """Read a Qwen 2's config.json."""
    return decoder(config, qkv_bias=True, windows=windows(config))


def read_qwen3(config: ConfigReader) -> ModelConfig:
    """Read a Qwen 3's config.json."""
    bias = config.flag("attention_bias")
    return decoder(config, Defaults(head_dim=128), qkv_bias=bias, output_bias=bias, qk_norm="head", windows=windows(config))


def windows(config: ConfigReader) -> tuple[int | None, ...]:
    """Return each layer's window, by the rules of transformers' configuration classes."""
    num_layers = config.count("num_hidden_layers")
    window = config.optional_count("sliding_window") if "sliding_window" in config else 4096
    first = config.optional_count("max_window_layers")
    if not config.flag("use_sliding_window"):
        window = None
    by_type = layer_windows(config, num_layers, window)
    if by_type is not None:
        return by_type
    first = 28 if first is None else first
    return tuple(window if layer >= first else None for layer in range(num_layers))


QWEN2, QWEN3 = Family(read_qwen2), Family(read_qwen3)
