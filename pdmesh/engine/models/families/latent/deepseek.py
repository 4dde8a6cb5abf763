"""DeepSeek-V2 and V3 (R1, Kimi K2), GLM 4.7 Flash: latent attention, experts behind a few dense layers; Youtu without experts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from pdmesh.engine.models.config import Defaults, ExpertsConfig, LatentConfig, ModelConfig, decoder
from pdmesh.engine.models.families.experts.glm_moe import STEMS, sigmoid_experts
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.names import Names, Place, Stored, joined, pair_order
from pdmesh.engine.models.reader import ConfigReader, UnsupportedModel
from pdmesh.engine.models.rope import RopeConfig

if TYPE_CHECKING:
    from torch import Tensor


def read_v2(config: ConfigReader) -> ModelConfig:
    """Read a DeepSeek-V2's config.json."""
    config.require("scoring_func", "softmax")
    config.require("moe_layer_freq", 1)
    config.require("norm_topk_prob", False)  # transformers' V2 never divides by the sum
    method = str(config.get("topk_method") or "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModel(f"topk_method {method!r} is not supported; this engine computes greedy or group_limited_greedy")
    num_layers, dense = config.count("num_hidden_layers"), config.optional_count("first_k_dense_replace") or 0
    inner, grouped = config.count("moe_intermediate_size"), method == "group_limited_greedy"
    groups, top = config.optional_count("n_group") or 1, config.optional_count("topk_group") or 1
    experts = ExpertsConfig(
        config.count("n_routed_experts", "num_experts", "num_local_experts"),
        config.count("num_experts_per_tok"),
        inner,
        tuple(layer >= dense for layer in range(num_layers)),
        scale=config.number("routed_scaling_factor", default=1.0),
        num_groups=groups if grouped else 1,
        top_groups=top if grouped else 1,
        shared_intermediate_size=inner * (config.optional_count("n_shared_experts") or 0),
    )
    return latent_decoder(config, experts=experts)


def read_v3(config: ConfigReader) -> ModelConfig:
    """Read a DeepSeek-V3's config.json."""
    config.require("rope_interleave", True)
    return latent_decoder(config, experts=sigmoid_experts(config))


def read_glm_lite(config: ConfigReader) -> ModelConfig:
    """Read a GLM 4.7 Flash's config.json: the first layer is dense, unless it says which are."""
    config.require("rope_interleave", True)
    config.require("partial_rotary_factor", 1.0)
    return latent_decoder(config, norm_eps=config.number("rms_norm_eps", default=1e-5), experts=sigmoid_experts(config, 1))


def read_youtu(config: ConfigReader) -> ModelConfig:
    """Read a Youtu's config.json."""
    config.require("rope_interleave", True)
    config.ignore("embedding_initializer_range")
    return latent_decoder(config, tie_word_embeddings=config.flag("tie_word_embeddings", True))


def latent_decoder(config: ConfigReader, **parts: object) -> ModelConfig:
    """Return the config of a decoder with latent attention; `head_dim` is that of queries and keys."""
    latent = LatentConfig(
        config.optional_count("q_lora_rank") or 0,
        config.count("kv_lora_rank"),
        config.count("qk_nope_head_dim"),
        config.count("qk_rope_head_dim"),
        config.count("v_head_dim"),
    )
    if latent.width % 2:
        raise UnsupportedModel(f"kv_lora_rank + qk_rope_head_dim is {latent.width}; this engine needs an even number")
    config.ignore(
        "head_dim", "qk_head_dim", "rope_interleave", "num_nextn_predict_layers", "ep_size", "aux_loss_alpha", "seq_aux"
    )
    bias, width = config.flag("attention_bias"), latent.nope_dim + latent.rope_dim
    max_context = config.count("max_position_embeddings")
    rope = RopeConfig.from_dict(config, head_dim=latent.rope_dim, max_context=max_context)
    read = decoder(
        config,
        Defaults(),
        head_dim=width,
        rope=rope,
        latent=latent,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias"),
        attention_scale=width**-0.5 * _yarn_scale(rope),
        **parts,
    )
    return replace(read, num_kv_heads=read.num_heads)


def _yarn_scale(rope: RopeConfig) -> float:
    """Return the factor of scores that a stretched rotary embedding brings with it."""
    if rope.rope_type == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2


def query_pairs(tensor: Tensor, place: Place) -> Tensor:
    """Reorder the rotated rows of every head of the query map, see `pair_order`."""
    latent = place.config.latent
    assert latent is not None
    heads = tensor.reshape(-1, latent.nope_dim + latent.rope_dim, *tensor.shape[1:])
    order = pair_order(latent.rope_dim, latent.rope_dim) + latent.nope_dim
    heads = heads.clone()
    heads[:, latent.nope_dim :] = heads[:, order]
    return heads.reshape(tensor.shape)


def key_pairs(tensor: Tensor, place: Place) -> Tensor:
    """Reorder the rotated rows behind the latent's, see `pair_order`."""
    latent = place.config.latent
    assert latent is not None
    changed = tensor.clone()
    changed[latent.kv_rank :] = tensor[pair_order(latent.rope_dim, latent.rope_dim) + latent.kv_rank]
    return changed


LATENT: dict[str, str | Stored] = {
    "self_attn.q_a_norm": "self_attn.q_a_layernorm",
    "self_attn.kv_a_norm": "self_attn.kv_a_layernorm",
    "self_attn.kv_a_proj": "self_attn.kv_a_proj_with_mqa",
}
"""Stored names of latent attention whose halves are rotated together."""
PAIRS: dict[str, str | Stored] = {
    **LATENT,
    "self_attn.q_proj": Stored("self_attn.q_proj", (query_pairs,)),
    "self_attn.q_b_proj": Stored("self_attn.q_b_proj", (query_pairs,)),
    "self_attn.kv_a_proj": Stored("self_attn.kv_a_proj_with_mqa", (key_pairs,)),
}
"""And of that whose neighbours are."""
V2 = Family(read_v2, Names(joined(STEMS, PAIRS)))
V3 = Family(read_v3, Names(joined(STEMS, PAIRS)))
GLM_LITE, YOUTU = Family(read_glm_lite, Names(joined(STEMS, PAIRS))), Family(read_youtu, Names(PAIRS))
