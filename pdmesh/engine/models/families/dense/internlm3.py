"""InternLM 3: a Llama with a bias of its own name on queries, keys and values."""

from __future__ import annotations

from pdmesh.engine.models.config import Defaults, ModelConfig, decoder
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.reader import ConfigReader


def read(config: ConfigReader) -> ModelConfig:
    """Read an InternLM 3's config.json, as InternLM publishes it (`bias`, `qkv_bias`) and as transformers writes it."""
    bias = config.flag("attention_bias") or config.flag("bias")
    qkv_bias = config.flag("qkv_bias") or config.flag("attention_bias")
    return decoder(
        config,
        Defaults(head_dim=128, norm_eps=1e-5),
        qkv_bias=qkv_bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias") or config.flag("bias"),
    )


FAMILY = Family(read)
