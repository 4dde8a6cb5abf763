"""Gemma 1, 2 and 3 (text): norms that store their distance from 1, gelu, scaled embeddings; from 2 on norms behind attention and
MLP, windows and softcaps; in 3 norms of query and key heads, and a rotary embedding of their own for layers with a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pdmesh.engine.models.config import Defaults, ModelConfig, activation, decoder, every, layer_windows
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.names import Names, Stored, changed, joined, plus_one
from pdmesh.engine.models.reader import ConfigReader
from pdmesh.engine.models.rope import RopeConfig

_DEFAULTS = Defaults(head_dim=256, tie=True, activation="gelu_pytorch_tanh")


def _decoder(config: ConfigReader, defaults: Defaults = _DEFAULTS, /, **parts: object) -> ModelConfig:
    config.require("use_bidirectional_attention", False)
    bias = config.flag("attention_bias")
    named = config.get("hidden_activation") or config.get("hidden_act")
    config.ignore("hidden_act", "hidden_activation")
    # Checkpoints of Gemma 1 say gelu where tanh's approximation was meant; transformers corrects it likewise.
    name = "gelu_pytorch_tanh" if named in (None, "gelu") else str(named)
    computed = activation(ConfigReader({"hidden_activation": name}), "hidden_activation", name)
    read = decoder(config, defaults, qkv_bias=bias, output_bias=bias, activation=computed, wide_norm=True, **parts)
    return replace(read, embedding_multiplier=read.hidden_size**0.5)


def read_gemma(config: ConfigReader) -> ModelConfig:
    """Read a Gemma 1's config.json."""
    return _decoder(config)


def read_gemma2(config: ConfigReader) -> ModelConfig:
    """Read a Gemma 2's config.json: every second layer has a window, unless `layer_types` says which."""
    return _decoder(config, **_sandwich(config, period=2))


def read_vaultgemma(config: ConfigReader) -> ModelConfig:
    """Read a VaultGemma's config.json: a Gemma 2 without norms behind attention and MLP."""
    return _decoder(config, **{**_sandwich(config, period=2), "post_norm": False})


def read_gemma3(config: ConfigReader) -> ModelConfig:
    """Read a Gemma 3's text config: every sixth layer sees everything, unless `layer_types` says which."""
    period = config.count("sliding_window_pattern", "_sliding_window_pattern", default=6)
    head_dim = config.count("head_dim", default=256)
    max_context = config.count("max_position_embeddings", default=131072)
    ropes = {
        "rope": _rope(config, "full_attention", head_dim, max_context, config.number("rope_theta", default=1e6)),
        "local_rope": _rope(
            config, "sliding_attention", head_dim, max_context, config.number("rope_local_base_freq", default=1e4)
        ),
    }
    config.ignore("rope_scaling", "rope_parameters")
    return _decoder(
        config,
        replace(_DEFAULTS, max_context=131072),
        qk_norm="head",
        **ropes,
        **_sandwich(config, period=period, softcaps=(0, 0)),
    )


def _sandwich(config: ConfigReader, *, period: int, softcaps: Sequence[float] = (50.0, 30.0)) -> dict[str, object]:
    num_layers, window = config.count("num_hidden_layers"), config.count("sliding_window", default=4096)
    windows = layer_windows(config, num_layers, window)
    scalar = config.above_zero("query_pre_attn_scalar", default=256.0)
    caps = [_softcap(config, f"{key}_logit_softcapping", cap) for key, cap in zip(("attn", "final"), softcaps, strict=True)]
    return {
        "post_norm": True,
        "windows": windows or tuple(None if full else window for full in every(num_layers, period)),
        "attention_scale": scalar**-0.5,
        "attention_softcap": caps[0],
        "logits_softcap": caps[1],
    }


def _softcap(config: ConfigReader, key: str, default: float) -> float:
    return (config.optional_number(key) or 0.0) if key in config else default


def _rope(config: ConfigReader, kind: str, head_dim: int, max_context: int, theta: float) -> RopeConfig:
    """Return the rotary embedding of one kind of layer, from either layout; earlier ones scale that of full attention alone."""
    params = config.section("rope_parameters")
    if params is not None and params.sections():
        return RopeConfig.from_dict({}, head_dim=head_dim, max_context=max_context, params=params.section(kind), theta=theta)
    scaling = params if params is not None else config.section("rope_scaling")
    own = scaling if kind == "full_attention" else ConfigReader({})
    return RopeConfig.from_dict({}, head_dim=head_dim, max_context=max_context, params=own or ConfigReader({}), theta=theta)


_NORMS = ["model.norm", "input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"]
_SANDWICH: dict[str, str | Stored] = {
    "post_attention_layernorm": Stored("pre_feedforward_layernorm", (plus_one,)),
    "post_self_attn_norm": Stored("post_attention_layernorm", (plus_one,)),
    "post_mlp_norm": Stored("post_feedforward_layernorm", (plus_one,)),
}
_BEFORE = {"post_attention_layernorm": _SANDWICH["post_attention_layernorm"]}
VAULTGEMMA = Family(read_vaultgemma, Names(joined(changed(plus_one, _NORMS), _BEFORE)))
GEMMA = Family(read_gemma, Names(changed(plus_one, _NORMS)))
GEMMA2 = Family(read_gemma2, Names(joined(changed(plus_one, _NORMS), _SANDWICH)))
GEMMA3 = Family(read_gemma3, Names(joined(changed(plus_one, _NORMS), _SANDWICH)))
