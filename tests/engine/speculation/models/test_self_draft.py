"""The first layers of the target as its draft, in the target's own pool: they draft as they would alone, and disturb nothing."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from pdmesh.engine.engine import Engine
from pdmesh.engine.loader.loader import LoadedModel
from pdmesh.engine.request import EngineRequest
from pdmesh.engine.sampling.sampler import Sampler
from pdmesh.engine.speculation.draft import NOTHING
from pdmesh.engine.speculation.draft_models.kv import TargetKV
from pdmesh.engine.speculation.draft_models.loading import self_draft
from pdmesh.engine.speculation.draft_models.proposer import ModelDraft
from pdmesh.text.grammar import GrammarCompiler
from pdmesh.text.tokenizer import Tokenizer
from tests.engine.backends import BACKENDS
from tests.engine.speculation.models.driver import (
    DEPTH,
    Oracle,
    count_passes,
    engine_of,
    first_layers,
    go_on,
    load_tiny,
    propose,
    request,
    room_of,
)
from tests.support.mock_engine import Collector, run_to_end
from tests.support.tiny_models import IM_END, VOCAB_SIZE, make_tiny_model, write_byte_tokenizer

NUM_LAYERS = 3


@pytest.fixture(scope="module", params=BACKENDS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = make_tiny_model(tmp_path_factory.mktemp("target"), num_hidden_layers=NUM_LAYERS)
    return load_tiny(folder, request.param)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(256), k=length))


def drafting(engine: Engine, loaded: LoadedModel, num_layers: int) -> ModelDraft:
    settings = {"eos_token_ids": engine.eos_token_ids, "max_context": loaded.config.max_context}
    return self_draft(loaded.model, num_layers, engine.kv.tensor, Sampler(), room_of(engine), **settings)  # type: ignore[arg-type]


def requests() -> list[EngineRequest]:
    shared = prompt(36, 1)
    return [
        request("greedy", prompt(3)),
        request("sampled", shared, temperature=1.0),
        request("shared", (*shared[:33], 7), temperature=0.7, top_p=0.9),
        request("penalized", prompt(15, 2), repetition_penalty=1.3),
        request("choices", prompt(21, 3), temperature=1.0, n=2),
    ]


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("num_blocks", [11, 128])
def test_it_drafts_what_the_first_layers_alone_would_and_no_token_changes(
    loaded: LoadedModel, num_layers: int, num_blocks: int
) -> None:
    undisturbed = engine_of(loaded)
    assert all(map(undisturbed.add, requests()))
    expected = run_to_end(undisturbed)
    engine = engine_of(loaded, num_blocks=num_blocks)
    proposer, oracle = drafting(engine, loaded, num_layers), Oracle(first_layers(loaded, num_layers))
    assert all(map(engine.add, requests()))
    collector, chance, num_drafts = Collector(), random.Random(4), 0
    while go_on(engine, collector, chance.choice((1, 1, 2, 3))):
        for sequence, draft in propose(engine, proposer).items():
            if draft is not NOTHING:
                num_drafts += 1
                assert draft.proposer == "self_draft"
                assert draft.token_ids == oracle.draft(sequence, len(draft), engine.eos_token_ids)
    assert num_drafts > 10
    assert {key: collector.answer(*key) for key in collector.choices} == {key: expected.answer(*key) for key in expected.choices}
    assert (engine.stats().num_preemptions > 0) == (num_blocks == 11)
    assert engine.stats().num_free_blocks == num_blocks


def test_behind_tokens_that_a_grammar_forced(loaded: LoadedModel, tmp_path: Path) -> None:
    """The target has computed none of them yet."""
    write_byte_tokenizer(tmp_path)
    compiler = GrammarCompiler(Tokenizer.load(tmp_path).to_json(), VOCAB_SIZE, {IM_END})
    grammar = compiler.compile("regex", "([a-h], and then comes ){4}")
    engine = engine_of(loaded)
    proposer, oracle = drafting(engine, loaded, 1), Oracle(first_layers(loaded, 1))
    plain = request("g", prompt(12), temperature=1.2, max_tokens=80, ignore_eos=False)
    engine.add(replace(plain, grammar=grammar))
    num_forced = 0
    while go_on(engine, Collector(), 1):
        for sequence, draft in propose(engine, proposer, 20).items():
            assert draft.token_ids == oracle.draft(sequence, len(draft), engine.eos_token_ids)
            assert grammar.first_stray([*sequence.output, *draft.token_ids]) is None
            num_forced += sequence.num_remaining > 10 and len(draft) == 20
    assert num_forced > 1


def test_nothing_is_computed_but_what_is_drafted(loaded: LoadedModel) -> None:
    """The KV of the first layers is there for all that the target has computed, kept or not by itself."""
    engine = engine_of(loaded)
    proposer = drafting(engine, loaded, 1)
    passes = count_passes(proposer)
    engine.add(request("r", prompt(50)))
    for _ in range(3):
        go_on(engine, Collector(), 2)
        propose(engine, proposer)
    assert passes == [1] * DEPTH * 3
    assert proposer.kv.num_bytes == 0


def test_all_layers_are_always_right(loaded: LoadedModel) -> None:
    each = request("r", prompt(20), temperature=1.0)
    undisturbed = engine_of(loaded)
    undisturbed.add(each)
    output = run_to_end(undisturbed).answer("r").token_ids
    engine = engine_of(loaded)
    settings = {"eos_token_ids": engine.eos_token_ids, "max_context": loaded.config.max_context}
    proposer = ModelDraft("all", loaded.model, TargetKV(engine.kv.tensor), Sampler(), room_of(engine), **settings)  # type: ignore[arg-type]
    engine.add(each)
    for num_steps in (1, 3, 1, 5):
        go_on(engine, Collector(), num_steps)
        [(sequence, draft)] = propose(engine, proposer).items()
        known = len(sequence.output)
        assert draft.token_ids == output[known : known + DEPTH]


def test_a_part_of_the_layers_only(loaded: LoadedModel) -> None:
    engine = engine_of(loaded)
    for num_layers in (0, NUM_LAYERS):
        with pytest.raises(ValueError, match=f"self_draft_layers: {num_layers} is not allowed; give 1 to 2"):
            drafting(engine, loaded, num_layers)
