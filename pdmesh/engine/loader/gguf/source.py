"""A GGUF file as a checkpoint: tensors by canonical names (pdmesh/engine/models/names.py), blocks dequantized to float32."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from gguf import ReaderTensor
from torch import Tensor

from pdmesh.engine.loader.gguf.architectures import read_config, stems_of
from pdmesh.engine.loader.gguf.blocks import INT4_GROUP, dequantize_rows, int4_rows
from pdmesh.engine.loader.gguf.header import Header, open_file
from pdmesh.engine.loader.gguf.names import names_of
from pdmesh.engine.loader.quantize import Int4Weight, Int8Weight
from pdmesh.engine.loader.safetensors import MissingTensor, joined, without_numbers
from pdmesh.engine.models.names import Take
from pdmesh.engine.models.registry import model_config
from pdmesh.overrides import overridden

_EXPANDED = "self_attn.kv_b_proj.weight"


class GgufSource:
    """See WeightSource. `config_dict` is the config.json that transformers would read for this file."""

    def __init__(self, path: Path, overrides: Sequence[str] = ()) -> None:
        """Open it, and read its header. Raises ValueError."""
        self.path = path
        reader = open_file(path)
        header = Header(path, reader)
        self.config_dict = overridden(read_config(path, header), overrides)
        self.config = model_config(self.config_dict)
        self._names = names_of(header, stems_of(header))
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}

    def names(self) -> frozenset[str]:
        """Return the names in the file."""
        return frozenset(self._tensors)

    def get(self, name: str) -> Tensor:
        """Return float32, in the engine's layout."""
        return self._assembled(name, self._values)

    def get_int4(self, name: str, group: int = 32) -> Int4Weight | None:
        """Return the codes, scales and minimums of a Q4_0 or Q4_1 tensor, in the engine's layout: dequantized they are what
        `get` gives. None for other types, other groups, and a Q4_0 minimum beyond float16. Raises MissingTensor."""
        take = self._names.find(name, self.config)
        if self._is_split(name) or not take.name:
            return None
        kind = self._stored(take, name).tensor_type
        return int4_rows(self._rows(take, name), kind) if group == INT4_GROUP else None

    def get_int8(self, name: str) -> Int8Weight | None:
        """Return None: no type of block has one scale for a row."""
        return None

    def num_elements(self) -> int:
        return sum(math.prod(int(size) for size in tensor.shape) for tensor in self._tensors.values())

    def on_meta(self) -> GgufHeaders:
        """Return the tensors without their numbers."""
        return GgufHeaders(self)

    def shape(self, stored: str) -> tuple[int, ...]:
        """Return the shape of a tensor of the file, as torch has it."""
        return tuple(int(size) for size in reversed(self._tensors[stored].shape))

    def unused(self, taken: set[str]) -> list[str]:
        """Return the tensors of the file that are not among `taken`, and that are weights of this model."""
        ignored = re.compile(self._names.ignored)
        return sorted(name for name in self._tensors.keys() - taken if not ignored.fullmatch(name))

    def _assembled(self, name: str, values: Callable[[Take, str], Tensor]) -> Tensor:
        """Return the tensor, of which `values` gives what is stored."""
        if self._is_split(name):
            stem = name.removesuffix(_EXPANDED)
            layer = self._names.layers.format(stem.removeprefix("model.layers.").rstrip("."))
            keys, latent_values = (values(Take(f"{layer}.attn_{part}_b.weight"), name) for part in "kv")
            return _expanded(keys.reshape(self.config.num_heads, -1, keys.shape[-1]), latent_values)
        take = self._names.find(name, self.config)
        if take.name:
            return values(take, name)
        return _changed(torch.empty(0), take)

    def _is_split(self, name: str) -> bool:
        """Return whether it lies in two tensors: one expands a latent to keys, the other to values."""
        return name.endswith(_EXPANDED) and "blk.0.attn_k_b.weight" in self._tensors

    def _values(self, take: Take, name: str) -> Tensor:
        rows, kind = self._rows(take, name), self._stored(take, name).tensor_type
        if rows.ndim < 3:
            return dequantize_rows(rows, kind)
        return dequantize_rows(rows.reshape(-1, rows.shape[-1]), kind).view(*rows.shape[:-1], -1)

    def _stored(self, take: Take, name: str) -> ReaderTensor:
        if take.name not in self._tensors:
            raise MissingTensor(f"{self.path}: no tensor for {name!r} ({take.name}); the file is incomplete")
        return self._tensors[take.name]

    def _rows(self, take: Take, name: str) -> np.ndarray:
        """Return the rows of the tensor that was asked for, as they are stored: whatever is done to them leaves rows whole."""
        data = np.asarray(self._stored(take, name).data)
        if not take.change:
            return data
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an array that must not be written: no change does
            return _changed(torch.from_numpy(data), take).contiguous().numpy()


class GgufHeaders:
    """The tensors of a GGUF file on device meta, see WeightSource; it remembers which were asked for, and which were taken."""

    def __init__(self, source: GgufSource) -> None:
        self.config, self._source = source.config, source
        self.asked: list[str] = []
        self.taken: set[str] = set()

    def names(self) -> frozenset[str]:
        return self._source.names()

    def get(self, name: str) -> Tensor:
        """Return the tensor without numbers. Raises MissingTensor."""
        self.asked.append(name)
        return self._source._assembled(name, self._shaped)

    def _shaped(self, take: Take, name: str) -> Tensor:
        self._source._stored(take, name)
        self.taken.add(take.name)
        return _changed(without_numbers(self._source.shape(take.name)), take)

    def get_int4(self, name: str, group: int) -> Int4Weight | None:
        return None

    def get_int8(self, name: str) -> Int8Weight | None:
        return None

    def num_elements(self) -> int:
        return self._source.num_elements()


def _changed(tensor: Tensor, take: Take) -> Tensor:
    for change in take.change:
        tensor = change(tensor)
    return tensor


def _expanded(keys: Tensor, values: Tensor) -> Tensor:
    """Return the map from the latent to each head's keys and values, of its two parts [heads, latent, keys] and [heads, values,
    latent]."""
    both = joined((keys.transpose(1, 2), values.reshape(len(keys), -1, values.shape[-1])), 1)
    return both.reshape(-1, both.shape[-1])
