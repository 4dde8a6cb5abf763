"""Where weights come from: Hugging Face names to tensors, whatever the file format."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pdmesh.engine.loader.quantize import Int4Weight
from pdmesh.engine.models.config import ModelConfig


class WeightSource(Protocol):
    """An opened checkpoint. Tensors may share memory with the file's mapping: they are read, never written."""

    config: ModelConfig

    def names(self) -> frozenset[str]: ...

    def get(self, name: str) -> Tensor:
        """The tensor, in the checkpoint's dtype. Raises MissingTensor naming it and the files."""

    def get_int4(self, name: str, group: int) -> Int4Weight | None:
        """The tensor as the file has it, where that is 4 bits in groups of this size: quantizing what `get` gives would round a
        second time. None otherwise. Raises MissingTensor as `get` does."""

    def num_elements(self) -> int:
        """Number of weights in all tensors, from the headers alone."""


class MissingTensor(ValueError):
    """The checkpoint lacks a tensor that the model needs."""
