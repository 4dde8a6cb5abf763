"""A decoder on the Triton kernels beside the reference: logits, and greedy tokens through a real engine."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.kernels.triton.model import TritonModel
from pdmesh.engine.kernels.triton.split_kv import Splits
from pdmesh.engine.loader.loader import LoadedModel, load_model
from pdmesh.engine.models.decoder import DecoderModel
from pdmesh.engine.request import EngineRequest
from pdmesh.engine.speculation.draft import Draft
from pdmesh.sampling_params import SamplingParams
from tests.engine.kernels.triton.paged import DEVICE
from tests.engine.model_kinds import KINDS
from tests.engine.paged_loop import Chunk, PagedLoop, load
from tests.engine.trees import TreeStep, verify
from tests.support.mock_engine import open_engine, run_to_end
from tests.support.tiny_models import make_tiny_model

SPLITS = Splits(64, 4)
NAMES = ["qwen3-layer-types", "llama-bias"]  # QK-norm, a window, head_dim 32; biases everywhere, head_dim 16


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, overrides = KINDS[request.param]
    return make_tiny_model(tmp_path_factory.mktemp(request.param), kind, **overrides)


def on_triton(loaded: LoadedModel) -> LoadedModel:
    assert isinstance(loaded.model, DecoderModel)
    return replace(loaded, model=TritonModel(loaded.model, splits=SPLITS))


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=num_tokens)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-4), ("float16", 0.05)])
def test_logits_of_chunks_and_of_a_drafted_tree(folder: Path, dtype: str, tolerance: float) -> None:
    reference = load(folder, backend="torch", device=DEVICE, dtype=dtype)
    token_ids, draft = prompt(57), Draft((11, 12, 13, 14, 15), (-1, 0, 0, -1, 3), (1.0,) * 5)
    rows = []
    for loaded in (reference, on_triton(reference)):
        loop = PagedLoop(loaded, num_blocks=32)
        table = loop.table(66)
        chunks = [
            loop.step([Chunk(table, token_ids[:40], 0, every_row=True)]),
            loop.step([Chunk(table, token_ids[40:56], 40, every_row=True)]),
        ]
        [tree] = verify(loop, [TreeStep(table, token_ids[56:], 56, draft)])
        rows.append(torch.cat((*chunks, tree)))
    assert rows[1].dtype == torch.float32
    torch.testing.assert_close(rows[1], rows[0], atol=tolerance, rtol=0)


def test_a_chunk_without_logits_and_hidden_states(folder: Path) -> None:
    reference = load(folder, backend="torch", device=DEVICE, dtype="float32")
    states = []
    for loaded in (reference, on_triton(reference)):
        loop = PagedLoop(loaded, num_blocks=32)
        table = loop.table(30)
        assert loop.step([Chunk(table, prompt(20), 0, wanted=False)]).shape == (0, loaded.config.vocab_size)
        hidden = torch.empty((1, loaded.config.hidden_size))
        loop.step_into([Chunk(table, [7], 20)], hidden)
        states.append(hidden)
    torch.testing.assert_close(states[1], states[0], atol=1e-3, rtol=1e-3)


def answers(loaded: LoadedModel, folder: Path, *, num_blocks: int) -> tuple[dict[str, tuple[int, ...]], int, int]:
    """Greedy tokens of ragged prompts, two of which share a beginning; how often one was preempted; tokens from the cache."""
    config = EngineConfig(
        model=str(folder), num_blocks=num_blocks, max_num_batched_tokens=24, max_context=128, speculation="none", device=DEVICE
    )
    engine = open_engine(config, loaded)
    sampling = SamplingParams(temperature=0.0, max_tokens=6)
    shared = prompt(32, 9)
    prompts = [prompt(14), prompt(45, 1), [*shared, *prompt(14, 4)], [*shared, *prompt(15, 2)], prompt(1, 3)]
    for index, tokens in enumerate(prompts):
        assert engine.add(EngineRequest(str(index), tuple(tokens), sampling))
    collector = run_to_end(engine)
    found = {str(index): collector.answer(str(index)).token_ids for index in range(len(prompts))}
    stats = engine.stats()
    return found, stats.num_preemptions, stats.num_prefix_hit_tokens


def test_greedy_tokens_of_an_engine(folder: Path) -> None:
    """Chunks of 24 tokens beside decode rows, a cached prefix, and too few blocks for all."""
    reference = load_model(EngineConfig(model=str(folder), backend="torch", dtype="float32", device=DEVICE))
    expected, _, _ = answers(reference, folder, num_blocks=64)
    found, num_preemptions, num_hits = answers(on_triton(reference), folder, num_blocks=6)
    assert found == expected
    assert (num_preemptions > 0, num_hits > 0) == (True, True)
