"""Arcee (AFM): a Llama with a plain MLP and squared relu."""

from __future__ import annotations

from pdmesh.engine.models.config import Defaults, ModelConfig, decoder
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.reader import ConfigReader


def read(config: ConfigReader) -> ModelConfig:
    """Read an Arcee's config.json."""
    bias = config.flag("attention_bias")
    return decoder(
        config,
        Defaults(norm_eps=1e-5, activation="relu2"),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias"),
        gated_mlp=False,
    )


FAMILY = Family(read)
