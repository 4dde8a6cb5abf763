"""Llama 1 to 3.x, and what is saved under its name (Yi, InternLM converted, TinyLlama, SmolLM)."""

from __future__ import annotations

from pdmesh.engine.models.config import ModelConfig, decoder
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.reader import ConfigReader


def read(config: ConfigReader) -> ModelConfig:
    """Read a Llama's config.json; biases are there only where it says so."""
    bias = config.flag("attention_bias")
    return decoder(config, qkv_bias=bias, output_bias=bias, mlp_bias=config.flag("mlp_bias"))


FAMILY = Family(read)
