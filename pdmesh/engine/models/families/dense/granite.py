"""Granite 3: a Llama with multipliers of embeddings, residuals, attention and logits; with windows and sinks; and HyperCLOVA X,
with norms behind attention and MLP."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.engine.models.config import ModelConfig, decoder, layer_windows
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.names import Names
from pdmesh.engine.models.reader import ConfigReader, UnsupportedModel


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
        "attention_scale": 1.0 if (own := config.optional_number("attention_multiplier")) is None else own,
    }


def read_swa(config: ConfigReader) -> ModelConfig:
    """Read the config.json of a Granite with windows: the first of every four layers sees everything, unless `layer_types` says
    which."""
    return with_windows(config, read(config))


def with_windows(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    """Return the model with windows and sinks. `layer_rope_theta`: each layer's base, 0 without rotation."""
    window, num_layers = config.optional_count("sliding_window"), model.num_layers
    by_type = layer_windows(config, num_layers, window)
    windows = by_type or tuple(window if layer % 4 else None for layer in range(num_layers))
    thetas = config.get("layer_rope_theta")
    if not isinstance(thetas, list):
        return replace(model, windows=windows, sinks=True)
    bases = {
        own is not None: {theta for theta, each in zip(thetas, windows, strict=True) if each == own and theta} for own in windows
    }
    if any(len(each) > 1 for each in bases.values()):
        raise UnsupportedModel(
            f"layer_rope_theta {thetas} is not supported; this engine has one for full attention, one for windows"
        )
    full, local = (next(iter(bases.get(kind, ())), model.rope.theta) for kind in (False, True))
    return replace(
        model,
        windows=windows,
        sinks=True,
        rotated=tuple(theta != 0 for theta in thetas),
        rope=replace(model.rope, theta=float(full)),
        local_rope=None if local == full else replace(model.rope, theta=float(local)),
    )


def read_hyperclovax(config: ConfigReader) -> ModelConfig:
    """Read a HyperCLOVA X' config.json; logits are multiplied by their factor."""
    bias, has_norms = config.flag("attention_bias"), config.flag("use_post_norm", True)
    parts = multipliers(config)
    parts["logits_multiplier"] = config.number("logits_scaling", default=1.0)
    parts["attention_scale"] = config.optional_number("attention_multiplier") or 0.0
    return decoder(config, qkv_bias=bias, output_bias=bias, mlp_bias=config.flag("mlp_bias"), post_norm=has_norms, **parts)


FAMILY, SWA = Family(read), Family(read_swa)
HYPERCLOVAX = Family(read_hyperclovax, Names({"post_self_attn_norm": "post_norm1", "post_mlp_norm": "post_norm2"}))
