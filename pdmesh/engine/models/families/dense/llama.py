"""Llama 1 to 3.x, and what is saved under its name (Yi, InternLM converted, TinyLlama, SmolLM); IQuest Coder; CWM (windows)."""

from __future__ import annotations

from pdmesh.engine.models.config import Defaults, ModelConfig, decoder, layer_windows
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.reader import ConfigReader


def read(config: ConfigReader) -> ModelConfig:
    """Read a Llama's config.json; biases are there only where it says so."""
    bias = config.flag("attention_bias")
    return decoder(config, qkv_bias=bias, output_bias=bias, mlp_bias=config.flag("mlp_bias"))


def read_iquest(config: ConfigReader) -> ModelConfig:
    """Read an IQuest Coder's config.json."""
    config.require("clip_qkv")
    config.require("use_sliding_window", False)
    return read(config)


def read_cwm(config: ConfigReader) -> ModelConfig:
    """Read a CWM's config.json: the first of every four layers sees everything, unless `layer_types` says which."""
    num_layers, window = config.count("num_hidden_layers"), config.optional_count("sliding_window")
    windows = layer_windows(config, num_layers, window)
    windows = windows or tuple(window if layer % 4 else None for layer in range(num_layers))
    defaults = Defaults(head_dim=128, norm_eps=1e-5, rope_theta=1e6)
    return decoder(config, defaults, mlp_bias=config.flag("mlp_bias"), windows=windows)


FAMILY, IQUEST, CWM = Family(read), Family(read_iquest), Family(read_cwm)
