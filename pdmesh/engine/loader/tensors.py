"""Tensors out of a checkpoint, with the shapes that its config promises."""

from __future__ import annotations

from torch import Tensor

from pdmesh.engine.loader.source import WeightSource


def checked(source: WeightSource, name: str, shape: tuple[int, ...]) -> Tensor:
    """The tensor in the checkpoint's dtype. Raises ValueError for another shape, MissingTensor when there is none."""
    tensor = source.get(name)
    if tensor.shape != shape:
        raise ValueError(f"{name}: shape {tuple(tensor.shape)} in the checkpoint, {shape} by its config.json: not one model")
    return tensor
