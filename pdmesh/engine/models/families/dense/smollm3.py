"""SmolLM3: a Llama of which every fourth layer has no rotary embedding."""

from __future__ import annotations

from pdmesh.engine.models.config import Defaults, ModelConfig, decoder, every, layer_windows
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.reader import ConfigReader


def read(config: ConfigReader) -> ModelConfig:
    """Read a SmolLM3's config.json; `no_rope_layers` holds 1 for a layer that is rotated."""
    bias, num_layers = config.flag("attention_bias"), config.count("num_hidden_layers")
    interval = config.count("no_rope_layer_interval", default=4)
    flags = config.get("no_rope_layers")
    rotated = (
        tuple(bool(flag) for flag in flags)
        if isinstance(flags, list)
        else tuple(not last for last in every(num_layers, interval))
    )
    window = config.optional_count("sliding_window") if config.flag("use_sliding_window") else None
    config.ignore("sliding_window")
    windows = layer_windows(config, num_layers, window) or (None,) * num_layers
    return decoder(
        config,
        Defaults(rope_theta=2e6, tie=True),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias"),
        rotated=rotated,
        windows=windows,
    )


FAMILY = Family(read)
