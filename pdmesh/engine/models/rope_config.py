"""The rotary embedding that a checkpoint asks for. Sources of the scalings: see engine/rope.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
_NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


@dataclass(frozen=True)
class RopeConfig:
    """One rotary embedding. Fields of scalings that are not in use keep their neutral values."""

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
        """From the content of config.json in either layout. Raises ValueError naming what is missing or not supported."""
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
    """`rope_parameters` (transformers 5) or `rope_scaling` (earlier). One set per kind of layer is not supported."""
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
