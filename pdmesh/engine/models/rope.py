"""The rotary embedding of a checkpoint, as config.json describes it. Sources of the scalings: pdmesh/engine/models/layers.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdmesh.engine.models.reader import ConfigReader, is_number

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
_NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("long_factor", "short_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


@dataclass(frozen=True)
class RopeConfig:
    """Describe one rotary embedding. Fields of scalings that are not in use keep their neutral values."""

    rope_type: str
    theta: float
    rotary_dim: int  # leading dimensions of a head that are rotated; the others pass unchanged
    max_context: int  # the model's max_position_embeddings
    original_max_context: int  # the context before scaling (yarn, longrope, llama3)
    factor: float = 1.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    long_factor: tuple[float, ...] = ()  # a divisor for each frequency, beyond the original context (longrope)
    short_factor: tuple[float, ...] = ()  # and within it
    long_mscale: float | None = None  # factors on cosines and sines where they are given (Phi 3.5 MoE)
    short_mscale: float | None = None

    @classmethod
    def from_dict(
        cls,
        config: Mapping[str, object],
        *,
        head_dim: int,
        max_context: int,
        params: ConfigReader | None = None,
        theta: float = 10000.0,
        partial: float = 1.0,
    ) -> RopeConfig:
        """Read the content of config.json in either layout, or `params`, one set of several. `theta`, `partial`: what the family
        takes where nothing is said. Raises ValueError naming what is missing or not supported."""
        reader = config if isinstance(config, ConfigReader) else ConfigReader(config)
        if params is None:
            params = rope_parameters(reader) or ConfigReader({})
        rope_type = str(params.get("rope_type") or params.get("type") or "default")
        params.ignore("rope_type", "type")
        if rope_type in ("su", "longrope"):
            rope_type = "longrope"
        if rope_type not in ROPE_TYPES:
            raise ValueError(f"rope_type {rope_type!r} is not supported; this engine computes {', '.join(ROPE_TYPES)}")
        for key in _NEEDED.get(rope_type, ()):
            if params.get(key) is None:
                raise ValueError(f"rope parameters of type {rope_type!r} lack {key!r}")
        if rope_type == "default":
            _refuse_scaling(params)
        originals = (section.optional_count("original_max_position_embeddings") for section in (reader, params))
        original_context = next(filter(None, originals), max_context)
        params.ignore("original_max_position_embeddings")
        part = _number(params, "partial_rotary_factor", _number(reader, "partial_rotary_factor", partial))
        if not 0 <= part <= 1:
            raise ValueError(f"rope parameter partial_rotary_factor is {part}; it must be from 0 to 1")
        rotary_dim = int(head_dim * part)
        stretch = max_context / original_context if rope_type == "longrope" else 1.0
        return cls(
            rope_type=rope_type,
            theta=_above_zero(params, "rope_theta", _above_zero(reader, "rope_theta", theta)),
            rotary_dim=rotary_dim,
            max_context=max_context,
            original_max_context=original_context,
            factor=_above_zero(params, "factor", stretch),
            attention_factor=params.optional_number("attention_factor"),
            beta_fast=params.optional_number("beta_fast") or 32.0,
            beta_slow=params.optional_number("beta_slow") or 1.0,
            mscale=params.optional_number("mscale"),
            mscale_all_dim=params.optional_number("mscale_all_dim"),
            truncate=params.flag("truncate", True),
            low_freq_factor=_number(params, "low_freq_factor", 1.0),
            high_freq_factor=_number(params, "high_freq_factor", 1.0),
            long_factor=_factors(params, "long_factor", rotary_dim // 2),
            short_factor=_factors(params, "short_factor", rotary_dim // 2),
            long_mscale=params.optional_number("long_mscale"),
            short_mscale=params.optional_number("short_mscale"),
        )

    def is_long(self, max_context: int) -> bool:
        """Return whether a table of so many positions has LongRoPE's long divisors: it then has them at every position."""
        return self.rope_type == "longrope" and max_context > self.original_max_context

    @property
    def context(self) -> int:
        """Return the context that the scaling gives: model cards name a factor beside the context before scaling."""
        scaled = int(self.factor * self.original_max_context) if self.rope_type == "yarn" else 0
        return max(self.max_context, scaled)


def rope_parameters(config: ConfigReader) -> ConfigReader | None:
    """Return `rope_parameters` (transformers 5) or `rope_scaling` (earlier, and what model cards say), None without either. Of
    both the latter counts, as in transformers, beside what only the former says.

    Raises ValueError for a set per kind of layer, which only families that have several ropes read."""
    params = config.joined_section("rope_parameters", "rope_scaling")
    config.ignore("rope_parameters", "rope_scaling")
    nested = [] if params is None else params.sections()
    if nested:
        raise ValueError(f"rope parameters per kind of layer ({', '.join(nested)}) are not supported")
    return params


def ropes_by_kind(config: ConfigReader, **shape: int) -> dict[str, RopeConfig]:
    """Return `rope` and `local_rope` of rope parameters per kind of layer; empty where there is one set for all. `shape`: see
    `RopeConfig.from_dict`."""
    params = config.section("rope_parameters")
    if params is None or not params.sections():
        return {}
    config.ignore("rope_parameters")
    kinds = {"rope": "full_attention", "local_rope": "sliding_attention"}
    own = {name: params.section(kind) for name, kind in kinds.items()}
    return {name: RopeConfig.from_dict({}, params=each, **shape) for name, each in own.items() if each is not None}


def _refuse_scaling(params: ConfigReader) -> None:
    """Raise ValueError for a factor that scales nothing: of rope_type 'default', also where no type is said."""
    if (factor := params.get("factor")) not in (None, 1):
        raise ValueError(
            f"{params.name('factor')} {factor!r} scales nothing, because rope_type is 'default' or not there; give rope_type "
            f"too, one of {', '.join(_NEEDED)}, or take the factor away"
        )


def _above_zero(params: ConfigReader, key: str, default: float) -> float:
    value = _number(params, key, default)
    if value <= 0:
        raise ValueError(f"rope parameter {key} is {value}; it must be above 0")
    return value


def _number(params: ConfigReader, key: str, default: float) -> float:
    if params.get(key) is None:
        return default
    value = params[key]
    if not is_number(value):
        raise ValueError(f"rope parameter {key} is {value!r}, not a number")
    return float(value)


def _factors(params: ConfigReader, key: str, count: int) -> tuple[float, ...]:
    value = params.get(key)
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)) or not all(map(is_number, value)):
        raise ValueError(f"rope parameter {key} is {value!r}, not a list of numbers")
    if len(value) != count:
        raise ValueError(f"rope parameter {key} has {len(value)} entries for {count} frequencies")
    return tuple(float(item) for item in value)
