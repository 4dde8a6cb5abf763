"""MiniCPM 3: latent attention with a dense MLP, and MiniCPM's multipliers."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.engine.models.config import ModelConfig
from pdmesh.engine.models.families.latent.deepseek import LATENT, latent_decoder
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.names import Names
from pdmesh.engine.models.reader import ConfigReader


def read(config: ConfigReader) -> ModelConfig:
    """Read a MiniCPM 3's config.json: residuals are scaled by depth, logits by the width of the model that it grew from."""
    depth, base = config.number("scale_depth", default=1.4), config.number("dim_model_base", default=256.0)
    read = latent_decoder(config, embedding_multiplier=config.number("scale_emb", default=12.0))
    return replace(read, residual_multiplier=depth / read.num_layers**0.5, logits_multiplier=base / read.hidden_size)


FAMILY = Family(read, Names(LATENT))
