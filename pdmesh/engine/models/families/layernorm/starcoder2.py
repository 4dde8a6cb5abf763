"""StarCoder 2: LayerNorm, a plain MLP, biases, a sliding window."""

from __future__ import annotations

from pdmesh.engine.models.config import Defaults, ModelConfig, decoder
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.names import Names
from pdmesh.engine.models.reader import ConfigReader


def read(config: ConfigReader) -> ModelConfig:
    """Read a StarCoder 2's config.json."""
    bias, num_layers = config.flag("use_bias", True), config.count("num_hidden_layers")
    config.require("mlp_type", "default")
    config.require("norm_type", "layer_norm")
    return decoder(
        config,
        Defaults(norm_eps=1e-5, tie=True, activation="gelu_pytorch_tanh", names={"rms_norm_eps": "norm_epsilon"}),
        windows=(config.optional_count("sliding_window") or None,) * num_layers,
        norm="layer",
        norm_bias=True,
        gated_mlp=False,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
    )


FAMILY = Family(read, Names({"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}))
