"""A student: the teacher's architecture with a few of its layers, made and trained with transformers."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch

_COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja")
_LAYER = re.compile(r"(.*\.(?:layers|h))\.(\d+)\.(.*)")


def picked_layers(num_layers: int, count: int) -> list[int]:
    """Return `count` layers spread evenly over the teacher's, the first and the last among them. Raises ValueError for a count
    that makes no smaller model."""
    if not 1 <= count < num_layers:
        raise ValueError(f"layers: {count} of the model's {num_layers}; give 1 to {num_layers - 1}")
    if count == 1:
        return [0]
    return [round(number * (num_layers - 1) / (count - 1)) for number in range(count)]


def make_student(model: Path, count: int) -> Any:
    """Return a transformers model of `count` layers of the one in the folder `model`, with their weights, in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    layers = picked_layers(config.num_hidden_layers, count)
    teacher = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    student = AutoModelForCausalLM.from_config(_shortened(config, layers), dtype=torch.float32)
    places = {layer: number for number, layer in enumerate(layers)}
    student.load_state_dict(_renumbered(teacher.state_dict(), places))
    return student


def _shortened(config: Any, layers: list[int]) -> Any:
    """Return the config of these layers alone: lists with an entry for each layer keep those of the layers."""
    content = config.to_dict()
    total = content["num_hidden_layers"]
    for key, value in content.items():
        if isinstance(value, list) and len(value) == total and key != "architectures":
            content[key] = [value[layer] for layer in layers]
    return type(config).from_dict({**content, "num_hidden_layers": len(layers)})


def _renumbered(state: dict[str, torch.Tensor], places: dict[int, int]) -> dict[str, torch.Tensor]:
    kept = {}
    for name, tensor in state.items():
        found = _LAYER.fullmatch(name)
        if found is None:
            kept[name] = tensor
        elif int(found[2]) in places:
            kept[f"{found[1]}.{places[int(found[2])]}.{found[3]}"] = tensor
    return kept


def save_student(student: Any, teacher: Path, folder: Path) -> None:
    """Write an ordinary model folder with the teacher's tokenizer; weights in bfloat16, which a draft needs no more than."""
    folder.mkdir(parents=True, exist_ok=True)
    student.to(torch.bfloat16).save_pretrained(folder)
    for name in _COPIED:
        if (teacher / name).is_file():
            shutil.copyfile(teacher / name, folder / name)
    path = folder / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["torch_dtype"] = "bfloat16"
    content.pop("dtype", None)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
