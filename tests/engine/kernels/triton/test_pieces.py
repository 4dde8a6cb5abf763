"""Chunks, drafts and mixed steps as graphs between attentions: the numbers of the same launches, and of exact ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pdmesh.engine.engine as engine_module
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.kernels.triton.cuda_graphs import DecodeSizes
from pdmesh.engine.kernels.triton.model import TritonModel
from pdmesh.engine.kernels.triton.piecewise_graphs import hidden_at, token_buckets
from pdmesh.engine.kernels.triton.split_kv import Splits
from pdmesh.engine.kv_cache.events import LayerReadiness
from pdmesh.engine.loader.loader import LoadedModel
from pdmesh.engine.models.decoder import DecoderModel
from pdmesh.engine.request import EngineRequest
from pdmesh.engine.runner.batch import StepBatch
from pdmesh.engine.scheduler.sequence import Sequence as EngineSequence
from pdmesh.engine.speculation.draft import Draft
from pdmesh.sampling_params import SamplingParams
from tests.engine.kernels.triton.paged import DEVICE
from tests.engine.kernels.triton.recorders import Counted
from tests.engine.kernels.triton.test_model import answers, prompt
from tests.engine.model_kinds import KINDS
from tests.engine.paged_loop import Chunk, PagedLoop, load, make_batch
from tests.engine.trees import TreeStep, batch_of
from tests.support.guesser import Guesser
from tests.support.mock_engine import FreeRows, open_engine, run_to_end
from tests.support.tiny_models import make_tiny_model

SPLITS = Splits(64, 4)
BUCKETS = (4, 8, 16, 32)
SIZES = DecodeSizes(8, 128, 16)
TREE = Draft((11, 12, 13, 14, 15), (-1, 0, 0, -1, 3), (1.0,) * 5)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """QK-norm, a window in one of two layers."""
    kind, overrides = KINDS["qwen3-layer-types"]
    return load(
        make_tiny_model(tmp_path_factory.mktemp("qwen3"), kind, **overrides), backend="torch", device=DEVICE, dtype="float32"
    )


def model_of(
    loaded: LoadedModel, buckets: Sequence[int] = BUCKETS, recorder: Counted | None = None, sizes: DecodeSizes | None = None
) -> TritonModel:
    assert isinstance(loaded.model, DecoderModel)
    return TritonModel(loaded.model, sizes, token_buckets=buckets, recorder=recorder, splits=SPLITS)


def test_buckets() -> None:
    assert token_buckets(512, 218_000_000) == (4, 8, 16, 32, 64, 128, 256)  # 8B: 199 tokens, and what is missing to a tile
    assert token_buckets(512, 61_000_000) == (4, 8, 16, 32, 64, 128, 256, 512)  # 1B: 712 tokens
    assert token_buckets(2048, 61_000_000)[-2:] == (512, 768)
    assert token_buckets(21, 1000) == (4, 8, 16, 24)
    assert token_buckets(1, 10**12) == (4,)
    assert hidden_at(436_000_000) * 2 == pytest.approx(hidden_at(218_000_000), abs=2)


def steps(loop: PagedLoop) -> list[StepBatch]:
    """A chunk; a longer one beside a decode row; a drafted tree beside a chunk without logits; the ends of all, in few tokens."""
    one, other = loop.table(70), loop.table(60)
    tree = batch_of(TreeStep(one, prompt(1, 5), 31, TREE).parts(loop.block_size))
    return [
        make_batch([Chunk(one, prompt(11), 0)], 16),
        make_batch([Chunk(one, prompt(19, 1), 11, every_row=True), Chunk(other, [3], 0)], 16),
        make_batch([Chunk(one, [5], 30), Chunk(other, prompt(30, 2), 1, wanted=False)], 16),
        tree,
        make_batch([Chunk(other, prompt(2, 4), 31)], 16),
    ]


def outcomes(loaded: LoadedModel, model: TritonModel) -> list[Tensor]:
    """Of each step logits, hidden states, and the pool behind it."""
    loop, found = PagedLoop(replace(loaded, model=model), num_blocks=16), []
    loop.pool.tensor.copy_(torch.randn(loop.pool.tensor.shape, generator=torch.Generator().manual_seed(1)))
    for batch in steps(loop):
        hidden = torch.empty((len(batch.logits_rows), loaded.config.hidden_size), device=DEVICE)
        found += [model.forward(batch, loop.pool.tensor, None, hidden).clone(), hidden, loop.pool.tensor.clone()]
    return found


def test_steps_have_the_bits_of_the_launches(loaded: LoadedModel) -> None:
    """Also steps after others of another bucket, whose padding holds what those left."""
    recorder = Counted()
    recorded, launched, exact = (
        outcomes(loaded, model_of(loaded, buckets, of)) for buckets, of in ((BUCKETS, recorder), (BUCKETS, None), ((), None))
    )
    num_pieces = loaded.config.num_layers + 1
    assert (recorder.num_recorded, recorder.num_replayed) == (4 * num_pieces, 5 * num_pieces)  # four of the buckets were met
    assert all(map(torch.equal, recorded, launched))
    for one, other in zip(launched, exact, strict=True):  # cuBLAS minds the number of rows
        assert torch.equal(one, other) if DEVICE == "cpu" else torch.allclose(one, other, atol=1e-3, rtol=0)


def test_wider_steps_are_launched_as_they_are(loaded: LoadedModel) -> None:
    recorder = Counted()
    model = model_of(loaded, (4,), recorder)
    loop, other = (PagedLoop(replace(loaded, model=each), num_blocks=16) for each in (model, model_of(loaded, ())))
    found, expected = (each.step([Chunk(each.table(9), prompt(5), 0)]) for each in (loop, other))
    assert recorder.num_recorded == 0
    assert torch.equal(found, expected)


class Told(LayerReadiness):
    """Keeps, for each layer that it is told of, whether that layer's keys are in the pool and the next one's are not."""

    def __init__(self, pool: Tensor, slots: Tensor) -> None:
        super().__init__(len(pool))
        self.every = 1
        self._keys, self._slots = pool.flatten(2, 3)[:, 0], slots
        self.states: list[list[bool]] = []

    def layer_done(self, index: int) -> None:
        super().layer_done(index)
        self.states.append([not bool(keys[self._slots].isnan().any()) for keys in self._keys])


def test_layers_are_told_of_between_the_graphs(loaded: LoadedModel) -> None:
    model = model_of(loaded, recorder=Counted())
    loop = PagedLoop(replace(loaded, model=model), num_blocks=16)
    model.prepare(loop.pool.tensor)
    batch = make_batch([Chunk(loop.table(9), prompt(9), 0)], 16)
    told = Told(loop.pool.tensor, batch.slot_mapping)
    model.forward(batch, loop.pool.tensor, told)
    assert told.states == [[True, False], [True, True]]


def test_all_are_recorded_ahead_and_nothing_is_written(loaded: LoadedModel) -> None:
    recorder = Counted()
    model = model_of(loaded, (4, 8), recorder, SIZES)
    loop = PagedLoop(replace(loaded, model=model), num_blocks=16)
    model.prepare(loop.pool.tensor)
    num_recorded = len(SIZES.buckets) + 2 * (loaded.config.num_layers + 1)
    assert recorder.num_recorded == num_recorded
    assert bool(loop.pool.tensor.isnan().all())
    loop.step([Chunk(loop.table(9), prompt(5), 0)])
    assert recorder.num_recorded == num_recorded


def test_greedy_tokens_of_an_engine(loaded: LoadedModel, tmp_path: Path) -> None:
    """Chunks beside decode rows, a cached prefix, a preemption: what the reference draws."""
    recorder = Counted()
    expected, _, _ = answers(loaded, tmp_path, num_blocks=64)
    model = model_of(loaded, (8, 16, 24), recorder, SIZES)
    found, num_preemptions, num_hits = answers(replace(loaded, model=model), tmp_path, num_blocks=6)
    assert found == expected
    assert (num_preemptions > 0, num_hits > 0, recorder.num_replayed > 20) == (True, True, True)


class Known(Guesser):
    """Guesses what another engine drew, or something else."""

    def __init__(self, answers: Mapping[str, Sequence[int]], vocab_size: int) -> None:
        super().__init__(0.6, branches=True, seed=3)
        self._answers, self.vocab_size = answers, vocab_size

    def truth(self, sequence: EngineSequence, output: list[int]) -> int:
        known = self._answers[sequence.group.request.request_id]
        return known[len(output)] if len(output) < len(known) else 0


def test_greedy_tokens_of_drafted_trees(loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verified beside a prompt's chunks: guesses cost steps, never tokens."""
    monkeypatch.setattr(engine_module, "measure_curve", lambda *_: FreeRows((1,), (1.0,)))
    config = EngineConfig(model=str(tmp_path), num_blocks=16, max_num_batched_tokens=24, max_context=64, device=DEVICE)
    prompts = {"a": prompt(5), "b": prompt(30, 1)}
    found: dict[str, Sequence[int]] = {}
    num_steps = []
    for proposers, model in (((), loaded.model), ((True,), model_of(loaded, (4, 8, 16, 24), Counted(), SIZES))):
        guessers = [Known(dict(found), loaded.config.vocab_size)] if proposers else []
        engine = open_engine(config, replace(loaded, model=model), guessers)
        for name, tokens in prompts.items():
            assert engine.add(EngineRequest(name, tuple(tokens), SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)))
        collector = run_to_end(engine)
        before, found = found, {name: collector.answer(name).token_ids for name in prompts}
        num_steps.append(engine.stats().num_steps)
    assert found == before
    assert num_steps[1] < num_steps[0]


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_steps_of_quantized_weights(form: str, tmp_path: Path) -> None:
    """Products in words have the same kernels for a bucket as for the tokens in it."""
    folder = make_tiny_model(tmp_path, num_hidden_layers=1)
    quantized = load(folder, backend="triton", device=DEVICE, dtype="float32", quantization=form, max_num_batched_tokens=40)
    assert isinstance(quantized.model, TritonModel)
    assert quantized.model.token_buckets == (4, 8, 16, 32, 40)
    plain = replace(quantized, model=quantized.model.decoder)
    recorded, exact = (outcomes(plain, model_of(plain, *each)) for each in ((BUCKETS, Counted()), ((), None)))
    for one, other in zip(recorded, exact, strict=True):
        assert torch.equal(one, other) if DEVICE == "cpu" else torch.allclose(one, other, atol=1e-3, rtol=0)


@pytest.mark.gpu
def test_graphs_of_a_wider_model(tmp_path: Path) -> None:
    """bfloat16 through cuBLAS and the tensor cores: the graphs' bits are those of the same launches."""
    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 4}
    folder = make_tiny_model(tmp_path, num_hidden_layers=4, initializer_range=0.03, **sizes)
    loaded = load(folder, backend="torch", device=DEVICE, dtype="bfloat16")
    recorder = Counted()
    recorded, launched = (outcomes(loaded, model_of(loaded, BUCKETS, of)) for of in (recorder, None))
    assert recorder.num_replayed > 0
    assert all(map(torch.equal, recorded, launched))
