"""Models that draft inside an engine: no token changes, and where the draft is right there are fewer steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.loader.loader import LoadedModel, load_model
from pdmesh.engine.request import EngineRequest
from pdmesh.engine.speculation.draft_models.kv import TargetKV, room_in
from pdmesh.engine.speculation.draft_models.loading import open_draft_model, self_draft
from pdmesh.engine.speculation.draft_models.proposer import ModelDraft
from tests.engine.backends import BACKENDS
from tests.engine.speculation.models.driver import count_passes, engine_of, request, speculate, target_of
from tests.support.mock_engine import open_engine, run_to_end
from tests.support.tiny_models import make_tiny_model

LENGTH = 4


@dataclass(frozen=True)
class Models:
    folder: Path
    target: LoadedModel
    other_folder: Path
    other: LoadedModel


@pytest.fixture(scope="module", params=BACKENDS)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    def load(folder: Path) -> LoadedModel:
        return load_model(EngineConfig(model=str(folder), backend=request.param, dtype="float32", num_threads=1))

    folder = make_tiny_model(tmp_path_factory.mktemp("target"))
    shape: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    other = make_tiny_model(tmp_path_factory.mktemp("draft"), seed=5, **shape)
    return Models(folder, load(folder), other, load(other))


def _same(engine: Engine, models: Models) -> ModelDraft:
    return open_draft_model(models.target, target_of(engine), _room(engine))


def _other(engine: Engine, models: Models) -> ModelDraft:
    return open_draft_model(models.other, target_of(engine), _room(engine))


def _first_layer(engine: Engine, models: Models) -> ModelDraft:
    return self_draft(models.target.model, 1, engine.kv.tensor, engine.sampler, _room(engine), **_limits(engine))  # type: ignore[arg-type]


def _all_layers(engine: Engine, models: Models) -> ModelDraft:
    kv = TargetKV(engine.kv.tensor)
    return ModelDraft("all", models.target.model, kv, engine.sampler, _room(engine), **_limits(engine))  # type: ignore[arg-type]


def _room(engine: Engine) -> Callable[..., bool]:
    return room_in(engine._allocator, lambda: len(engine._scheduler.running))


def _limits(engine: Engine) -> dict[str, object]:
    return {"eos_token_ids": engine.eos_token_ids, "max_context": 2048}


KINDS = {"same": _same, "other": _other, "first layer": _first_layer, "all layers": _all_layers}
RIGHT = ("same", "all layers")


def drafted(models: Models, kind: str, **settings: object) -> tuple[Engine, ModelDraft]:
    """An engine whose every step verifies drafts of this kind."""
    engine = engine_of(models.target, **settings)
    proposer = KINDS[kind](engine, models)
    proposer.is_free = True  # asked always, also where it does not pay
    speculate(engine, proposer, LENGTH)
    return engine, proposer


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(256), k=length))


def varied_requests() -> list[EngineRequest]:
    shared = prompt(40, 1)
    return [
        request("greedy", prompt(3)),
        request("sampled", shared, temperature=1.0, logprobs=1),
        request("filtered", (*shared[:33], 5, 6), temperature=0.8, top_p=0.9, top_k=20, min_p=0.01, seed=11),
        request("penalized", prompt(20, 2), repetition_penalty=1.4, frequency_penalty=0.3),
        request("choices", shared, temperature=1.0, n=3, max_tokens=12),
        request("resumed", prompt(31, 4), emitted=(prompt(9, 5),), temperature=0.7, min_tokens=20, ignore_eos=False),
    ]


def answers(engine: Engine, requests: list[EngineRequest]) -> dict[tuple[str, int], object]:
    assert all(map(engine.add, requests))
    collector = run_to_end(engine)
    engine.check_integrity()
    assert engine.stats().num_free_blocks == engine.stats().num_total_blocks
    return {key: collector.answer(*key) for key in collector.choices}


@pytest.mark.parametrize("num_blocks", [14, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_no_token_changes(models: Models, kind: str, num_blocks: int) -> None:
    expected = answers(engine_of(models.target), varied_requests())
    engine, _ = drafted(models, kind, num_blocks=num_blocks)
    assert answers(engine, varied_requests()) == expected
    assert (engine.stats().num_preemptions > 0) == (num_blocks == 14)
    assert engine.speculator is not None
    stats = engine.speculator.tally.stats()
    [counts] = stats.by_proposer.values()
    if kind in RIGHT:
        assert counts.kept == counts.verified
    assert sum(counts.verified) > (40 if num_blocks == 128 else 10)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", RIGHT)
def test_a_draft_that_is_always_right_gives_all_its_tokens_in_a_step(models: Models, kind: str, temperature: float) -> None:
    engine, proposer = drafted(models, kind)
    passes = count_passes(proposer)
    engine.add(request("r", prompt(20), temperature=temperature, max_tokens=1 + 4 * (LENGTH + 1)))
    run_to_end(engine)
    assert engine.stats().num_steps == 1 + 4
    catch_up = [21, *[1] * (LENGTH - 1)] if kind == "same" else [1] * LENGTH  # first of all the prompt; later nothing is lacking
    late = [2, *[1] * (LENGTH - 1)] if kind == "same" else [1] * LENGTH  # its own last token was drawn, but not computed
    assert passes == catch_up + 3 * late


def test_what_is_rejected_is_written_over(models: Models) -> None:
    """All that is lacking is the last known token, and before it at most a drafted one that was the last of its draft."""
    engine, proposer = drafted(models, "other")
    passes = count_passes(proposer)
    engine.add(request("r", prompt(20), temperature=1.0, max_tokens=30))
    assert engine.speculator is not None
    for num_steps in range(30):
        if engine.step() is None:
            break
        first = len(passes)
        engine.speculator.draft(engine._scheduler.running, has_waiting=False)
        assert not num_steps or all(count <= 2 for count in passes[first : first + 1])
    assert len(passes) > 50


@pytest.mark.parametrize("kind", ["other", "first layer"])
def test_a_draft_preempts_nobody(models: Models, kind: str) -> None:
    """Four blocks. The long one would draft into the last of them just before the short one needs it for its last two tokens."""
    requests = [request("long", prompt(22), max_tokens=20), request("short", prompt(8, 1), max_tokens=10)]
    for is_drafted in (False, True):
        engine = drafted(models, kind, num_blocks=4)[0] if is_drafted else engine_of(models.target, num_blocks=4)
        answers(engine, requests)
        assert engine.stats().num_preemptions == 0


@pytest.mark.parametrize(
    ("speculation", "names"),
    [("draft_model", ["draft_model"]), ("self_draft", ["self_draft"]), ("auto", ["prompt_lookup", "draft_model", "self_draft"])],
)
def test_by_name(models: Models, speculation: str, names: list[str]) -> None:
    """As an engine is told in its configuration, whatever guessing costs."""
    native = "native" in models.target.numeric_mode
    config = EngineConfig(
        model=str(models.folder),
        backend="native" if native else "torch",
        dtype="float32",
        num_threads=1,
        num_blocks=64,
        max_context=512,
        speculation=speculation,
        draft_model=str(models.other_folder),
        self_draft_layers=1,
        draft_length=LENGTH,
    )
    engine = open_engine(config, models.target)
    expected = answers(engine_of(models.target), varied_requests())
    assert answers(engine, varied_requests()) == expected
    assert engine.speculator is not None
    assert [proposer.name for proposer in engine.speculator._proposers] == names
    by_proposer = engine.speculator.tally.stats().by_proposer
    assert set(by_proposer) <= set(names)
    assert sum(sum(counts.verified) for counts in by_proposer.values()) > 40


def test_a_draft_model_is_no_second_member_of_the_table_of_cores(tmp_path: Path) -> None:
    """Workers of one machine lend each other cores by default: the process joins once, for the target."""
    folder = str(make_tiny_model(tmp_path / "model", "llama"))
    config = EngineConfig(
        model=folder,
        backend="native",
        dtype="float32",
        num_threads=1,
        num_blocks=64,
        max_context=512,
        speculation="draft_model",
        draft_model=folder,
        core_table=str(tmp_path / "cores"),
        draft_length=LENGTH,
    )
    loaded = load_model(config)
    engine = open_engine(config, loaded)
    expected = answers(engine_of(loaded), varied_requests())
    assert answers(engine, varied_requests()) == expected
    assert engine.speculator is not None and sum(engine.speculator.tally.stats().by_proposer["draft_model"].verified) > 0
