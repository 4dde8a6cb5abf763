"""Mistral and Ministral: a Llama with sliding windows; Ministral 3 with queries that grow with their position."""

from __future__ import annotations

from pdmesh.engine.models.config import Defaults, ModelConfig, TemperatureConfig, decoder, layer_windows
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.reader import ConfigReader


def read(config: ConfigReader) -> ModelConfig:
    """Read a Mistral's config.json: every layer has the window, unless `layer_types` says which."""
    window = config.optional_count("sliding_window") if "sliding_window" in config else 4096
    num_layers = config.count("num_hidden_layers")
    windows = layer_windows(config, num_layers, window) or (window,) * num_layers
    return decoder(config, windows=windows)


def read_ministral3(config: ConfigReader) -> ModelConfig:
    """Read a Ministral 3's text config; the rotary embedding's parameters say how queries grow."""
    window, num_layers = config.optional_count("sliding_window"), config.count("num_hidden_layers")
    params = config.section("rope_parameters") or ConfigReader({})
    params.ignore("max_position_embeddings")
    beta = params.number("llama_4_scaling_beta", default=0.0)
    period = params.count("original_max_position_embeddings", default=config.count("max_position_embeddings"))
    return decoder(
        config,
        Defaults(norm_eps=1e-5),
        windows=(window or None,) * num_layers,
        temperature=TemperatureConfig(beta, period) if beta else None,
    )


FAMILY, MINISTRAL3 = Family(read), Family(read_ministral3)
