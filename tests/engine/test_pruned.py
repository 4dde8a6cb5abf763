"""Pruned checkpoints: weights with zeros, in every second pair of four or anywhere, are weights like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.backends import BACKENDS
from tests.engine.paged_loop import PagedLoop, load
from tests.engine.test_model_transformers import greedy, prompt, reference
from tests.support.tiny_models import make_tiny_model


def two_of_four(weight: Tensor) -> Tensor:
    """Keep the two largest of each four neighbours."""
    fours = weight.view(len(weight), -1, 4)
    keep = torch.zeros_like(fours, dtype=torch.bool).scatter_(2, fours.abs().topk(2, dim=2)[1], True)
    return (fours * keep).view(weight.shape)


def unstructured(weight: Tensor) -> Tensor:
    """Keep the larger half of all."""
    return weight * (weight.abs() > weight.abs().median())


@pytest.mark.parametrize("prune", [two_of_four, unstructured])
def test_tokens_are_those_of_transformers(prune: object, tmp_path: Path) -> None:
    assert callable(prune)
    folder = make_tiny_model(tmp_path, "llama")
    path = folder / "model.safetensors"
    tensors = {name: prune(tensor) if "_proj" in name else tensor for name, tensor in load_file(path).items()}
    assert sum(int((tensor == 0).sum()) for tensor in tensors.values()) > 10_000
    save_file(tensors, path, metadata={"format": "pt"})
    token_ids = prompt(40)
    expected = greedy(reference(folder), token_ids, 24)
    for backend in BACKENDS:
        assert PagedLoop(load(folder, backend=backend, dtype="float32")).generate([token_ids], 24) == [expected]
