"""LoRA adapters as PEFT saves them, random, and the model that each of them makes of its base: W + scale * B A."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_CONFIG: dict[str, Any] = {
    "alpha_pattern": {}, "auto_mapping": None, "base_model_name_or_path": "tiny", "bias": "none", "fan_in_fan_out": False,
    "inference_mode": True, "init_lora_weights": True, "layers_pattern": None, "layers_to_transform": None, "loftq_config": {},
    "lora_alpha": 16, "lora_dropout": 0.1, "megatron_config": None, "megatron_core": "megatron.core", "modules_to_save": None,
    "peft_type": "LORA", "r": 8, "rank_pattern": {}, "revision": None, "task_type": "CAUSAL_LM", "use_dora": False,
    "use_rslora": False,
}  # fmt: skip


def linear_modules(model: Any) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of all linear maps of a transformers model but its head, by path."""
    shapes = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        if (isinstance(module, torch.nn.Linear) or kind == "Conv1D") and "lm_head" not in name and "embed_out" not in name:
            shape = tuple(module.weight.shape)
            shapes[name] = (shape[1], shape[0]) if kind == "Conv1D" else (shape[0], shape[1])
    return shapes


def make_adapter(
    folder: Path, model: Any, targets: Sequence[str] | str, *, seed: int = 1, size: float = 0.2, **config: Any
) -> Path:
    """Write a random adapter of the maps whose paths end with one of `targets` (a text: match it) to `folder`; return it."""
    content = {**_CONFIG, "target_modules": targets if isinstance(targets, str) else list(targets), **config}
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, (outputs, inputs) in linear_modules(model).items():
        if _is_target(targets, name) and _is_in(config.get("layers_to_transform"), name):
            rank = _by_pattern(content["rank_pattern"], name, content["r"])
            prefix = f"base_model.model.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * size
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * size
    write_adapter(folder, content, tensors)
    return folder


def write_adapter(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")


def changed(folder: Path, target: Path, tensors: dict[str, Tensor | None] | None = None, **config: Any) -> Path:
    """Write a copy of an adapter with other fields and tensors (None: without it); return it."""
    content = json.loads((folder / "adapter_config.json").read_text()) | config
    both = {**load_file(folder / "adapter_model.safetensors"), **(tensors or {})}
    write_adapter(target, content, {name: tensor for name, tensor in both.items() if tensor is not None})
    return target


def merge(model: Any, folder: Path) -> Any:
    """Add an adapter to the weights of a transformers model, as PEFT's merge_and_unload does; return the model."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    modules = dict(model.named_modules())
    for name, a in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        rank = _by_pattern(config["rank_pattern"], path, config["r"])
        alpha = _by_pattern(config["alpha_pattern"], path, config["lora_alpha"])
        delta = tensors[name.replace("lora_A", "lora_B")] @ a * (alpha / (math.sqrt(rank) if config["use_rslora"] else rank))
        weight = modules[path].weight
        with torch.no_grad():
            weight.add_(delta.t() if type(modules[path]).__name__ == "Conv1D" else delta)
    return model


def _is_target(targets: Sequence[str] | str, name: str) -> bool:
    if isinstance(targets, str):
        return targets == "all-linear" or re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _is_in(layers: Any, name: str) -> bool:
    found = re.search(r"\.(\d+)\.", name)
    return layers is None or (found is not None and int(found[1]) in layers)


def _by_pattern(patterns: dict[str, Any], name: str, default: Any) -> Any:
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), default)
