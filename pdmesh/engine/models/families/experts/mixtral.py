"""Mixtral and Phi 3.5 MoE: every layer a mixture of experts."""

from __future__ import annotations

from pdmesh.engine.models.config import Defaults, ExpertsConfig, ModelConfig, decoder
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.names import Names
from pdmesh.engine.models.reader import ConfigReader


def read_mixtral(config: ConfigReader) -> ModelConfig:
    """Read a Mixtral's config.json."""
    config.ignore("router_jitter_noise")
    num_layers = config.count("num_hidden_layers")
    return decoder(
        config,
        Defaults(norm_eps=1e-5, rope_theta=1e6),
        windows=(config.optional_count("sliding_window") or None,) * num_layers,
        experts=_experts(config, normalize=True),
    )


def read_phimoe(config: ConfigReader) -> ModelConfig:
    """Read a Phi 3.5 MoE's config.json: LayerNorm, and experts chosen by sparsemixer."""
    config.ignore("input_jitter_noise")
    num_layers, bias = config.count("num_hidden_layers"), config.flag("attention_bias")
    if config.count("num_experts_per_tok", default=2) != 2:
        config.require("num_experts_per_tok", 2)
    jitter = config.number("router_jitter_noise", default=0.01)
    return decoder(
        config,
        Defaults(norm_eps=1e-5, rope_theta=1e6),
        windows=(config.optional_count("sliding_window") or None,) * num_layers,
        norm="layer",
        norm_bias=True,
        qkv_bias=bias,
        output_bias=bias,
        head_bias=config.flag("lm_head_bias"),
        experts=_experts(config, scoring="sparsemixer", router_jitter=jitter),
    )


def _experts(config: ConfigReader, **parts: object) -> ExpertsConfig:
    return ExpertsConfig(
        config.count("num_local_experts", "num_experts"),
        config.count("num_experts_per_tok", default=2),
        config.count("intermediate_size"),
        (True,) * config.count("num_hidden_layers"),
        **parts,  # type: ignore[arg-type]
    )


_NAMES = {
    "mlp.router": "block_sparse_moe.gate",
    "mlp.experts.{}.gate_proj": "block_sparse_moe.experts.{}.w1",
    "mlp.experts.{}.up_proj": "block_sparse_moe.experts.{}.w3",
    "mlp.experts.{}.down_proj": "block_sparse_moe.experts.{}.w2",
}
MIXTRAL, PHIMOE = Family(read_mixtral, Names(_NAMES)), Family(read_phimoe, Names(_NAMES))
