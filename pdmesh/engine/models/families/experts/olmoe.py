"""OLMoE: OLMo with experts in every layer, and norms over all query and key heads."""

from __future__ import annotations

from pdmesh.engine.models.config import Defaults, ExpertsConfig, ModelConfig, decoder
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.names import Names
from pdmesh.engine.models.reader import ConfigReader


def read(config: ConfigReader) -> ModelConfig:
    """Read an OLMoE's config.json."""
    config.require("clip_qkv")
    bias = config.flag("attention_bias")
    experts = ExpertsConfig(
        config.count("num_experts", "num_local_experts", default=64),
        config.count("num_experts_per_tok", default=8),
        config.count("intermediate_size"),
        (True,) * config.count("num_hidden_layers"),
        normalize=config.flag("norm_topk_prob"),
    )
    return decoder(config, Defaults(norm_eps=1e-5), qkv_bias=bias, output_bias=bias, qk_norm="all", experts=experts)


FAMILY = Family(read, Names({"mlp.router": "mlp.gate"}))
