"""GLM 4.5, dots.llm1, Solar Open and Hunyuan 3: layers with DeepSeek's experts behind a few dense ones, most with QK norm."""

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


def read_solar(config: ConfigReader) -> ModelConfig:
    """Read a Solar Open's config.json: every layer has experts, heads have no norms."""
    bias = config.flag("attention_bias")
    config.require("use_qk_norm", False)
    config.require("first_k_dense_replace", 0)
    config.ignore("intermediate_size")
    experts = sigmoid_experts(config)
    defaults = Defaults(head_dim=128, norm_eps=1e-5, rope_theta=1e6)
    return decoder(config, defaults, intermediate_size=experts.intermediate_size, qkv_bias=bias, experts=experts)


def read_hunyuan3(config: ConfigReader) -> ModelConfig:
    """Read a Hunyuan 3's config.json."""
    bias = config.flag("attention_bias")
    config.ignore("enable_moe_fp32_combine", "enable_attention_fp32_softmax", "enable_lm_head_fp32")  # the order of roundings
    return decoder(
        config,
        Defaults(norm_eps=1e-5, rope_theta=11158840.0),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias"),
        qk_norm="head",
        experts=sigmoid_experts(config, num_dense=1),
    )


def sigmoid_experts(config: ConfigReader, num_dense: int = 0) -> ExpertsConfig:
    """Return the experts of DeepSeek-V3: scores by a sigmoid, groups ranked by their two best, a bias that balances.
    `num_dense`: layers before the first with experts, where the config does not say."""
    config.require("scoring_func", "sigmoid")
    config.require("topk_method", "noaux_tc")
    config.require("moe_layer_freq", 1)
    inner = config.count("moe_intermediate_size")
    return ExpertsConfig(
        config.count("n_routed_experts", "num_local_experts", "num_experts"),
        config.count("num_experts_per_tok"),
        inner,
        mixed_layers(config, num_dense),
        scoring="sigmoid",
        normalize=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", "router_scaling_factor", default=1.0),
        num_groups=config.optional_count("n_group") or 1,
        top_groups=config.optional_count("topk_group") or 1,
        group_rank="top2",
        has_correction=True,
        shared_intermediate_size=inner * (config.optional_count("n_shared_experts", "num_shared_experts") or 0),
    )


def mixed_layers(config: ConfigReader, num_dense: int = 0) -> tuple[bool, ...]:
    """Return for each layer whether it has experts: `mlp_layer_types` says it, else those from `first_k_dense_replace` on."""
    num_layers, kinds = config.count("num_hidden_layers"), config.texts("mlp_layer_types")
    first = config.optional_count("first_k_dense_replace")
    first = num_dense if first is None else first
    if kinds is None:
        return tuple(layer >= first for layer in range(num_layers))
    if len(kinds) < num_layers or set(kinds) - {"dense", "sparse"}:
        raise ValueError(f"mlp_layer_types: {kinds}; this engine needs dense or sparse for each of {num_layers} layers")
    return tuple(kind == "sparse" for kind in kinds[:num_layers])


STEMS: dict[str, str | Stored] = {
    "mlp.router": "mlp.gate",
    "mlp.router.correction": Stored("mlp.gate", (), {"correction": "e_score_correction_bias"}),
    "mlp.shared_expert.gate_proj": "mlp.shared_experts.gate_proj",
    "mlp.shared_expert.up_proj": "mlp.shared_experts.up_proj",
    "mlp.shared_expert.down_proj": "mlp.shared_experts.down_proj",
}
"""Where DeepSeek, and the families that took its experts, store router and shared expert."""
BESIDE_GATE = Stored("mlp", (), {"correction": "e_score_correction_bias"})
"""Where families that keep the correction beside the router's map store it."""
GLM4_MOE, DOTS1 = Family(read_glm4_moe, Names(STEMS)), Family(read_dots1, Names(STEMS))
SOLAR = Family(read_solar, Names(STEMS))
HUNYUAN3 = Family(
    read_hunyuan3,
    Names(
        {
            "mlp.router": "mlp.router.gate",
            "mlp.router.correction": Stored("mlp", (), {"correction": "expert_bias"}),
            "mlp.shared_expert.gate_proj": "mlp.shared_mlp.gate_proj",
            "mlp.shared_expert.up_proj": "mlp.shared_mlp.up_proj",
            "mlp.shared_expert.down_proj": "mlp.shared_mlp.down_proj",
        }
    ),
)
