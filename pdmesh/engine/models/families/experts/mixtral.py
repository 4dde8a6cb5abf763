"""Mixtral, Phi 3.5 MoE and MiniMax M2: every layer a mixture of experts."""

from __future__ import annotations

from pdmesh.engine.models.config import Defaults, ExpertsConfig, ModelConfig, decoder
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.names import Names, Stored
from pdmesh.engine.models.reader import ConfigReader, UnsupportedModel


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


def read_minimax_m2(config: ConfigReader) -> ModelConfig:
    """Read a MiniMax M2's config.json: scores by a sigmoid with a bias that balances, norms over all query and key heads."""
    kinds = config.get("attn_type_list")
    if isinstance(kinds, list) and set(kinds) - {1}:
        raise UnsupportedModel("attn_type_list: layers of another type than 1 have linear attention, a recurrent state")
    config.ignore("router_jitter_noise", "shared_moe_mode", "mtp_transformer_layers", "num_mtp_modules", "use_mtp")
    config.require("use_qk_norm", True)
    config.require("qk_norm_type", "per_layer")
    config.require("use_routing_bias", True)
    config.require("scoring_func", "sigmoid")
    config.require("shared_intermediate_size", 0)
    head_dim = config.count("head_dim", default=128)
    return decoder(
        config,
        Defaults(head_dim=128, rope_theta=5e6, partial_rotary=(config.optional_count("rotary_dim") or head_dim) / head_dim),
        qk_norm="all",
        experts=_experts(config, scoring="sigmoid", normalize=True, has_correction=True),
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
_CORRECTION = {"mlp.router.correction": Stored("block_sparse_moe", (), {"correction": "e_score_correction_bias"})}
MINIMAX_M2 = Family(read_minimax_m2, Names({**_NAMES, **_CORRECTION}))
MIXTRAL, PHIMOE = Family(read_mixtral, Names(_NAMES)), Family(read_phimoe, Names(_NAMES))
