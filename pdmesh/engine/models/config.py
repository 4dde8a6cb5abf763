"""The config.json of a Llama-family decoder, in one vocabulary.

It reads both layouts of transformers: version 5 (`rope_parameters`, `dtype`) and earlier (`rope_scaling`, `rope_theta`,
`torch_dtype`). What this engine cannot compute is rejected by name, so that a model never runs slightly wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# The rotary embedding of a checkpoint. Sources of the scalings: see pdmesh/engine/models/layers.py.


ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
_NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


@dataclass(frozen=True)
class RopeConfig:
    """Describe one rotary embedding. Fields of scalings that are not in use keep their neutral values."""

    rope_type: str
    theta: float
    rotary_dim: int  # leading dimensions of a head that are rotated; the others pass unchanged
    max_context: int  # the model's max_position_embeddings
    original_max_context: int  # the context before scaling (yarn, llama3)
    factor: float = 1.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0

    @classmethod
    def from_dict(cls, config: Mapping[str, object], *, head_dim: int, max_context: int) -> RopeConfig:
        """Read the content of config.json in either layout. Raises ValueError naming what is missing or not supported."""
        params = _parameters(config)
        rope_type = str(params.get("rope_type") or params.get("type") or "default")
        if rope_type not in ROPE_TYPES:
            raise ValueError(f"rope_type {rope_type!r} is not supported; this engine computes {', '.join(ROPE_TYPES)}")
        for key in _NEEDED.get(rope_type, ()):
            if params.get(key) is None:
                raise ValueError(f"rope parameters of type {rope_type!r} lack {key!r}")
        partial = _rope_number(params, "partial_rotary_factor", _rope_number(config, "partial_rotary_factor", 1.0))
        original = config.get("original_max_position_embeddings") or params.get("original_max_position_embeddings")
        return cls(
            rope_type=rope_type,
            theta=_rope_number(params, "rope_theta", _rope_number(config, "rope_theta", 10000.0)),
            rotary_dim=int(head_dim * partial),
            max_context=max_context,
            original_max_context=int(float(str(original))) if original else max_context,
            factor=_rope_number(params, "factor", 1.0),
            attention_factor=_optional(params, "attention_factor"),
            beta_fast=_optional(params, "beta_fast") or 32.0,
            beta_slow=_optional(params, "beta_slow") or 1.0,
            mscale=_optional(params, "mscale"),
            mscale_all_dim=_optional(params, "mscale_all_dim"),
            truncate=bool(params.get("truncate", True)),
            low_freq_factor=_rope_number(params, "low_freq_factor", 1.0),
            high_freq_factor=_rope_number(params, "high_freq_factor", 1.0),
        )


def _parameters(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return `rope_parameters` (transformers 5) or `rope_scaling` (earlier). One set per kind of layer is not supported."""
    params = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(params, Mapping):
        raise ValueError(f"rope parameters are {params!r}, not a mapping")
    nested = [key for key, value in params.items() if isinstance(value, Mapping)]
    if nested:
        raise ValueError(f"rope parameters per kind of layer ({', '.join(nested)}) are not supported")
    return params


def _optional(params: Mapping[str, object], key: str) -> float | None:
    return None if params.get(key) is None else _rope_number(params, key, 0.0)


def _rope_number(params: Mapping[str, object], key: str, default: float) -> float:
    value = params.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"rope parameter {key} is {value!r}, not a number")
    return float(value)


MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


class UnsupportedModel(ValueError):
    """A checkpoint needs something that this engine does not compute; the message names it."""


@dataclass(frozen=True)
class ModelConfig:
    """Hold shapes and switches of one decoder. `windows[i]` is layer i's sliding window in tokens, None for full attention."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    rope: RopeConfig
    eos_token_ids: frozenset[int]
    dtype: str | None  # the checkpoint's, such as "bfloat16"; None when it does not say

    @classmethod
    def from_dict(cls, config: Mapping[str, object]) -> ModelConfig:
        """Read the content of config.json. Raises UnsupportedModel or ValueError, naming the key."""
        model_type = str(config.get("model_type", ""))
        _check_supported(model_type, config)
        num_heads = _integer(config, "num_attention_heads")
        hidden_size = _integer(config, "hidden_size")
        head_dim = _optional_integer(config, "head_dim") or (128 if model_type == "qwen3" else hidden_size // num_heads)
        num_kv_heads = _optional_integer(config, "num_key_value_heads") or num_heads
        if num_heads % num_kv_heads:
            raise ValueError(f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
        num_layers = _integer(config, "num_hidden_layers")
        max_context = _integer(config, "max_position_embeddings")
        has_bias = bool(config.get("attention_bias")) and model_type in ("llama", "qwen3")
        return cls(
            model_type=model_type,
            vocab_size=_integer(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_integer(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_context=max_context,
            rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=has_bias or model_type == "qwen2",
            output_bias=has_bias,
            mlp_bias=model_type == "llama" and bool(config.get("mlp_bias")),
            qk_norm=model_type == "qwen3",
            windows=_windows(model_type, config, num_layers),
            rope=RopeConfig.from_dict(config, head_dim=head_dim, max_context=max_context),
            eos_token_ids=token_ids(config.get("eos_token_id")),
            dtype=_dtype(config),
        )

    @property
    def num_groups(self) -> int:
        """Return the query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def layer_weights(self) -> int:
        """Return the weights that each token is multiplied with in a layer."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size


def token_ids(value: object) -> frozenset[int]:
    """Return the ids of a config's `eos_token_id`: absent, one id or a list of ids."""
    if value is None:
        return frozenset()
    ids = value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
        raise ValueError(f"eos_token_id is {value!r}, not a token id or a list of them")
    return frozenset(ids)


def _check_supported(model_type: str, config: Mapping[str, object]) -> None:
    if model_type not in MODEL_TYPES:
        raise UnsupportedModel(f"model_type {model_type!r} is not supported; this engine runs {', '.join(MODEL_TYPES)}")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"hidden_act {activation!r} is not supported; this engine computes silu")
    if config.get("quantization_config") and not _is_about_kv_alone(config["quantization_config"]):
        raise UnsupportedModel("quantization_config: quantized safetensors are not supported; give plain weights or a GGUF")


def _is_about_kv_alone(quantization: object) -> bool:
    """Return whether weights are plain, and compressed-tensors only added scales for KV in fp8
    (pdmesh/engine/loader/kv_scales.py)."""
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") != "compressed-tensors":
        return False
    scheme, groups = quantization.get("kv_cache_scheme"), quantization.get("config_groups", {})
    if groups != {} or not isinstance(scheme, Mapping):
        return False
    expected = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    return all(scheme.get(name, value) == value for name, value in expected.items())


def _windows(model_type: str, config: Mapping[str, object], num_layers: int) -> tuple[int | None, ...]:
    """Return each layer's sliding window, by the rules of transformers' configuration classes."""
    if model_type == "llama":
        return (None,) * num_layers
    window = _optional_integer(config, "sliding_window") if "sliding_window" in config else 4096
    if model_type == "mistral":
        return (window,) * num_layers
    if not config.get("use_sliding_window", False):
        window = None
    kinds = config.get("layer_types")
    if isinstance(kinds, (list, tuple)):
        if len(kinds) < num_layers:
            raise ValueError(f"layer_types: {len(kinds)} entries for {num_layers} layers")
        return tuple(_window_of(str(kind), window) for kind in kinds[:num_layers])
    first = _optional_integer(config, "max_window_layers")
    first = 28 if first is None else first
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _window_of(kind: str, window: int | None) -> int | None:
    if kind not in ("full_attention", "sliding_attention"):
        raise UnsupportedModel(f"layer_types: {kind!r} is not supported; layers are full_attention or sliding_attention")
    return window if kind == "sliding_attention" else None


def _dtype(config: Mapping[str, object]) -> str | None:
    value = config.get("dtype") or config.get("torch_dtype")
    return None if value is None else str(value).removeprefix("torch.")


def _integer(config: Mapping[str, object], key: str) -> int:
    value = _optional_integer(config, key)
    if not value:
        raise ValueError(f"config.json has no {key!r}, or it is 0; it is needed to build the model")
    return value


def _optional_integer(config: Mapping[str, object], key: str) -> int | None:
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or value < 0:
        raise ValueError(f"config.json: {key} is {value!r}, not a count")
    return int(value)


def _number(config: Mapping[str, object], key: str, default: float) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"config.json: {key} is {value!r}, not a number")
    return float(value)
