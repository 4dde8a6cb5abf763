"""Qwen 2 MoE and Qwen 3 MoE: Qwen's attention; layers with experts, in Qwen 2 with a gated shared one. Mellum: Qwen 3 MoE with a
rotary embedding for each kind of layer."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.engine.models.config import Defaults, ExpertsConfig, ModelConfig, decoder, layer_windows
from pdmesh.engine.models.families.dense.qwen import windows
from pdmesh.engine.models.families.experts.glm_moe import mixed_layers
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.names import Names
from pdmesh.engine.models.reader import ConfigReader
from pdmesh.engine.models.rope import ropes_by_kind


def read_qwen2_moe(config: ConfigReader) -> ModelConfig:
    """Read a Qwen 2 MoE's config.json."""
    shared = config.count("shared_expert_intermediate_size", default=5632)
    experts = _experts(config, shared_intermediate_size=shared, shared_gate=True)
    bias = config.flag("qkv_bias", True)
    return decoder(config, qkv_bias=bias, windows=windows(config), experts=experts)


def read_qwen3_moe(config: ConfigReader) -> ModelConfig:
    """Read a Qwen 3 MoE's config.json."""
    bias = config.flag("attention_bias")
    return decoder(
        config,
        Defaults(head_dim=None),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
        windows=windows(config),
        experts=_experts(config),
    )


def read_mellum(config: ConfigReader) -> ModelConfig:
    """Read a Mellum's config.json."""
    bias, num_layers = config.flag("attention_bias"), config.count("num_hidden_layers")
    head_dim, max_context = config.count("head_dim", default=128), config.count("max_position_embeddings")
    config.ignore("num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types")
    window = config.optional_count("sliding_window")
    experts = replace(_experts(config), layers=mixed_layers(config), normalize=config.flag("norm_topk_prob", True))
    return decoder(
        config,
        Defaults(head_dim=128),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
        windows=layer_windows(config, num_layers, window) or (None,) * num_layers,
        experts=experts,
        **ropes_by_kind(config, head_dim=head_dim, max_context=max_context),
    )


def _experts(config: ConfigReader, **parts: object) -> ExpertsConfig:
    num_layers, step = config.count("num_hidden_layers"), config.count("decoder_sparse_step", default=1)
    num_experts = config.count("num_experts", "num_local_experts")
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, (list, tuple)):
        raise ValueError(f"config.json: mlp_only_layers is {dense!r}, not a list")
    return ExpertsConfig(
        num_experts,
        config.count("num_experts_per_tok", default=4),
        config.count("moe_intermediate_size"),
        tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
        normalize=config.flag("norm_topk_prob"),
        **parts,  # type: ignore[arg-type]
    )


QWEN2_MOE = Family(read_qwen2_moe, Names({"mlp.router": "mlp.gate", "mlp.shared_gate": "mlp.shared_expert_gate"}))
MELLUM = Family(read_mellum, Names({"mlp.router": "mlp.gate"}, ignored=r".*\.rotary_emb\.inv_freq|mtp\..*"))
QWEN3_MOE = Family(read_qwen3_moe, Names({"mlp.router": "mlp.gate"}))
