"""A Hugging Face folder: config.json and safetensors, in one file or sharded. Files are mapped, not read."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from safetensors import safe_open
from torch import Tensor

from engine.model_config import ModelConfig, token_ids
from engine.weights.source import MissingTensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class SafetensorsSource:
    """See WeightSource. Opening reads config.json and the headers only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = read_config(folder)
        self._file_of = {name: file for path in weight_files(folder) for file, name in _tensors_of(path)}

    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def get(self, name: str) -> Tensor:
        if name not in self._file_of:
            raise MissingTensor(f"{self.folder}: no tensor {name!r} in its safetensors; the checkpoint is incomplete")
        return self._file_of[name].get_tensor(name)

    def num_elements(self) -> int:
        return sum(math.prod(file.get_slice(name).get_shape()) for name, file in self._file_of.items())


class _File(Protocol):
    """What safetensors' untyped `safe_open` gives."""

    def keys(self) -> list[str]: ...
    def get_tensor(self, name: str) -> Tensor: ...
    def get_slice(self, name: str) -> _Slice: ...


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...


def _tensors_of(path: Path) -> list[tuple[_File, str]]:
    file: _File = safe_open(path, framework="pt")
    return [(file, name) for name in list(file.keys())]


def read_config(folder: Path) -> ModelConfig:
    """config.json; end-of-sequence ids from generation_config.json where it names them, as transformers' `generate` does."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder}: no config.json; give a Hugging Face model folder or a .gguf file")
    config = ModelConfig.from_dict(json.loads(path.read_text()))
    generation = folder / "generation_config.json"
    if generation.is_file():
        ids = token_ids(json.loads(generation.read_text()).get("eos_token_id"))
        return replace(config, eos_token_ids=ids or config.eos_token_ids)
    return config


def weight_files(folder: Path) -> list[Path]:
    """The safetensors of a folder, sorted. Raises ValueError when there are none or a shard is missing."""
    index = folder / INDEX
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not index.is_file():
        raise ValueError(f"{folder}: neither {SINGLE} nor {INDEX}; only safetensors and GGUF weights are read")
    files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ValueError(f"{folder}: shards are missing: {', '.join(missing)}; download them again")
    return files
