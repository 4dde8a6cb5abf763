"""OLMoE and FlexOlmo: OLMo 1 and 2 with experts in every layer, and norms over all query and key heads."""

from __future__ import annotations

from pdmesh.engine.models.config import Defaults, ExpertsConfig, ModelConfig, decoder
from pdmesh.engine.models.families.dense.olmo import BEHIND, parts
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.names import Names
from pdmesh.engine.models.reader import ConfigReader


def read(config: ConfigReader) -> ModelConfig:
    """Read an OLMoE's config.json."""
    config.require("clip_qkv")
    bias = config.flag("attention_bias")
    experts = _experts(config, num_experts=64, top_k=8)
    return decoder(config, Defaults(norm_eps=1e-5), qkv_bias=bias, output_bias=bias, qk_norm="all", experts=experts)


def read_flex(config: ConfigReader) -> ModelConfig:
    """Read a FlexOlmo's config.json."""
    return decoder(config, Defaults(rope_theta=5e5), experts=_experts(config, num_experts=7, top_k=5), **parts(config))


def _experts(config: ConfigReader, *, num_experts: int, top_k: int) -> ExpertsConfig:
    return ExpertsConfig(
        config.count("num_experts", "num_local_experts", default=num_experts),
        config.count("num_experts_per_tok", default=top_k),
        config.count("intermediate_size"),
        (True,) * config.count("num_hidden_layers"),
        normalize=config.flag("norm_topk_prob"),
    )


FAMILY = Family(read, Names({"mlp.router": "mlp.gate"}))
FLEX = Family(read_flex, Names({"mlp.router": "mlp.gate", **BEHIND}))
