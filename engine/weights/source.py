"""Where weights come from: Hugging Face names to tensors, whatever the file format."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from engine.model_config import ModelConfig


class WeightSource(Protocol):
    """An opened checkpoint. Tensors may share memory with the file's mapping: they are read, never written."""

    config: ModelConfig

    def names(self) -> frozenset[str]: ...

    def get(self, name: str) -> Tensor:
        """The tensor, in the checkpoint's dtype. Raises MissingTensor naming it and the files."""

    def num_elements(self) -> int:
        """Number of weights in all tensors, from the headers alone."""


class MissingTensor(ValueError):
    """The checkpoint lacks a tensor that the model needs."""
