"""adapter_config.json as PEFT writes it: which maps an adapter changes, with which rank and scale.

What is not computed is refused by name, and so is a key that says something and is not read here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pdmesh.adapter_id import ADAPTER_FILES, MAX_RANK

CONFIG_FILE = ADAPTER_FILES[0]
_NEUTRAL = frozenset({
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "fan_in_fan_out", "inference_mode", "lora_dropout",
    "lora_ga_config", "megatron_core", "monteclora_config", "peft_type", "peft_version", "qalora_group_size", "revision",
    "runtime_config", "task_type", "ensure_weight_tying", "loftq_config", "velora_config",
})  # fmt: skip
"""Keys of training, of where the file comes from, or of methods that other keys switch on."""

_REFUSED: dict[str, tuple[object, str]] = {
    "use_dora": (False, "DoRA's magnitudes are not computed; merge the adapter into the model"),
    "lora_bias": (False, "a bias of B is not computed; merge the adapter into the model"),
    "use_qalora": (False, "QALoRA's pooled inputs are not computed; merge the adapter into the model"),
    "use_bdlora": (None, "block-diagonal LoRA is not computed; merge the adapter into the model"),
    "kasa_config": (None, "KaSA's singular values are not computed; merge the adapter into the model"),
    "arrow_config": (None, "routing between adapters is not computed; merge the adapter into the model"),
    "alora_invocation_tokens": (None, "activated LoRA is not computed; train without it"),
    "layer_replication": (None, "it changes the model's layers; merge the adapter into the model"),
    "megatron_config": (None, "Megatron's layers are not read; save the adapter for transformers"),
    "modules_to_save": (None, "whole modules are not exchanged; merge the adapter into the model"),
    "trainable_token_indices": (None, "trained embeddings are not exchanged; merge the adapter into the model"),
    "target_parameters": (None, "parameters that are no linear maps are not adapted; merge the adapter into the model"),
}  # fmt: skip
"""What each key must be, where it is there, and why."""

_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class LoraConfig:
    """Hold what an adapter's weights mean. Patterns are PEFT's: the end of a module's path, by regular expression."""

    rank: int
    alpha: float
    is_rank_stabilized: bool  # scaled by alpha / sqrt(rank) (Kalajdzievski, 2023), not alpha / rank
    targets: str | tuple[str, ...]  # a regular expression of whole paths, "all-linear", or ends of paths
    excluded: str | tuple[str, ...] = ()
    layers: frozenset[int] | None = None  # None: all
    layers_patterns: tuple[str, ...] = ()
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's A and B."""
        return int(_by_pattern(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Return the factor of B A."""
        rank = self.rank_of(module)
        return _by_pattern(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.is_rank_stabilized else rank)

    def is_target(self, module: str) -> bool:
        """Return whether the adapter has weights for the linear map at this path, by PEFT's rules."""
        if _matches(self.excluded, module):
            return False
        if isinstance(self.targets, str):
            return self.targets.lower() == "all-linear" or re.fullmatch(self.targets, module) is not None
        return _matches(self.targets, module) and (self.layers is None or self._layer_of(module) in self.layers)

    def _layer_of(self, module: str) -> int | None:
        patterns = self.layers_patterns or (r"[^.]*",)
        found = (re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", module) for pattern in patterns)
        return next((int(match[1]) for match in found if match), None)


def read_lora_config(folder: Path) -> LoraConfig:
    """Read adapter_config.json. Raises ValueError that names file and key."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{folder}: no {CONFIG_FILE}; give the folder that PEFT's save_pretrained wrote")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
        return lora_config(content)
    except (ValueError, re.error) as error:
        raise ValueError(f"{path}: {error}") from error


def lora_config(content: Mapping[str, object]) -> LoraConfig:
    """Read the content of adapter_config.json. Raises ValueError that names the key."""
    _check_kind(content)
    layers = content.get("layers_to_transform")
    config = LoraConfig(
        rank=_rank("r", content.get("r", 8)),
        alpha=_number("lora_alpha", content.get("lora_alpha", 8)),
        is_rank_stabilized=_flag("use_rslora", content.get("use_rslora")),
        targets=_paths("target_modules", content.get("target_modules")),
        excluded=_paths("exclude_modules", content.get("exclude_modules") or ()),
        layers=None if layers in (None, []) else frozenset(_layers(layers)),
        layers_patterns=_several("layers_pattern", content.get("layers_pattern") or ()),
        ranks={key: _rank(f"rank_pattern[{key!r}]", value) for key, value in _mapping(content, "rank_pattern").items()},
        alphas={key: _number(f"alpha_pattern[{key!r}]", value) for key, value in _mapping(content, "alpha_pattern").items()},
    )
    for pattern in (*config.ranks, *config.alphas, *(p for p in (config.targets, config.excluded) if isinstance(p, str))):
        re.compile(pattern)
    if not config.targets:
        raise ValueError("target_modules: empty; an adapter changes at least one map")
    return config


_READ = frozenset({
    "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern",
    "alpha_pattern", "bias", "init_lora_weights",
})  # fmt: skip


def _check_kind(content: Mapping[str, object]) -> None:
    kind = content.get("peft_type", "LORA")
    if kind != "LORA":
        raise ValueError(f"peft_type: {kind!r} is not supported; only LORA is")
    for key, (allowed, why) in _REFUSED.items():
        value = content.get(key)
        if value not in (None, allowed, [], {}):
            raise ValueError(f"{key}: {value!r} is not supported: {why}")
    if content.get("bias", "none") != "none":
        raise ValueError(f"bias: {content['bias']!r} is not supported: trained biases are not exchanged; merge the adapter")
    init = str(content.get("init_lora_weights", True)).lower()
    if init.startswith(_CHANGES_BASE):
        raise ValueError(
            f"init_lora_weights: {init!r} also changes the base model's weights; convert the adapter when it is saved "
            "(PEFT: path_initial_model_for_weight_conversion), or merge it into the model"
        )
    unread = [
        k for k, value in content.items() if k not in _READ | _NEUTRAL | _REFUSED.keys() and value not in (None, False, [], {})
    ]
    if unread:
        raise ValueError(
            f"{', '.join(unread)}: not known here, so the adapter might be computed wrongly; remove what changes nothing"
        )


def _by_pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    """Return the value of the first pattern that the end of the path matches (PEFT's get_pattern_key)."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _matches(paths: str | Sequence[str], module: str) -> bool:
    if isinstance(paths, str):
        return re.fullmatch(paths, module) is not None
    return any(module == path or module.endswith(f".{path}") for path in paths)


def _rank(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_RANK:
        raise ValueError(f"{key}: {value!r} is not a rank from 1 to {MAX_RANK}")
    return value


def _flag(name: str, value: object) -> bool:
    if value not in (None, True, False):  # the text "False" would count as true
        raise ValueError(f"{name}: {value!r} is neither true nor false")
    return bool(value)


def _number(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{key}: {value!r} is not a number")
    return float(value)


def _mapping(content: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = content.get(key) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{key}: {value!r} is not a mapping from patterns to numbers")
    return value


def _paths(key: str, value: object) -> str | tuple[str, ...]:
    return value if isinstance(value, str) else _several(key, value)


def _several(key: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{key}: {value!r} is neither a text nor a list of texts")
    return tuple(value)


def _layers(value: object) -> list[int]:
    numbers = [n for n in (value if isinstance(value, list) else [value]) if isinstance(n, int) and not isinstance(n, bool)]
    if value != numbers and [value] != numbers:
        raise ValueError(f"layers_to_transform: {value!r} is neither a layer's number nor a list of them")
    return numbers
