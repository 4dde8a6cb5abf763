"""Seed-OSS: a Llama whose output map may lack the bias that queries, keys and values have."""

from __future__ import annotations

from pdmesh.engine.models.config import Defaults, ModelConfig, decoder
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.reader import ConfigReader


def read(config: ConfigReader) -> ModelConfig:
    """Read a Seed-OSS' config.json."""
    return decoder(
        config,
        Defaults(head_dim=128),
        qkv_bias=config.flag("attention_bias", True),
        output_bias=config.flag("attention_out_bias"),
        mlp_bias=config.flag("mlp_bias"),
    )


FAMILY = Family(read)
