"""Helium: a Llama whose rotary embedding turns neighbours, as GLM's and ERNIE's do."""

from __future__ import annotations

from pdmesh.engine.models.config import Defaults, ModelConfig, decoder
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.names import Names, changed, halves_from_pairs
from pdmesh.engine.models.reader import ConfigReader


def read(config: ConfigReader) -> ModelConfig:
    """Read a Helium's config.json."""
    bias = config.flag("attention_bias")
    return decoder(
        config,
        Defaults(head_dim=128, norm_eps=1e-8, rope_theta=1e5),
        qkv_bias=bias,
        mlp_bias=config.flag("mlp_bias"),
        wide_norm=True,
    )


PAIRS = ["self_attn.q_proj", "self_attn.k_proj"]
"""Maps whose heads are reordered where neighbours are rotated together."""
FAMILY = Family(read, Names(changed(halves_from_pairs, PAIRS)))
