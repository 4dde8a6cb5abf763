"""Weights that are replaced while requests run: each request is wholly of the version with which it began."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.errors import UnknownWeights, WeightsRefused
from pdmesh.engine.kernels.cpu.model import NativeModel
from pdmesh.engine.loader.loader import LoadedModel, load_model
from pdmesh.engine.request import EngineRequest, Pooling
from pdmesh.engine.weight_versions import GRACE_S
from pdmesh.sampling_params import SamplingParams
from pdmesh.text.block_hash import hash_block
from tests.engine.backends import BACKENDS
from tests.support.mock_engine import Collector, open_engine, run_to_end
from tests.support.tiny_models import VOCAB_SIZE, make_tiny_model

PROMPTS = [tuple((seed * 31 + 7 * index) % VOCAB_SIZE for index in range(length)) for seed, length in ((1, 5), (2, 40), (3, 70))]
MAX_TOKENS = 20


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(frozen=True)
class Versions:
    """Folders of a model with two sets of weights, and the settings to load them with."""

    old: Path
    new: Path
    backend: str

    def config(self, folder: Path, **settings: object) -> EngineConfig:
        given = {"num_blocks": 128, "max_num_batched_tokens": 48, "speculation": "none", **settings}
        return EngineConfig(model=str(folder), backend=self.backend, dtype="float32", num_threads=1, **given)  # type: ignore[arg-type]

    def load(self, folder: Path, beside: LoadedModel | None = None) -> LoadedModel:
        present = None if beside is None else beside.model
        return load_model(self.config(folder), beside=present if isinstance(present, NativeModel) else None)

    def answers(self, folder: Path, **settings: object) -> list[tuple[int, ...]]:
        """Of an engine that has these weights alone."""
        engine = open_engine(self.config(folder, **settings), self.load(folder))
        for index in range(len(PROMPTS)):
            engine.add(request(str(index), index, engine.weights_hash))
        collector = run_to_end(engine)
        return [collector.answer(str(index)).token_ids for index in range(len(PROMPTS))]


@pytest.fixture(scope="module", params=BACKENDS)
def versions(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Versions]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("versions")
    yield Versions(make_tiny_model(folder / "old", seed=1), make_tiny_model(folder / "new", seed=2), request.param)
    torch.set_num_threads(num_threads)


def request(request_id: str, index: int, weights_hash: str, **changes: object) -> EngineRequest:
    """As a worker makes one: the root of its blocks is of the weights."""
    sampling = SamplingParams(temperature=0.8, seed=3 + index, max_tokens=MAX_TOKENS, ignore_eos=True)
    asked = EngineRequest(request_id, PROMPTS[index], sampling, cache_root=weights_hash.encode(), weights_hash=weights_hash)
    return replace(asked, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_steps", [0, 1, 3, 9])
def test_requests_end_on_the_weights_that_they_began_with(versions: Versions, num_steps: int) -> None:
    old, new = versions.answers(versions.old), versions.answers(versions.new)
    assert old != new
    loaded = versions.load(versions.old)
    engine = open_engine(versions.config(versions.old), loaded)
    for index in range(len(PROMPTS)):
        engine.add(request(f"old {index}", index, engine.weights_hash))
    collector = Collector()
    for _ in range(num_steps):
        collector.take(engine.step())
    engine.update_weights(versions.load(versions.new, loaded), str(versions.new))
    for index in range(len(PROMPTS)):
        engine.add(request(f"new {index}", index, engine.weights_hash))
    run_to_end(engine, collector)
    assert [collector.answer(f"old {index}").token_ids for index in range(len(PROMPTS))] == old
    assert [collector.answer(f"new {index}").token_ids for index in range(len(PROMPTS))] == new
    assert engine.stats().num_free_blocks == 128
    assert engine.config.model == str(versions.new)


def test_twenty_times_while_requests_come(versions: Versions) -> None:
    answers = {folder: versions.answers(folder) for folder in (versions.old, versions.new)}
    loaded = versions.load(versions.old)
    present, engine = versions.old, open_engine(versions.config(versions.old, num_blocks=24), loaded)
    expected, collector = dict[str, tuple[int, ...]](), Collector()
    for turn in range(20):
        for index in range(len(PROMPTS)):
            name = f"{turn} {index}"
            if engine.add(request(name, index, engine.weights_hash)):
                expected[name] = answers[present][index]
        for _ in range(5):
            collector.take(engine.step())
        present = versions.new if present == versions.old else versions.old
        loaded = versions.load(present, loaded)
        engine.update_weights(loaded, str(present))
    run_to_end(engine, collector)
    assert len(expected) >= 30
    assert {name: collector.answer(name).token_ids for name in expected} == expected
    assert engine.stats().num_preemptions > 0, "also those that are computed again"
    engine.check_integrity()


def test_a_reservation_goes_on_with_its_weights(versions: Versions) -> None:
    (old, *_), (new, *_) = versions.answers(versions.old), versions.answers(versions.new)
    loaded = versions.load(versions.old)
    engine = open_engine(versions.config(versions.old), loaded)
    before = request("a", 0, engine.weights_hash)
    engine.reserve(before)
    engine.update_weights(versions.load(versions.new, loaded), str(versions.new))
    engine.run_local("a", before)
    engine.add(request("b", 0, engine.weights_hash))
    collector = run_to_end(engine)
    assert (collector.answer("a").token_ids, collector.answer("b").token_ids) == (old, new)


def test_embeddings_are_of_the_version(versions: Versions) -> None:
    def embedded(engine: Engine) -> tuple[float, ...]:
        engine.add(request("e", 1, engine.weights_hash, pooling=Pooling.MEAN, sampling=SamplingParams(max_tokens=1)))
        while (result := engine.step()) is not None:
            for update in result.updates:
                if update.pooled:
                    return update.pooled
        raise AssertionError("no embedding")

    alone = embedded(open_engine(versions.config(versions.new), versions.load(versions.new)))
    loaded = versions.load(versions.old)
    engine = open_engine(versions.config(versions.old), loaded)
    assert embedded(engine) != alone
    run_to_end(engine)
    engine.update_weights(versions.load(versions.new, loaded), str(versions.new))
    assert embedded(engine) == alone


def test_a_version_without_requests_is_dropped_after_a_while(versions: Versions) -> None:
    clock, loaded = Clock(), versions.load(versions.old)
    engine = Engine(versions.config(versions.old), hash_block=hash_block, loaded=loaded, clock=clock)
    old = engine.weights_hash
    engine.update_weights(versions.load(versions.new, loaded), str(versions.new))
    engine.step()
    engine.add(request("late", 0, old))
    clock.now_s += GRACE_S + 1
    assert run_to_end(engine).answer("late").token_ids == versions.answers(versions.old)[0]
    engine.step()
    with pytest.raises(UnknownWeights):
        engine.add(request("too late", 0, old))
    with pytest.raises(UnknownWeights):
        engine.add(request("of nowhere", 0, "f" * 64))


def test_the_first_version_is_freed(versions: Versions) -> None:
    clock, loaded = Clock(), versions.load(versions.old)
    engine = Engine(versions.config(versions.old), hash_block=hash_block, loaded=loaded, clock=clock)
    first = weakref.ref(loaded.model)
    engine.add(request("a", 0, engine.weights_hash))
    engine.step()
    engine.update_weights(versions.load(versions.new, loaded), str(versions.new))
    del loaded
    run_to_end(engine)
    assert first() is not None, "its request needed it"
    clock.now_s += GRACE_S + 1
    engine.step()
    gc.collect()
    assert first() is None
    engine.add(request("b", 0, engine.weights_hash))
    assert run_to_end(engine).answer("b").token_ids == versions.answers(versions.new)[0]


def test_another_model_is_refused_by_name(versions: Versions, tmp_path: Path) -> None:
    loaded = versions.load(versions.old)
    engine = open_engine(versions.config(versions.old), loaded)
    larger = make_tiny_model(tmp_path / "larger", num_hidden_layers=3)
    with pytest.raises(WeightsRefused, match="num_layers"):
        engine.update_weights(versions.load(larger), str(larger))
    assert engine.weights_hash == loaded.weights_hash
