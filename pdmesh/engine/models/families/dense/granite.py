"""Granite 3: a Llama with multipliers of embeddings, residuals, attention and logits."""

from __future__ import annotations

from pdmesh.engine.models.config import ModelConfig, decoder
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.reader import ConfigReader


def read(config: ConfigReader) -> ModelConfig:
    """Read a Granite's config.json."""
    bias = config.flag("attention_bias")
    return decoder(config, qkv_bias=bias, output_bias=bias, mlp_bias=config.flag("mlp_bias"), **multipliers(config))


def multipliers(config: ConfigReader) -> dict[str, object]:
    """Return the factors that Granite's families have; logits are divided by theirs."""
    return {
        "embedding_multiplier": config.number("embedding_multiplier", default=1.0),
        "residual_multiplier": config.number("residual_multiplier", default=1.0),
        "logits_multiplier": 1.0 / config.above_zero("logits_scaling", default=1.0),
        "attention_scale": config.number("attention_multiplier", default=1.0),
    }


FAMILY = Family(read)
