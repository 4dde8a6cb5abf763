"""Arcee (AFM): a Llama with a plain MLP and squared relu. Apertus: with xIELU, whose shape each layer has learned, and norms of
query and key heads."""

from __future__ import annotations

from pdmesh.engine.models.config import Defaults, ModelConfig, decoder
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.names import Names
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


def read_apertus(config: ConfigReader) -> ModelConfig:
    """Read an Apertus' config.json."""
    bias = config.flag("attention_bias")
    config.require("hidden_act", "xielu")
    config.require("post_norm", False)
    config.require("qk_norm", True)
    defaults = Defaults(norm_eps=1e-5, rope_theta=1.2e7)
    return decoder(config, defaults, qkv_bias=bias, output_bias=bias, gated_mlp=False, activation="xielu", qk_norm="head")


FAMILY = Family(read)
APERTUS = Family(
    read_apertus, Names({"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"})
)
