"""Hunyuan 1: a Llama whose query and key heads are normalized behind their rotation; the second kind with experts and a shared
one in every layer."""

from __future__ import annotations

from pdmesh.engine.models.config import Defaults, ExpertsConfig, ModelConfig, decoder
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.names import Names
from pdmesh.engine.models.reader import ConfigReader
from pdmesh.engine.models.rope import RopeConfig, rope_parameters

_OF_OTHER_TASKS = (
    "add_classification_head", "class_num", "dense_list", "pool_type", "eod_token_id", "pad_id", "org_vocab_size", "mask_init_id",
    "im_start_id", "im_end_id", "im_newline_id", "text_start_id", "text_end_id", "image_token_id",
    "video_start_id", "video_end_id",
)  # fmt: skip
_OF_TRAINING = ("moe_drop_tokens", "moe_random_routing_dropped_token", "capacity_factor")


def read_dense(config: ConfigReader) -> ModelConfig:
    """Read a dense Hunyuan's config.json."""
    return _decoder(config)


def read_moe(config: ConfigReader) -> ModelConfig:
    """Read the config.json of a Hunyuan with experts (A13B). Some of its counts are lists, with one entry for each layer."""
    config.ignore(*_OF_TRAINING)
    config.require("moe_layer_num_skipped", 0)
    config.require("use_mixed_mlp_moe", True)
    config.require("norm_topk_prob", True)
    config.require("routed_scaling_factor", 1.0, 0)
    num_layers, inner = config.count("num_hidden_layers"), config.count("intermediate_size")
    own = _same(config, "moe_intermediate_size", inner)
    experts = ExpertsConfig(
        _same(config, "num_experts"),
        _same(config, "moe_topk"),
        own,
        (True,) * num_layers,
        normalize=True,
        shared_intermediate_size=own * _same(config, "num_shared_expert", 1),
    )
    return _decoder(config, experts=experts)


def _decoder(config: ConfigReader, **parts: object) -> ModelConfig:
    config.ignore(*_OF_OTHER_TASKS, "cla_share_factor")
    config.require("use_qk_norm", True)
    config.require("use_cla", False)
    config.require("use_rotary_pos", True)
    config.require("norm_type", "rms")
    config.require("mlp_bias", False)
    bias = config.flag("attention_bias")
    head_dim = config.optional_count("head_dim", "attention_head_dim")
    head_dim = head_dim or config.count("hidden_size") // config.count("num_attention_heads")
    config.ignore("attention_head_dim")
    return decoder(
        config,
        Defaults(norm_eps=1e-5),
        head_dim=head_dim,
        rope=_rope(config, head_dim),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
        qk_norm_rotated=True,
        **parts,
    )


def _rope(config: ConfigReader, head_dim: int) -> RopeConfig:
    """Return the rotary embedding. Type dynamic with `alpha` is a greater base at every length (bloc97, NTK-aware, 2023)."""
    params, max_context = rope_parameters(config), config.count("max_position_embeddings")
    alpha = None if params is None else params.optional_number("alpha")
    if params is None or not alpha:
        return RopeConfig.from_dict(config, head_dim=head_dim, max_context=max_context, params=params)
    params.ignore("type", "rope_type", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    theta = params.number("rope_theta", default=config.number("rope_theta", default=10000.0))
    base = ConfigReader({"rope_theta": theta * alpha ** (head_dim / (head_dim - 2))})
    return RopeConfig.from_dict({}, head_dim=head_dim, max_context=max_context, params=base)


def _same(config: ConfigReader, key: str, default: int | None = None) -> int:
    """Return a count that is a number, or a list of the same number for each layer."""
    value = config.get(key)
    if isinstance(value, list) and value and len(set(map(str, value))) == 1:
        return ConfigReader({key: value[0]}).count(key)
    return config.count(key, default=default)


_NORMS = {"self_attn.q_norm": "self_attn.query_layernorm", "self_attn.k_norm": "self_attn.key_layernorm"}
_MIXED = {
    "mlp.router": "mlp.gate.wg",
    "mlp.shared_expert.gate_proj": "mlp.shared_mlp.gate_proj",
    "mlp.shared_expert.up_proj": "mlp.shared_mlp.up_proj",
    "mlp.shared_expert.down_proj": "mlp.shared_mlp.down_proj",
}
DENSE, MOE = Family(read_dense, Names(_NORMS)), Family(read_moe, Names({**_NORMS, **_MIXED}))
