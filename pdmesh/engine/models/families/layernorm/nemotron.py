"""Nemotron 3 and 4 (Minitron): LayerNorm that stores its distance from 1, a plain MLP with squared relu, half of a head rotated.
Jais 2: the same with a usual LayerNorm, whole heads rotated."""

from __future__ import annotations

from pdmesh.engine.models.config import Defaults, ModelConfig, decoder
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.names import Names, changed, plus_one
from pdmesh.engine.models.reader import ConfigReader


def read(config: ConfigReader) -> ModelConfig:
    """Read a Nemotron's config.json."""
    bias = config.flag("attention_bias")
    partial = config.number("rope_percent", "partial_rotary_factor", default=0.5)
    return decoder(
        config,
        Defaults(norm_eps=1e-5, activation="relu2", partial_rotary=partial, names={"rms_norm_eps": "norm_eps"}),
        norm="layer",
        norm_bias=True,
        gated_mlp=False,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias"),
    )


def read_jais2(config: ConfigReader) -> ModelConfig:
    """Read a Jais 2's config.json."""
    bias = config.flag("attention_bias", True)
    return decoder(
        config,
        Defaults(norm_eps=1e-5, activation="relu2", names={"rms_norm_eps": "layer_norm_eps"}),
        norm="layer",
        norm_bias=True,
        gated_mlp=False,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias", True),
    )


JAIS2 = Family(read_jais2)
FAMILY = Family(read, Names(changed(plus_one, ["model.norm", "input_layernorm", "post_attention_layernorm"])))
