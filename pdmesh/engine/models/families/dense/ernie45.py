"""ERNIE 4.5, dense: a Llama whose rotary embedding turns neighbours."""

from __future__ import annotations

from pdmesh.engine.models.config import Defaults, ModelConfig, decoder
from pdmesh.engine.models.families.dense.helium import PAIRS
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.names import Names, changed, halves_from_pairs
from pdmesh.engine.models.reader import ConfigReader


def read(config: ConfigReader) -> ModelConfig:
    """Read an ERNIE 4.5's config.json."""
    bias = config.flag("use_bias")
    return decoder(
        config,
        Defaults(head_dim=128, norm_eps=1e-5, rope_theta=5e5, tie=True),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
    )


FAMILY = Family(read, Names(changed(halves_from_pairs, PAIRS)))
