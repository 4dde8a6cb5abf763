"""StableLM 2 and 3B: LayerNorm, a gated MLP, a quarter of each head rotated; the 12B in parallel, with norms of heads."""

from __future__ import annotations

from pdmesh.engine.models.config import Defaults, ModelConfig, decoder
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.names import Names, Stored
from pdmesh.engine.models.reader import ConfigReader


def read(config: ConfigReader) -> ModelConfig:
    """Read a StableLM's config.json."""
    parallel = config.flag("use_parallel_residual")
    return decoder(
        config,
        Defaults(norm_eps=1e-5, partial_rotary=0.25, names={"rms_norm_eps": "layer_norm_eps"}),
        norm="layer",
        norm_bias=True,
        parallel=parallel,
        mlp_norm=not parallel,
        qkv_bias=config.flag("use_qkv_bias"),
        qk_norm="heads" if config.flag("qk_layernorm") else "",
    )


FAMILY = Family(
    read,
    Names(
        {
            "self_attn.q_norm": Stored("self_attn.q_layernorm.norms.{}", count=lambda config: config.num_heads),
            "self_attn.k_norm": Stored("self_attn.k_layernorm.norms.{}", count=lambda config: config.num_kv_heads),
        }
    ),
)
