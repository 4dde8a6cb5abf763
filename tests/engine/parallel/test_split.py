"""Which part of the weights a rank has: shares are disjoint, whole together, and what the mathematics needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pdmesh.engine.loader.quantize import Int4Weight, Int8Weight, dequantize_int4, dequantize_int8, quantize_int4, quantize_int8
from pdmesh.engine.loader.safetensors import SafetensorsSource
from pdmesh.engine.models.config import ModelConfig
from pdmesh.engine.parallel.split import (
    Shard,
    ShardSource,
    check_degree,
    cut,
    cut_quantized,
    num_elements_held,
    shard_config,
    whole_shape,
)
from tests.support.mock_engine import mock_model_config
from tests.support.tiny_models import make_tiny_model


def shares(name: str, tensor: torch.Tensor, size: int) -> list[torch.Tensor]:
    return [cut(name, tensor, Shard(rank, size)) for rank in range(size)]


def test_rows_and_columns_together_are_the_whole() -> None:
    weight = torch.arange(96.0).view(8, 12)
    for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        assert torch.equal(torch.cat(shares(f"model.layers.0.x.{name}.weight", weight, 4)), weight)
        assert torch.equal(torch.cat(shares(f"model.layers.0.x.{name}.bias", weight[0], 4)), weight[0])
    for name in ("o_proj", "down_proj"):
        assert torch.equal(torch.cat(shares(f"model.layers.0.x.{name}.weight", weight, 4), dim=1), weight)


def test_the_bias_of_a_sum_is_added_once() -> None:
    bias = torch.randn(12)
    assert torch.equal(sum(shares("model.layers.0.self_attn.o_proj.bias", bias, 3), torch.zeros(12)), bias)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight", "model.layers.1.self_attn.q_norm.weight"])
def test_the_rest_is_everybodys(name: str) -> None:
    weight = torch.randn(12)
    assert all(torch.equal(share, weight) for share in shares(name, weight, 2))


@pytest.mark.parametrize("name", ["q_norm.weight", "k_norm.weight", "sinks"])
def test_what_is_of_a_head_goes_with_it(name: str) -> None:
    weight = torch.randn(8, 12) if "norm" in name else torch.randn(8)
    assert torch.equal(torch.cat(shares(f"model.layers.1.self_attn.{name}", weight, 4)), weight)


def test_a_shape_that_cannot_be_shared_is_named() -> None:
    with pytest.raises(ValueError, match=r"gate_proj\.weight: 7 cannot be shared by 2 ranks"):
        cut("model.layers.0.mlp.gate_proj.weight", torch.zeros(7, 4), Shard(1, 2))


@pytest.mark.parametrize(("vocab_size", "size"), [(320, 2), (321, 2), (10, 4), (5, 4)])
def test_the_vocabulary_is_cut_without_gaps(vocab_size: int, size: int) -> None:
    parts = [Shard(rank, size).vocabulary(vocab_size) for rank in range(size)]
    assert [token for part in parts for token in part] == list(range(vocab_size))
    assert all(len(part) <= Shard(0, size).vocabulary_rows(vocab_size) for part in parts)


def eight_heads() -> ModelConfig:
    return replace(mock_model_config(64), num_heads=16, num_kv_heads=8, intermediate_size=48)


def test_a_shares_config_is_what_its_tensors_fit(tmp_path: Path) -> None:
    source = SafetensorsSource(make_tiny_model(tmp_path, "qwen2"))
    share = ShardSource(source, Shard(1, 2))
    assert (share.config.num_heads, share.config.num_kv_heads, share.config.intermediate_size) == (2, 1, 64)
    assert (share.config.hidden_size, share.config.vocab_size) == (source.config.hidden_size, source.config.vocab_size)
    assert share.get("model.layers.0.self_attn.k_proj.weight").shape == (share.config.head_dim, share.config.hidden_size)
    assert share.get("model.layers.0.mlp.down_proj.weight").shape == (share.config.hidden_size, 64)
    assert shard_config(source.config, Shard(0, 1)) == source.config


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_degrees_that_fit(degree: int) -> None:
    check_degree(degree, eight_heads())


@pytest.mark.parametrize(
    ("degree", "changes", "message"),
    [
        (3, {}, "tensor_parallel: 3 does not divide the model's 8 KV heads; give one of 1, 2, 4, 8"),
        (16, {}, "tensor_parallel: 16 does not divide the model's 8 KV heads"),
        (
            8,
            {"intermediate_size": 20},
            "tensor_parallel: 8 does not divide the model's 20 intermediate columns; give one of 1, 2, 4",
        ),
    ],
)
def test_degrees_that_do_not_fit_are_named(degree: int, changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_degree(degree, replace(eight_heads(), **changes))  # type: ignore[arg-type]


def test_memory_of_all_ranks_and_of_one() -> None:
    model = eight_heads()
    table = model.vocab_size * model.hidden_size
    assert num_elements_held(model, 1000 + table, 1, one_memory=True) == 1000 + table
    assert num_elements_held(model, 1000 + table, 4, one_memory=True) == 1000 + 4 * table
    assert num_elements_held(model, 1000 + table, 4, one_memory=False) == 250 + table


@pytest.mark.parametrize("name", ["x.q_proj.weight", "x.down_proj.weight", "x.embed_tokens.weight"])
def test_a_quantized_tensor_is_cut_with_its_own_scales(name: str) -> None:
    """So the numbers of a share are those of the whole, and not those that the share would have been given by itself."""
    whole = torch.randn(8, 256)
    for rank in range(2):
        shard = Shard(rank, 2)
        share = cut(name, whole, shard)
        assert whole_shape(name, share.shape[0], share.shape[1], shard) == (8, 256)
        eight, four = cut_quantized(name, quantize_int8(whole), shard), cut_quantized(name, quantize_int4(whole, 64), shard)
        assert isinstance(eight, Int8Weight)
        assert isinstance(four, Int4Weight)
        assert torch.equal(dequantize_int8(eight), cut(name, dequantize_int8(quantize_int8(whole)), shard))
        assert torch.equal(dequantize_int4(four), cut(name, dequantize_int4(quantize_int4(whole, 64)), shard))


def test_groups_that_a_cut_would_part_are_named() -> None:
    with pytest.raises(ValueError, match=r"x\.o_proj\.weight: groups of 128 do not fit into 64 columns of a rank"):
        cut_quantized("x.o_proj.weight", quantize_int4(torch.randn(8, 128), 128), Shard(0, 2))
