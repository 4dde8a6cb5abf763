"""Mistral and Ministral: a Llama with sliding windows."""

from __future__ import annotations

from pdmesh.engine.models.config import ModelConfig, decoder, layer_windows
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.reader import ConfigReader


def read(config: ConfigReader) -> ModelConfig:
    """Read a Mistral's config.json: every layer has the window, unless `layer_types` says which."""
    window = config.optional_count("sliding_window") if "sliding_window" in config else 4096
    num_layers = config.count("num_hidden_layers")
    windows = layer_windows(config, num_layers, window) or (window,) * num_layers
    return decoder(config, windows=windows)


FAMILY = Family(read)
