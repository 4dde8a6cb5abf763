"""A Hugging Face folder: config.json and safetensors, in one file or sharded. Files are mapped, not read."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdmesh.engine.loader.quantize import Int4Weight, Int8Weight
from pdmesh.engine.loader.quantized.format import FLOATS, Header, WeightFormat
from pdmesh.engine.loader.quantized.registry import weight_format, with_side_file
from pdmesh.engine.loader.quantized.weights import QuantizedWeights
from pdmesh.engine.models.config import ModelConfig, token_ids
from pdmesh.engine.models.names import Names
from pdmesh.engine.models.reader import UnsupportedModel
from pdmesh.engine.models.registry import family_of, model_config
from pdmesh.overrides import overridden

# The source of weights: Hugging Face names to tensors, whatever the file format


class WeightSource(Protocol):
    """An opened checkpoint. Tensors may share memory with the file's mapping: they are read, never written."""

    config: ModelConfig

    def names(self) -> frozenset[str]:
        """Return the stored names, which the family's or the file format's own are."""

    def get(self, name: str) -> Tensor:
        """Return the tensor, in the checkpoint's dtype. Raises MissingTensor naming it and the files."""

    def get_int4(self, name: str, group: int) -> Int4Weight | None:
        """Return the tensor as it is in the file, where that is 4 bits in groups of this size: quantizing what `get` gives would
        round a second time. None otherwise. Raises MissingTensor like `get`."""

    def get_int8(self, name: str) -> Int8Weight | None:
        """Return the tensor as it is in the file, where that is 8 bits with a scale for each output, or None, like `get_int4`."""

    def num_elements(self) -> int:
        """Return the number of weights in all tensors, from the headers alone."""


class MissingTensor(ValueError):
    """The checkpoint lacks a tensor that the model needs."""


logger = logging.getLogger(__name__)

T = TypeVar("T")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CANONICAL = {"pdmesh_names": "canonical"}
"""Metadata of a file whose tensors have canonical names, whatever those of its family are: what pdmesh converts."""
_PICKLES = (".bin", ".pt", ".pth")
_NAMED = 5  # of tensors that nothing uses
_QUANTIZED = (".qweight", ".weight_packed", "_proj_blocks", ".weight.absmax")  # endings that plain checkpoints do not have


class SafetensorsSource:
    """Read safetensors, see WeightSource. Opening reads config.json and the headers only, and refuses by these what cannot be
    read: weights in a dtype that is not their format's."""

    def __init__(self, folder: Path, overrides: Sequence[str] = ()) -> None:
        """Open it. `overrides`: of keys of config.json. Raises ValueError."""
        self.folder = folder
        self.config = read_config(folder, overrides)
        self._names = stored_names(folder, self.config)
        self._stored = StoredTensors(folder)
        form = _config_of(folder / "config.json", lambda content: weight_format(_content(folder, content, overrides)))
        self.quantized = QuantizedWeights(form, self._stored) if form else None
        _check_stored(folder, self._stored, form)

    def names(self) -> frozenset[str]:
        return self._stored.names()

    def get(self, name: str) -> Tensor:
        take = self._names.find(name, self.config)
        if self.quantized is not None and self.quantized.holds(take.name):
            return self.quantized.get(take)
        return take.read(self._plain)

    def _plain(self, stored: str) -> Tensor:
        tensor = self._stored.tensor(stored)
        if not tensor.is_floating_point() or tensor.itemsize == 1:
            raise UnsupportedModel(f"{self.folder}: {_as_stored(stored, self._stored)}, and nothing says what it stands for")
        return tensor

    def unused(self) -> list[str]:
        """Return the stored tensors that nothing asked for and that neither the family nor the weights' format ignores."""
        ignored = [self._names.ignored, *([self.quantized.format.ignored] if self.quantized else [])]
        pattern, form = re.compile("|".join(f"(?:{each})" for each in ignored)), self.quantized
        names = [name for name in self._stored.unused() if not pattern.fullmatch(name)]
        return sorted(name for name in names if form is None or not form.is_empty_bias(name))

    def get_int4(self, name: str, group: int) -> Int4Weight | None:
        """Return the codes of a quantized weight that has this grid."""
        take = self._names.find(name, self.config)
        return self.quantized.int4(take, group) if self.quantized is not None and self.quantized.holds(take.name) else None

    def get_int8(self, name: str) -> Int8Weight | None:
        """Return the codes of a quantized weight in 8 bits with a scale for each output."""
        take = self._names.find(name, self.config)
        return self.quantized.int8(take) if self.quantized is not None and self.quantized.holds(take.name) else None

    def num_elements(self) -> int:
        form = self.quantized.format if self.quantized else None
        headers = [(name, header) for name in self._stored.names() if (header := self._stored.header(name)) is not None]
        return sum(form.num_weights(name, header) if form else math.prod(header.shape) for name, header in headers)

    def log_reading(self, form: str, group: int, num_bytes: int) -> None:
        """Log, once a quantized model is loaded into `num_bytes` of the worker's format, what its weights were, and tensors that
        nothing used: of a plain one, its headers have shown them before (headers.py)."""
        if self.quantized is None:
            return
        if text := self.quantized.reading(form, group):
            self.quantized.forget()
            stored = sum(path.stat().st_size for path in weight_files(self.folder))
            logger.info("%s; %.2f GB here, %.2f GB in the files", text, num_bytes / 1e9, stored / 1e9)
        warn_of_names(self.folder, self.unused())


def warn_of_names(folder: Path, unused: Sequence[str]) -> None:
    """Name tensors that nothing used in one line of the log."""
    if unused:
        more = f" and {len(unused) - _NAMED} more" if len(unused) > _NAMED else ""
        logger.warning("%s: tensors that nothing uses: %s%s", folder, ", ".join(unused[:_NAMED]), more)


class StoredTensors:
    """The tensors of a folder's safetensors by their stored names; it remembers which were asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_of = {name: file for path in weight_files(folder) for file, name in _tensors_of(path)}
        self._headers: dict[str, Header] = {}
        self._taken: set[str] = set()

    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def header(self, name: str) -> Header | None:
        """Return dtype and shape, without reading the tensor."""
        if name in self._file_of and name not in self._headers:
            part = self._file_of[name].get_slice(name)
            self._headers[name] = Header(part.get_dtype(), tuple(part.get_shape()))
        return self._headers.get(name)

    def tensor(self, name: str) -> Tensor:
        """Return the tensor. Raises MissingTensor naming it and the folder."""
        if name not in self._file_of:
            raise MissingTensor(f"{self._folder}: no tensor {name!r} in its safetensors; the checkpoint is incomplete")
        self._taken.add(name)
        return self._file_of[name].get_tensor(name)

    def unused(self) -> set[str]:
        """Return the names of tensors that were not asked for."""
        return self._file_of.keys() - self._taken


def _check_stored(folder: Path, stored: StoredTensors, form: WeightFormat | None) -> None:
    """Raise ValueError, naming folder and tensor, unless headers say what config.json says."""
    try:
        if form is not None:
            form.check(stored)
        for name in sorted(stored.names()):
            if form is None or form.ending(name) is None or not form.holds(name.removesuffix(".weight"), stored):
                _check_plain(name, stored, form)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{folder}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def _check_plain(name: str, stored: StoredTensors, form: WeightFormat | None) -> None:
    header = stored.header(name)
    if name.endswith(".weight") and header is not None and header.dtype not in FLOATS:
        says = f"and {form.title} has no weights of this dtype" if form else "but config.json has no quantization_config"
        raise UnsupportedModel(f"{_as_stored(name, stored)}, {says} that says what it stands for; get the whole folder again")
    if form is None and name.endswith(_QUANTIZED):
        raise UnsupportedModel(f"{name}: a part of a quantized weight, but config.json has no quantization_config; get it again")


def _as_stored(name: str, stored: StoredTensors) -> str:
    header = stored.header(name)
    return f"{name} is stored as {header.dtype if header else 'nothing'}"


class _File(Protocol):
    """The part of safetensors' untyped `safe_open` that is used."""

    def keys(self) -> list[str]: ...
    def metadata(self) -> dict[str, str] | None: ...
    def get_tensor(self, name: str) -> Tensor: ...
    def get_slice(self, name: str) -> _Slice: ...


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...


def _tensors_of(path: Path) -> list[tuple[_File, str]]:
    file = _opened(path)
    return [(file, name) for name in list(file.keys())]


def _opened(path: Path) -> _File:
    try:
        file: _File = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read ({error}); it is cut off or no safetensors file, get it again") from error
    return file


def read_config(folder: Path, overrides: Sequence[str] = ()) -> ModelConfig:
    """Read config.json with `overrides`, and end-of-sequence ids from generation_config.json where it has them, like
    transformers' `generate`."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder}: no config.json; give a Hugging Face model folder or a .gguf file")
    config = _config_of(path, lambda content: model_config(_content(folder, content, overrides)))
    generation = folder / "generation_config.json"
    if generation.is_file():
        ids = _config_of(generation, lambda content: token_ids(content.get("eos_token_id")))
        return replace(config, eos_token_ids=ids or config.eos_token_ids)
    return config


def _content(folder: Path, content: Mapping[str, object], overrides: Sequence[str]) -> dict[str, object]:
    """Return what config.json says with the quantization that another file describes, and with the overrides of both."""
    return overridden(with_side_file(folder, content), overrides)


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
    if not index.is_file() and (pickles := sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)):
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


def stored_names(folder: Path, config: ModelConfig) -> Names:
    """Return where a folder's tensors lie: as its family's do, or under canonical names where its file says so."""
    metadata = _opened(weight_files(folder)[0]).metadata() or {}
    return Names() if CANONICAL.items() <= metadata.items() else family_of(config.model_type).names_for(config)


def _weight_map(index: Mapping[str, object]) -> dict[str, str]:
    names = index.get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ValueError("it has no weight_map from tensors to files")
    if strange := next((name for name in names.values() if Path(name).name != name), None):
        raise ValueError(f"its weight_map names {strange}, which is no file of this folder; get it again")
    return names


# Tensors of a checkpoint, checked against the shapes of its config


def exact_weight(source: WeightSource, name: str, form: str, group: int) -> Int4Weight | Int8Weight | None:
    """Return the checkpoint's own codes, where it has the weight in the worker's format (int8, or int4 in groups of this size):
    what `checked` gives would be rounded a second time. None otherwise."""
    if form == "int4":
        return source.get_int4(name, group)
    return source.get_int8(name) if form == "int8" else None


def without_numbers(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return what stands for a stored tensor where only headers are read: on device meta, but vectors as zeros, because sums on
    meta, such as Gemma's 1 + weight, would import torch's compiler: more than a second of a worker's start."""
    return torch.zeros(tuple(shape), dtype=dtype, device="cpu" if len(shape) == 1 else "meta")


def joined(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Return the tensors concatenated; a single one is passed on without a copy. Tensors without numbers give one without, made
    without torch's own, which would import its compiler for them."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    if first.device.type == "meta":
        return first.new_empty((*first.shape[:dim], sum(tensor.shape[dim] for tensor in tensors), *first.shape[dim + 1 :]))
    return torch.cat(list(tensors), dim)


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
