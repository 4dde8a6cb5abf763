"""EXAONE 4: norms behind attention and MLP alone, norms of query and key heads, windows with layers between that see everything
and are not rotated. EXAONE MoE: the same attention, norms as in a Llama, experts."""

from __future__ import annotations

from pdmesh.engine.models.config import Defaults, ModelConfig, decoder, every, layer_windows
from pdmesh.engine.models.families.experts.glm_moe import BESIDE_GATE, STEMS, sigmoid_experts
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.names import Names
from pdmesh.engine.models.reader import ConfigReader


def read(config: ConfigReader) -> ModelConfig:
    """Read an EXAONE 4's config.json."""
    return decoder(config, Defaults(norm_eps=1e-5), pre_norm=False, post_norm=True, **_attention(config))


def read_moe(config: ConfigReader) -> ModelConfig:
    """Read an EXAONE MoE's config.json: the first layer is dense, unless it says which are."""
    return decoder(config, Defaults(norm_eps=1e-5), experts=sigmoid_experts(config, num_dense=1), **_attention(config))


def _attention(config: ConfigReader) -> dict[str, object]:
    """Return the parts of attention. Without a window every layer is rotated."""
    num_layers, window = config.count("num_hidden_layers"), config.optional_count("sliding_window")
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, str):  # such as LLLG
        full = tuple(pattern[layer % len(pattern)] == "G" for layer in range(num_layers))
    else:
        full = every(num_layers, config.count("sliding_window_pattern", default=4)) if pattern else (False,) * num_layers
    by_type = layer_windows(config, num_layers, window)
    windows = by_type or tuple(None if last else window for last in full)
    rotated = tuple(own is not None for own in windows) if window else ()
    return {"qk_norm": "head", "windows": windows, "rotated": rotated}


MOE = Family(read_moe, Names({**STEMS, "mlp.router.correction": BESIDE_GATE}, ignored=r".*\.rotary_emb\.inv_freq|mtp\..*"))
FAMILY = Family(read, Names({"post_self_attn_norm": "post_attention_layernorm", "post_mlp_norm": "post_feedforward_layernorm"}))
