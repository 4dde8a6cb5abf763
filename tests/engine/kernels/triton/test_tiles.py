"""Tiles by a device's shared memory: what an H100, an A100 and an L40S may have."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pdmesh.engine.kernels.triton.linear.weight_product import ProductShape
from pdmesh.engine.kernels.triton.support import why_not
from pdmesh.engine.kernels.triton.tiles import HOPPER_BYTES, Tiles, choose_tiles, shared_bound, shared_bytes
from pdmesh.engine.models.registry import model_config

A100, L40S = 166_912, 101_376
LLAMA = {"model_type": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
LLAMA |= {"max_position_embeddings": 64, "rms_norm_eps": 1e-5, "dtype": "bfloat16"}
ROOMS = (HOPPER_BYTES, A100, L40S)


def test_a_products_tile_fits_where_it_runs() -> None:
    def tiles(bits: int, rows: int) -> list[tuple[int, int]]:
        return [(shape.rows, shape.stages) for shape in (ProductShape.of(bits, rows, room) for room in ROOMS)]

    assert tiles(4, 1) == [(1, 3)] * 3 and tiles(8, 1) == [(8, 2)] * 3
    assert tiles(4, 128) == [(128, 3), (128, 3), (64, 3)]
    assert tiles(8, 128) == [(128, 4), (128, 2), (64, 2)]
    for room in ROOMS:
        for bits in (4, 8):
            for rows in (1, 2, 8, 9, 16, 32, 64, 128):
                shape = ProductShape.of(bits, rows, room)
                assert shape.rows <= max(rows, 8 if rows <= 8 else 16) and shape.shared_bound(bits) <= room
    with pytest.raises(ValueError, match="weights of 4 bits: tiles of 16 rows do not fit into 15000 bytes"):
        ProductShape.of(4, 128, 15_000)
    with pytest.raises(ValueError, match="weights of 8 bits: tiles of 8 rows do not fit"):
        ProductShape.of(8, 1, 4000)


def test_what_the_compiler_was_seen_to_take() -> None:
    """Of shared memory, for Hopper, with loops long enough for all stages: no more than counted, and not half of it."""
    seen = {
        (4, 1): 45_056,
        (4, 8): 15_872,
        (4, 32): 45_056,
        (4, 128): 118_784,
        (8, 1): 36_864,
        (8, 32): 81_920,
        (8, 128): 180_224,
    }
    for (bits, rows), taken in seen.items():
        assert taken <= ProductShape.of(bits, rows, HOPPER_BYTES).shared_bound(bits) < 2 * taken


@pytest.mark.parametrize("item_size", [2, 4])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_attentions_tiles_stay_and_their_pipeline_fits(head_dim: int, item_size: int) -> None:
    """The shape of a tile is part of the numbers; how many wait for their turn is not."""
    widest = choose_tiles(head_dim, item_size)
    padded = max(64, 1 << (head_dim - 1).bit_length())
    for room in ROOMS:
        tiles = choose_tiles(head_dim, item_size, room)
        assert without_stages(tiles) == without_stages(widest)
        for rows, stages in ((tiles.split_rows, tiles.split_stages), (tiles.walk_rows, tiles.walk_stages)):
            assert shared_bound(tiles.keys, rows, padded, item_size, stages) <= room
    assert choose_tiles(head_dim, 2, 90_000).walk_stages < 3 or head_dim <= 64


def without_stages(tiles: Tiles) -> Tiles:
    return replace(tiles, split_stages=0, walk_stages=0)


def test_a_gpu_on_which_nothing_fits_is_named_at_the_start() -> None:
    config = model_config({**LLAMA, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256})
    assert why_not(config) is None and why_not(config, 2, L40S) is None
    assert why_not(config, 2, 48 * 1024) == "head_dim: tiles of 256 columns do not fit into 49152 bytes of shared memory"


def test_without_a_gpu_there_is_as_much_as_on_hopper() -> None:
    if not torch.cuda.is_available():
        assert shared_bytes(torch.device("cuda")) == shared_bytes(torch.device("cpu")) == HOPPER_BYTES
