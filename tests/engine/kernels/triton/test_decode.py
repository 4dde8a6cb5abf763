"""Decode steps in buckets, recorded: the same numbers as without, and nothing happens in rows of padding."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.kernels.triton.cuda_graphs import DecodeSizes
from pdmesh.engine.kernels.triton.model import TritonModel
from pdmesh.engine.kernels.triton.split_kv import Splits
from pdmesh.engine.kv_cache.events import LayerReadiness
from pdmesh.engine.loader.loader import LoadedModel, load_model
from pdmesh.engine.models.decoder import DecoderModel
from pdmesh.engine.request import EngineRequest
from pdmesh.engine.runner.batch import StepBatch
from pdmesh.sampling_params import SamplingParams
from tests.engine.kernels.triton.paged import DEVICE
from tests.engine.kernels.triton.recorders import Counted
from tests.engine.kernels.triton.test_model import answers, prompt
from tests.engine.paged_loop import Chunk, PagedLoop, make_batch
from tests.support.mock_engine import open_engine, run_to_end
from tests.support.tiny_models import make_tiny_model

SPLITS = Splits(64, 4)
MAX_CONTEXT, BLOCK_SIZE = 128, 16
SIZES = DecodeSizes(8, MAX_CONTEXT, BLOCK_SIZE)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = make_tiny_model(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=1)
    return load_model(EngineConfig(model=str(folder), backend="torch", dtype="float32", device=DEVICE))


def model_of(loaded: LoadedModel, sizes: DecodeSizes | None, recorder: Counted | None = None) -> TritonModel:
    assert isinstance(loaded.model, DecoderModel)
    return TritonModel(loaded.model, sizes, recorder=recorder, splits=SPLITS)


def test_buckets() -> None:
    assert DecodeSizes(1, 8, 16).buckets == (4,)
    assert DecodeSizes(4, 8, 16).buckets == (4,)
    assert DecodeSizes(5, 8, 16).buckets == (4, 8)
    assert DecodeSizes(33, 8, 16).buckets == (4, 8, 16, 32, 36)
    assert DecodeSizes(64, 8, 16).buckets == (4, 8, 16, 32, 64)
    with pytest.raises(ValueError, match="max_context"):
        DecodeSizes(1, 0, 16)


def filled(loop: PagedLoop) -> Tensor:
    """The pool with random numbers everywhere, as after a while of serving."""
    generator = torch.Generator().manual_seed(1)
    loop.pool.tensor.copy_(torch.randn(loop.pool.tensor.shape, generator=generator))
    return loop.pool.tensor.clone()


def ragged(loop: PagedLoop, generator: random.Random, most: int) -> list[Chunk]:
    """Decode rows whose contexts differ; their earlier keys are whatever lies in the pool."""
    chunks = []
    for _ in range(generator.randint(1, most)):
        context = generator.choice([1, 2, 15, 16, 17, 31, 32, 33, generator.randint(1, MAX_CONTEXT)])
        chunks.append(Chunk(loop.table(context), [generator.randrange(256)], context - 1))
    return chunks


@pytest.mark.parametrize("seed", range(3))
def test_ragged_batches_have_the_bits_of_the_launches_and_touch_only_their_slots(loaded: LoadedModel, seed: int) -> None:
    generator, recorder = random.Random(seed), Counted()
    recorded, launched, exact = model_of(loaded, SIZES, recorder), model_of(loaded, SIZES), model_of(loaded, None)
    loop = PagedLoop(loaded, num_blocks=128)
    for _ in range(2):
        before = filled(loop)
        chunks = ragged(loop, generator, 8)
        batch, pool = make_batch(chunks, BLOCK_SIZE), loop.pool.tensor
        results = []
        for model in (recorded, launched, exact):
            pool.copy_(before)
            hidden = torch.empty((len(chunks), loaded.config.hidden_size), device=DEVICE)
            results.append((model.forward(batch, pool, None, hidden).clone(), hidden, pool.clone()))
        slots = torch.ones(128 * BLOCK_SIZE, dtype=torch.bool)
        slots[batch.slot_mapping] = False
        for logits, hidden, after in results[:2] if DEVICE == "cuda" else results:  # cuBLAS minds the number of rows
            assert torch.equal(logits, results[1][0])
            assert torch.equal(hidden, results[1][1])
            assert torch.equal(after, results[1][2])
        torch.testing.assert_close(results[2][0], results[1][0], atol=1e-3, rtol=0)
        for *_, after in results:
            assert torch.equal(after.flatten(2, 3)[:, :, slots], before.flatten(2, 3)[:, :, slots])
        for chunk in chunks:
            loop.release(chunk.table)
    assert recorder.num_recorded + recorder.num_replayed == 2


def test_rows_of_padding_may_hold_anything(loaded: LoadedModel) -> None:
    """What a bucket's further rows did in the step before changes no bit of those that are left."""
    model = model_of(loaded, SIZES, Counted())
    loop = PagedLoop(replace(loaded, model=model), num_blocks=128)
    filled(loop)
    chunks = ragged(loop, random.Random(11), 1)
    others = [Chunk(loop.table(100), [token], 99) for token in range(7)]
    alone = loop.step([*chunks, *others[:4]]).clone()[:1]
    beside = loop.step([*chunks, *others]).clone()[:1]
    again = loop.step([*chunks, *others[:4]])[:1]
    assert torch.equal(beside, alone)
    assert torch.equal(again, alone)


def test_all_buckets_are_recorded_ahead(loaded: LoadedModel) -> None:
    recorder = Counted()
    model = model_of(loaded, SIZES, recorder)
    loop = PagedLoop(replace(loaded, model=model), num_blocks=128)
    before = filled(loop)
    model.prepare(loop.pool.tensor)
    assert torch.equal(loop.pool.tensor, before)
    assert (recorder.num_recorded, recorder.num_replayed) == (len(SIZES.buckets), 0)
    loop.step(ragged(loop, random.Random(0), 8))
    assert (recorder.num_recorded, recorder.num_replayed) == (len(SIZES.buckets), 1)


def test_another_pool_is_recorded_anew(loaded: LoadedModel) -> None:
    recorder = Counted()
    model = model_of(loaded, SIZES, recorder)
    results = []
    for _ in range(2):
        loop = PagedLoop(replace(loaded, model=model), num_blocks=128)
        filled(loop)
        chunks = ragged(loop, random.Random(3), 4)
        results.append(loop.step(chunks).clone())
    assert torch.equal(results[0], results[1])
    assert recorder.num_recorded == 2


def test_what_is_no_decode_step_is_launched(loaded: LoadedModel) -> None:
    recorder = Counted()
    loop = PagedLoop(replace(loaded, model=model_of(loaded, SIZES, recorder)), num_blocks=128)
    table = loop.table(40)
    loop.step([Chunk(table, range(20), 0)])
    loop.step([Chunk(table, range(2), 20, every_row=True)])
    loop.step([Chunk(table, [1], 22, wanted=False)])
    assert recorder.num_recorded == 0
    loop.step([Chunk(table, [1], 23)])
    assert recorder.num_recorded == 1


def test_greedy_tokens_of_the_graphs_are_those_of_the_launches(loaded: LoadedModel, tmp_path: Path) -> None:
    """Through an engine, with chunks, a cached prefix and a preemption; both are the reference's."""
    recorder = Counted()
    expected, _, _ = answers(loaded, tmp_path, num_blocks=64)
    found, num_preemptions, num_hits = answers(replace(loaded, model=model_of(loaded, SIZES, recorder)), tmp_path, num_blocks=6)
    launched, _, _ = answers(replace(loaded, model=model_of(loaded, None)), tmp_path, num_blocks=6)
    assert found == launched == expected
    assert (num_preemptions > 0, num_hits > 0, recorder.num_replayed > 5) == (True, True, True)


class Watched(TritonModel):
    """Counts steps of tokens that the host has not seen."""

    num_unseen = 0

    def forward(self, batch: StepBatch, kv: Tensor, signal: LayerReadiness | None = None, hidden: Tensor | None = None) -> Tensor:
        self.num_unseen += int(bool((batch.token_ids < 0).any()))
        return super().forward(batch, kv, signal, hidden)


def test_steps_ahead_draw_the_same_tokens(loaded: LoadedModel, tmp_path: Path) -> None:
    """Greedy and drawn at random, with penalties and log-probabilities, of sequences that end at different steps."""
    assert isinstance(loaded.model, DecoderModel)
    prompts = [prompt(14), prompt(3, 1), prompt(30, 2)]
    samplings = [
        SamplingParams(temperature=0.0, max_tokens=6, repetition_penalty=1.5),
        SamplingParams(temperature=0.7, seed=5, max_tokens=9, top_p=0.9, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0.9, seed=6, max_tokens=7, top_k=20, ignore_eos=True, frequency_penalty=1.0),
    ]
    found, counts = [], []
    for ahead in (False, True):
        model = Watched(loaded.model, SIZES, recorder=Counted(), splits=SPLITS)
        config = EngineConfig(model=str(tmp_path), num_blocks=16, max_context=64, device=DEVICE, steps_ahead=ahead)
        engine = open_engine(config, replace(loaded, model=model))
        for index, (tokens, sampling) in enumerate(zip(prompts, samplings, strict=True)):
            assert engine.add(EngineRequest(str(index), tuple(tokens), sampling))
        collector = run_to_end(engine)
        found.append([collector.answer(str(index)) for index in range(len(prompts))])
        counts.append(model.num_unseen)
    assert found[0] == found[1]
    assert counts == [0, 7]
