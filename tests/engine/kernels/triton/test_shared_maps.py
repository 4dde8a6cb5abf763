"""A rank's quantized weights are those of the whole, though it quantizes its own part alone wherever scales allow."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from pdmesh.engine.backend_selection import Numerics
from pdmesh.engine.loader.triton import QuantizedMaps, Weight
from pdmesh.engine.models.registry import model_config
from pdmesh.engine.parallel.quantized import SharedMaps
from pdmesh.engine.parallel.split import Shard, cut_quantized
from tests.engine.kernels.triton.paged import DEVICE
from tests.support.random_weights import RandomSource

SIZES = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 1, "head_dim": 32}
SHAPE = model_config(
    {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 64, **SIZES}
)
LAYER = "model.layers.0"
# Name, and rows and width of the whole.
MAPS = {
    "k": (f"{LAYER}.self_attn.k_proj.weight", 128, 128),
    "up": (f"{LAYER}.mlp.up_proj.weight", 192, 128),
    "o": (f"{LAYER}.self_attn.o_proj.weight", 128, 256),
    "down": (f"{LAYER}.mlp.down_proj.weight", 128, 192),
}


class Counting(SharedMaps):
    num_quantized = 0

    def _quantized(self, name: str, tensor: Tensor) -> Weight:
        self.num_quantized += tensor.numel()
        return super()._quantized(name, tensor)


def numerics(form: str, group: int = 32) -> Numerics:
    return Numerics("triton", form, group if form == "int4" else 0, torch.float32, torch.float32)


@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("which", MAPS)
def test_parts_are_those_of_the_whole(form: str, which: str) -> None:
    name, rows, width = MAPS[which]
    source = RandomSource(SHAPE, DEVICE, torch.bfloat16)
    whole = QuantizedMaps(source, numerics(form), DEVICE)._weight(name, rows, width)
    is_by_rows = which in ("k", "up")
    part = (rows // 2, width) if is_by_rows else (rows, width // 2)
    for rank in range(2):
        maps = Counting(source, numerics(form), DEVICE, Shard(rank, 2))
        assert_same(maps._weight(name, *part), cut_quantized(name, whole, Shard(rank, 2)))
        assert maps.num_quantized == rows * width // (2 if is_by_rows or form == "int4" else 1)


def assert_same(ours: Weight, theirs: Weight) -> None:
    assert type(ours) is type(theirs)
    for field in fields(theirs):
        mine, other = getattr(ours, field.name), getattr(theirs, field.name)
        same = torch.equal(mine.view(torch.uint8), other.view(torch.uint8)) if isinstance(other, Tensor) else mine == other
        assert same, field.name


def test_groups_that_a_cut_would_part_are_named() -> None:
    maps = SharedMaps(RandomSource(SHAPE, DEVICE, torch.bfloat16), numerics("int4", 64), DEVICE, Shard(0, 2))
    with pytest.raises(ValueError, match=r"down_proj\.weight: groups of 64 do not fit into 96 columns of a rank"):
        maps._weight(MAPS["down"][0], 128, 96)
