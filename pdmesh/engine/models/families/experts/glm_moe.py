"""GLM 4.5 and dots.llm1: layers with DeepSeek's experts behind a few dense ones, and norms of query and key heads."""

from __future__ import annotations

from pdmesh.engine.models.config import Defaults, ExpertsConfig, ModelConfig, decoder, layer_windows
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.names import Names, Stored
from pdmesh.engine.models.reader import ConfigReader


def read_glm4_moe(config: ConfigReader) -> ModelConfig:
    """Read a GLM 4.5's config.json."""
    bias = config.flag("attention_bias")
    qk_norm = "head" if config.flag("use_qk_norm") else ""
    defaults = Defaults(norm_eps=1e-5, partial_rotary=0.5)
    return decoder(config, defaults, qkv_bias=bias, qk_norm=qk_norm, experts=sigmoid_experts(config))


def read_dots1(config: ConfigReader) -> ModelConfig:
    """Read a dots.llm1's config.json."""
    bias, num_layers = config.flag("attention_bias"), config.count("num_hidden_layers")
    window = config.optional_count("sliding_window")
    config.ignore("max_window_layers", "use_sliding_window")
    windows = layer_windows(config, num_layers, window) or (None,) * num_layers
    experts = sigmoid_experts(config)
    return decoder(config, qkv_bias=bias, output_bias=bias, qk_norm="head", windows=windows, experts=experts)


def sigmoid_experts(config: ConfigReader) -> ExpertsConfig:
    """Return the experts of DeepSeek-V3: scores by a sigmoid, groups ranked by their two best, a bias that balances."""
    config.require("scoring_func", "sigmoid")
    config.require("topk_method", "noaux_tc")
    config.require("moe_layer_freq", 1)
    num_layers, dense = config.count("num_hidden_layers"), config.optional_count("first_k_dense_replace") or 0
    inner = config.count("moe_intermediate_size")
    return ExpertsConfig(
        config.count("n_routed_experts", "num_local_experts"),
        config.count("num_experts_per_tok"),
        inner,
        tuple(layer >= dense for layer in range(num_layers)),
        scoring="sigmoid",
        normalize=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", default=1.0),
        num_groups=config.optional_count("n_group") or 1,
        top_groups=config.optional_count("topk_group") or 1,
        group_rank="top2",
        has_correction=True,
        shared_intermediate_size=inner * (config.optional_count("n_shared_experts") or 0),
    )


STEMS: dict[str, str | Stored] = {
    "mlp.router": "mlp.gate",
    "mlp.router.correction": Stored("mlp.gate", (), {"correction": "e_score_correction_bias"}),
    "mlp.shared_expert.gate_proj": "mlp.shared_experts.gate_proj",
    "mlp.shared_expert.up_proj": "mlp.shared_experts.up_proj",
    "mlp.shared_expert.down_proj": "mlp.shared_experts.down_proj",
}
"""Where DeepSeek, and the families that took its experts, store router and shared expert."""
GLM4_MOE, DOTS1 = Family(read_glm4_moe, Names(STEMS)), Family(read_dots1, Names(STEMS))
