"""OLMo 1 (norms without weights), 2 (norms behind attention and MLP alone, and over all query and key heads), 3 (windows)."""

from __future__ import annotations

from pdmesh.engine.models.config import Defaults, ModelConfig, decoder, every, layer_windows
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.names import Names, Stored, ones
from pdmesh.engine.models.reader import ConfigReader
from pdmesh.engine.models.rope import RopeConfig, ropes_by_kind


def read_olmo(config: ConfigReader) -> ModelConfig:
    """Read an OLMo 1's config.json."""
    config.require("clip_qkv")
    bias = config.flag("attention_bias")
    return decoder(config, qkv_bias=bias, output_bias=bias, norm="layer", norm_eps=1e-5)


def read_olmo2(config: ConfigReader) -> ModelConfig:
    """Read an OLMo 2's config.json."""
    return decoder(config, Defaults(norm_eps=1e-5), **parts(config))


def read_olmo3(config: ConfigReader) -> ModelConfig:
    """Read an OLMo 3's config.json: every fourth layer sees everything, unless `layer_types` says which. Scalings of the rotary
    embedding are those of full attention alone."""
    num_layers, window = config.count("num_hidden_layers"), config.count("sliding_window", default=4096)
    windows = layer_windows(config, num_layers, window)
    head_dim = config.optional_count("head_dim") or config.count("hidden_size") // config.count("num_attention_heads")
    max_context = config.count("max_position_embeddings")
    ropes = ropes_by_kind(config, head_dim=head_dim, max_context=max_context)
    if not ropes and config.get("rope_scaling"):
        theta = config.number("rope_theta", default=1e4)
        plain = {"head_dim": head_dim, "max_context": max_context, "theta": theta}
        ropes = {"rope": RopeConfig.from_dict(config, **plain), "local_rope": RopeConfig.from_dict({}, **plain)}  # type: ignore[arg-type]
    config.ignore("rope_parameters") if ropes else None
    full = every(num_layers, 4)
    return decoder(
        config,
        Defaults(norm_eps=1e-5),
        windows=windows or tuple(None if last else window for last in full),
        **ropes,
        **parts(config),
    )


def parts(config: ConfigReader) -> dict[str, object]:
    """Return what OLMo has from 2 on."""
    bias = config.flag("attention_bias")
    return {"qkv_bias": bias, "output_bias": bias, "pre_norm": False, "post_norm": True, "qk_norm": "all", "wide_norm": True}


BEHIND = {"post_self_attn_norm": "post_attention_layernorm", "post_mlp_norm": "post_feedforward_layernorm"}
"""Where norms behind attention and MLP lie."""
_NO_WEIGHTS = {stem: Stored("", (ones,)) for stem in ("model.norm", "input_layernorm", "post_attention_layernorm")}
OLMO, OLMO2, OLMO3 = Family(read_olmo, Names(_NO_WEIGHTS)), Family(read_olmo2, Names(BEHIND)), Family(read_olmo3, Names(BEHIND))
