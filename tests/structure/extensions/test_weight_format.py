"""A format of quantized weights is one module and one line of `pdmesh/engine/loader/quantized/registry.py`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdmesh.engine.loader.quantized.format import FLOATS, Part, Stored, WeightFormat, finish, require_shape, shape_of
from pdmesh.engine.loader.quantized.registry import FORMATS
from pdmesh.engine.loader.safetensors import SafetensorsSource
from pdmesh.engine.models.reader import ConfigReader, UnsupportedModel
from tests.engine.paged_loop import PagedLoop, load
from tests.support.quantized_checkpoints import Format, Written, write_quantized
from tests.support.tiny_models import make_tiny_model

NAME = "signs"


class Signs(WeightFormat):
    """The sign of each weight, and one magnitude for each output."""

    title = "signs"
    main = ".signs"
    parts: Mapping[str, Part] = {".signs": Part(frozenset({"BOOL"})), ".magnitudes": Part(FLOATS)}

    def read(self, stem: str, stored: Stored, expert: int) -> Tensor:
        signs, magnitudes = stored.tensor(f"{stem}.signs"), stored.tensor(f"{stem}.magnitudes")
        return torch.where(signs, -magnitudes[:, None], magnitudes[:, None])

    def check_shapes(self, stem: str, stored: Stored) -> None:
        require_shape(f"{stem}.magnitudes", stored, shape_of(f"{stem}.signs", stored)[:1])


def read(config: ConfigReader) -> Signs:
    finish(config)
    return Signs()


def pack(_name: str, weight: Tensor) -> Written:
    signs, magnitudes = weight < 0, weight.abs().mean(1)
    return {".signs": signs, ".magnitudes": magnitudes}, torch.where(signs, -magnitudes[:, None], magnitudes[:, None])


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    return write_quantized(make_tiny_model(tmp_path / "plain"), tmp_path, Format({"quant_method": NAME}, pack))


def test_an_unknown_format_is_refused_and_the_known_ones_are_named(folders: tuple[Path, Path]) -> None:
    with pytest.raises(UnsupportedModel, match=f"quant_method '{NAME}' is not supported; .* one of awq, bitsandbytes"):
        SafetensorsSource(folders[0])


def test_a_new_format_is_read(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, NAME, read)
    quantized, dense = (PagedLoop(load(folder, backend="torch", dtype="float32")) for folder in folders)
    assert torch.equal(quantized.logits([1, 2, 3]), dense.logits([1, 2, 3]))
