"""Latent attention over the paged pool beside attention the plain way, and models with it as graphs beside the reference."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdmesh.engine.backend_selection import choose_numerics
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.kernels.triton.attention import Workspace
from pdmesh.engine.kernels.triton.latent.attention import LatentCall
from pdmesh.engine.kernels.triton.metadata import Capacity
from pdmesh.engine.kernels.triton.split_kv import Splits
from pdmesh.engine.kernels.triton.support import why_not
from pdmesh.engine.kernels.triton.tiles import latent_columns
from pdmesh.engine.loader.safetensors import read_config
from pdmesh.engine.models.config import LatentConfig
from tests.engine.kernels.triton.paged import DEVICE, Sequences, Shape
from tests.engine.kernels.triton.test_step_memory import CONFIG
from tests.engine.paged_loop import PagedLoop, load
from tests.engine.test_model_transformers import prompt
from tests.support.tiny_families import make_tiny_family

SPLITS = Splits(16, 4)  # so that short contexts have several, which double at 64 keys
LATENT = LatentConfig(query_rank=0, kv_rank=60, nope_dim=8, rope_dim=12, value_dim=8)  # halves of 36: 32 and 4 columns
HEADS, SCALE = 3, 0.2
LENGTHS = [(90, 1), (37, 5), (1, 1), (70, 22)]


def queries_of(sequences: Sequences) -> Tensor:
    num_tokens = sequences.batch.num_tokens
    return torch.randn(num_tokens, HEADS, LATENT.width, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def attended(sequences: Sequences, kv: Tensor, scales: Tensor | None = None, capacity: Capacity | None = None) -> Tensor:
    meta, query = sequences.meta(capacity), queries_of(sequences)
    workspace = Workspace.of(meta, HEADS, LATENT.kv_rank, SPLITS)
    out = query.new_full((len(query), HEADS, LATENT.kv_rank), float("nan"))
    call = LatentCall(LATENT, SCALE * math.log2(math.e), SPLITS, meta, workspace.acc, workspace.stats)
    call.run(query, kv, scales, out)
    return out


def naive(sequences: Sequences, factors: tuple[float, float] = (1.0, 1.0)) -> Tensor:
    """By softmax in float64; `factors` of the halves that are stored."""
    results, first, query = [], 0, queries_of(sequences).double().cpu()
    for (context, count), (_, *halves) in zip(sequences.lengths, sequences.data, strict=True):
        keys = torch.cat([half[:, 0].double() * factor for half, factor in zip(halves, factors, strict=True)], dim=1)
        scores = torch.einsum("qhd,kd->hqk", query[first : first + count], keys) * SCALE
        seen = torch.arange(context) <= (torch.arange(count) + context - count)[:, None]
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        results.append(torch.einsum("hqk,kd->qhd", weights, keys[:, : LATENT.kv_rank]))
        first += count
    return torch.cat(results).float().to(DEVICE)


@pytest.mark.parametrize("tail", [0, 3])
def test_it_is_attention_over_whole_latents_whose_beginning_is_their_value(tail: int) -> None:
    """Split and walked sequences; slots of no sequence hold NaN."""
    sequences = Sequences(Shape(1, 1, LATENT.width // 2), LENGTHS, tail=tail)
    torch.testing.assert_close(attended(sequences, sequences.kv), naive(sequences), atol=1e-5, rtol=1e-5)


def test_halves_in_fp8_have_scales_of_their_own() -> None:
    sequences = Sequences(Shape(1, 1, LATENT.width // 2), LENGTHS[:2], torch.float8_e4m3fn)
    sequences.data = [(query.float(), key.float(), value.float()) for query, key, value in sequences.data]
    found = attended(sequences, sequences.kv, torch.tensor([0.5, 2.0], device=DEVICE))
    torch.testing.assert_close(found, naive(sequences, (0.5, 2.0)), atol=1e-5, rtol=1e-5)


def test_a_querys_bits_are_the_same_split_and_walked() -> None:
    sequences = Sequences(Shape(1, 1, LATENT.width // 2), LENGTHS)
    capacity = sequences.capacity()
    assert capacity.max_split_len == 5
    whole = replace(capacity, num_split_tokens=29, max_split_len=22), replace(capacity, num_split_tokens=0, max_split_len=0)
    split, walked, mixed = (attended(sequences, sequences.kv, capacity=each) for each in (*whole, capacity))
    assert torch.equal(split, walked) and torch.equal(split, mixed)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("variant", ["minicpm3", "deepseek_v2, groups"])
def test_steps_as_graphs_draw_the_references_tokens(variant: str, tmp_path: Path) -> None:
    """With and without a bottleneck of queries."""
    folder = make_tiny_family(tmp_path, variant, num_hidden_layers=1)
    sizes = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "max_context": 64, "dtype": "float32", "device": DEVICE}
    torch_model, own = (load(folder, backend=name, **sizes) for name in ("torch", "triton"))
    prompts = [prompt(9, seed=1), prompt(24, seed=2)]
    expected, found = (PagedLoop(each).generate(prompts, 4) for each in (torch_model, own))
    assert len({token for some in expected for token in some}) > 2, "greedy output that hardly varies shows nothing"
    assert found == expected


def test_tiles_of_latents() -> None:
    assert [latent_columns(width) for width in (576, 288, 72, 48, 512)] == [(256, 32), (128, 16), (32, 16), (16, 16), (128, 128)]
    latent = replace(CONFIG, latent=LatentConfig(0, 448, 128, 64, 128))
    assert why_not(latent) == "its kernels have no tiles for latents of 448 and 64 numbers"
    assert why_not(replace(CONFIG, latent=LatentConfig(0, 512, 128, 64, 128))) is None
    too_wide = replace(CONFIG, latent=LatentConfig(0, 512, 128, 64, 128))
    assert why_not(too_wide, room=64 << 10) == "latents of 576 numbers do not fit into 65536 bytes of shared memory"


def test_several_ranks_are_refused_by_name(tmp_path: Path) -> None:
    model = read_config(make_tiny_family(tmp_path, "minicpm3", num_hidden_layers=1))
    config = EngineConfig(model="m", backend="triton", tensor_parallel=2)
    with pytest.raises(ValueError, match="its kernels compute latent attention with one rank alone"):
        choose_numerics(config, model, has_int4=False, no_library="", no_triton="")
