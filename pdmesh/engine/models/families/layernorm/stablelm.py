"""StableLM 2 and 3B: LayerNorm, a gated MLP, a quarter of each head rotated; the 12B in parallel."""

from __future__ import annotations

from pdmesh.engine.models.config import Defaults, ModelConfig, decoder
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.reader import ConfigReader


def read(config: ConfigReader) -> ModelConfig:
    """Read a StableLM's config.json."""
    config.require("qk_layernorm", False)
    parallel = config.flag("use_parallel_residual")
    return decoder(
        config,
        Defaults(norm_eps=1e-5, partial_rotary=0.25, names={"rms_norm_eps": "layer_norm_eps"}),
        norm="layer",
        norm_bias=True,
        parallel=parallel,
        mlp_norm=not parallel,
        qkv_bias=config.flag("use_qkv_bias"),
    )


FAMILY = Family(read)
