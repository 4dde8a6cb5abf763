"""A Hugging Face folder: config.json and safetensors, in one file or sharded. Files are mapped, not read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdmesh.engine.loader.quantize import Int4Weight
from pdmesh.engine.models.config import ModelConfig, token_ids
from pdmesh.engine.models.reader import UnsupportedModel
from pdmesh.engine.models.registry import family_of, model_config
from pdmesh.overrides import overridden

# The source of weights: Hugging Face names to tensors, whatever the file format


class WeightSource(Protocol):
    """An opened checkpoint. Tensors may share memory with the file's mapping: they are read, never written."""

    config: ModelConfig

    def names(self) -> frozenset[str]: ...

    def get(self, name: str) -> Tensor:
        """Return the tensor, in the checkpoint's dtype. Raises MissingTensor naming it and the files."""

    def get_int4(self, name: str, group: int) -> Int4Weight | None:
        """Return the tensor as it is in the file, where that is 4 bits in groups of this size: quantizing what `get` gives would
        round a second time. None otherwise. Raises MissingTensor like `get`."""

    def num_elements(self) -> int:
        """Return the number of weights in all tensors, from the headers alone."""


class MissingTensor(ValueError):
    """The checkpoint lacks a tensor that the model needs."""


T = TypeVar("T")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class SafetensorsSource:
    """Read safetensors, see WeightSource. Opening reads config.json and the headers only."""

    def __init__(self, folder: Path, overrides: Sequence[str] = ()) -> None:
        """Open it. `overrides`: of keys of config.json. Raises ValueError."""
        self.folder = folder
        self.config = read_config(folder, overrides)
        self._names = family_of(self.config.model_type).names_for(self.config)
        self._file_of = {name: file for path in weight_files(folder) for file, name in _tensors_of(path)}
        self._taken: set[str] = set()

    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def get(self, name: str) -> Tensor:
        take = self._names.find(name, self.config)
        if not take.name:
            tensor = torch.empty(0)
        elif take.name in self._file_of:
            tensor = self._file_of[take.name].get_tensor(take.name)
            self._taken.add(take.name)
        else:
            raise MissingTensor(f"{self.folder}: no tensor {take.name!r} in its safetensors; the checkpoint is incomplete")
        for change in take.change:
            tensor = change(tensor)
        return tensor

    def unused(self) -> list[str]:
        """Return the stored tensors that nothing asked for and that a family does not ignore."""
        ignored = re.compile(self._names.ignored)
        return sorted(name for name in self._file_of.keys() - self._taken if not ignored.fullmatch(name))

    def get_int4(self, name: str, group: int) -> Int4Weight | None:
        """Return None: safetensors are read in floating dtypes only."""
        return None

    def num_elements(self) -> int:
        return sum(math.prod(file.get_slice(name).get_shape()) for name, file in self._file_of.items())


class _File(Protocol):
    """The part of safetensors' untyped `safe_open` that is used."""

    def keys(self) -> list[str]: ...
    def get_tensor(self, name: str) -> Tensor: ...
    def get_slice(self, name: str) -> _Slice: ...


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...


def _tensors_of(path: Path) -> list[tuple[_File, str]]:
    try:
        file: _File = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read ({error}); it is cut off or no safetensors file, get it again") from error
    return [(file, name) for name in list(file.keys())]


def read_config(folder: Path, overrides: Sequence[str] = ()) -> ModelConfig:
    """Read config.json with `overrides`, and end-of-sequence ids from generation_config.json where it has them, like
    transformers' `generate`."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder}: no config.json; give a Hugging Face model folder or a .gguf file")
    config = _config_of(path, lambda content: model_config(overridden(content, overrides)))
    generation = folder / "generation_config.json"
    if generation.is_file():
        ids = _config_of(generation, lambda content: token_ids(content.get("eos_token_id")))
        return replace(config, eos_token_ids=ids or config.eos_token_ids)
    return config


def _config_of(path: Path, read: Callable[[Mapping[str, object]], T]) -> T:
    """Return what `read` makes of a JSON file. Raises ValueError that names the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
        return read(content)
    except UnsupportedModel:
        raise
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors of a folder, sorted. Raises ValueError when there are none or a shard is missing."""
    index = folder / INDEX
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not index.is_file() and (pickles := sorted(path.name for path in folder.glob("*.bin"))):
        raise ValueError(
            f"{folder}: {pickles[0]} holds pickled weights, which are not read because they may hold code; convert a model that "
            "you trust: python -c "
            "\"from transformers import AutoModelForCausalLM as M; M.from_pretrained('IN').save_pretrained('OUT')\""
        )
    if not index.is_file():
        raise ValueError(f"{folder}: neither {SINGLE} nor {INDEX}; only safetensors and GGUF weights are read")
    files = sorted({folder / name for name in _config_of(index, _weight_map).values()})
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ValueError(f"{folder}: shards are missing: {', '.join(missing)}; download them again")
    return files


def _weight_map(index: Mapping[str, object]) -> dict[str, str]:
    names = index.get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ValueError("it has no weight_map from tensors to files")
    if strange := next((name for name in names.values() if Path(name).name != name), None):
        raise ValueError(f"its weight_map names {strange}, which is no file of this folder; get it again")
    return names


# Tensors of a checkpoint, checked against the shapes of its config


def checked(source: WeightSource, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor in the checkpoint's dtype. Raises ValueError for another shape or numbers that are not finite,
    MissingTensor when there is none."""
    tensor = source.get(name)
    if tensor.shape != shape:
        raise ValueError(f"{name}: shape {tuple(tensor.shape)} in the checkpoint, {shape} by its config.json: not one model")
    require_finite(name, tensor)
    return tensor


def require_finite(name: str, tensor: Tensor) -> None:
    """Raise ValueError for weights with NaN or infinity. The extremes of a tensor take a small part of the time of a copy, and
    NaN is passed on to both."""
    is_plain = tensor.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    if tensor.device.type == "meta" or not tensor.numel() or not is_plain:
        return
    if not all(map(math.isfinite, map(float, tensor.aminmax()))):
        raise ValueError(f"{name}: holds NaN or infinity; the checkpoint is damaged, get it again or convert it anew")
