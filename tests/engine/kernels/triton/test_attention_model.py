"""The decoder with attention `triton`: the same greedy tokens as with the reference, and logits close to its."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pdmesh.engine.attention.base import ReferenceAttention, make_attention
from pdmesh.engine.kernels.triton.attention import TritonAttention
from pdmesh.engine.kernels.triton.split_kv import Splits
from pdmesh.engine.models.config import ModelConfig
from pdmesh.engine.models.decoder import DecoderModel
from pdmesh.engine.models.registry import model_config
from pdmesh.engine.speculation.draft import Draft
from tests.engine.kernels.triton.paged import DEVICE, Sequences, Shape
from tests.engine.model_kinds import KINDS
from tests.engine.paged_loop import Chunk, PagedLoop, load
from tests.engine.trees import TreeStep, verify
from tests.support.tiny_models import make_tiny_model

NAMES = ["mistral-window"]  # others differ in what test_attention.py varies


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, overrides = KINDS[request.param]
    return make_tiny_model(tmp_path_factory.mktemp(request.param), kind, **overrides)


def loop_of(folder: Path, *, triton: bool) -> PagedLoop:
    loop = PagedLoop(load(folder, backend="torch", device=DEVICE, dtype="float32"), num_blocks=64)
    model = loop.loaded.model
    assert isinstance(model, DecoderModel)
    if triton:
        model.attention = TritonAttention(model.config, DEVICE, splits=Splits(64, 4))
    return loop


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=num_tokens)


def test_greedy_tokens_are_those_of_the_reference(folder: Path) -> None:
    prompts = [prompt(66), prompt(3, 1), prompt(20, 2)]
    expected = loop_of(folder, triton=False).generate(prompts, 5)
    assert loop_of(folder, triton=True).generate(prompts, 5) == expected


def test_logits_of_chunks_and_of_a_drafted_tree(folder: Path) -> None:
    token_ids, draft = prompt(80), Draft((11, 12, 13, 14, 15), (-1, 0, 0, -1, 3), (1.0,) * 5)
    rows = []
    for triton in (False, True):
        loop = loop_of(folder, triton=triton)
        table = loop.table(90)
        chunks = [
            loop.step([Chunk(table, token_ids[:63], 0, every_row=True)]),
            loop.step([Chunk(table, token_ids[63:79], 63, every_row=True)]),
        ]
        [tree] = verify(loop, [TreeStep(table, token_ids[79:], 79, draft)])
        rows.append(torch.cat((*chunks, tree)))
    torch.testing.assert_close(rows[1], rows[0], atol=2e-4, rtol=0)


def load_config() -> ModelConfig:
    sizes = {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 1, "max_position_embeddings": 512}
    return model_config({"model_type": "llama", "vocab_size": 300, "intermediate_size": 64, **sizes})


def test_the_backend_is_registered() -> None:
    config = load_config()
    attention = make_attention("triton", config, DEVICE)
    assert (attention.name, type(attention)) == ("triton", TritonAttention)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("window", [None, 40])
def test_a_layer_equals_the_references(dtype: torch.dtype, window: int | None) -> None:
    """Tails too, and the writing of the step's keys and values."""
    shape = Shape(6, 2, 64, 8)
    sequences = Sequences(shape, [(70, 1), (1, 1), (33, 18), (65, 4)], dtype, tail=4)
    config = replace(load_config(), num_layers=1, num_heads=6, num_kv_heads=2, head_dim=64, windows=(window,))
    new = [(key[-len(query) :], value[-len(query) :]) for query, key, value in sequences.data]
    key, value = (torch.cat(parts).to(DEVICE) for parts in zip(*new, strict=True))
    results, pools = [], []
    for backend in (ReferenceAttention(config, DEVICE), TritonAttention(config, DEVICE)):
        kv = sequences.kv.clone()[None]
        kv.flatten(0, 1).flatten(1, 2)[:, sequences.batch.slot_mapping] = 5.0
        results.append(backend.plan(sequences.batch, 8).run(0, sequences.query, key, value, kv))
        pools.append(kv)
    torch.testing.assert_close(results[1], results[0], atol=2e-6 if dtype == torch.float32 else 4e-3, rtol=0)
    torch.testing.assert_close(pools[1], pools[0], atol=0, rtol=0, equal_nan=True)
