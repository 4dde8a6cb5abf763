"""A draft model beside an engine: its drafts are those of one that computes everything anew, whatever became of the blocks."""

from __future__ import annotations

import random
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pdmesh.engine.engine import Engine
from pdmesh.engine.loader.loader import LoadedModel
from pdmesh.engine.request import EngineRequest
from pdmesh.engine.sampling.grammar import Bits
from pdmesh.engine.scheduler.sequence import Sequence
from pdmesh.engine.speculation.draft import NOTHING, Draft, Verified
from pdmesh.engine.speculation.draft_models.loading import open_draft_model
from pdmesh.engine.speculation.draft_models.proposer import ModelDraft
from pdmesh.engine.speculation.guarded_proposer import allowed_on_tree
from pdmesh.engine.speculation.proposer import Ask, Proposer
from pdmesh.text.grammar import CompiledGrammar, GrammarCompiler, GrammarMatcher
from pdmesh.text.tokenizer import Tokenizer
from tests.engine.backends import BACKENDS
from tests.engine.speculation.models.driver import (
    DEPTH,
    Oracle,
    count_passes,
    decoding,
    engine_of,
    go_on,
    load_tiny,
    propose,
    request,
    room_of,
    target_of,
)
from tests.support.mock_engine import Collector, run_to_end
from tests.support.tiny_models import IM_END, VOCAB_SIZE, make_tiny_model


@dataclass(frozen=True)
class Pair:
    target: LoadedModel
    other: LoadedModel  # of other weights and another shape: mostly wrong
    folder: Path


@pytest.fixture(scope="module", params=BACKENDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = make_tiny_model(tmp_path_factory.mktemp("target"))
    small = make_tiny_model(
        tmp_path_factory.mktemp("draft"),
        seed=5,
        hidden_size=32,
        num_attention_heads=2,
        num_hidden_layers=1,
        num_key_value_heads=1,
    )
    return Pair(load_tiny(folder, request.param), load_tiny(small, request.param), folder)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(256), k=length))


def drafting(engine: Engine, loaded: LoadedModel, **settings: object) -> ModelDraft:
    return open_draft_model(loaded, target_of(engine), room_of(engine), **settings)  # type: ignore[arg-type]


def varied_requests() -> list[EngineRequest]:
    """Greedy and sampled, with penalties, filters, log-probabilities, several choices, a shared beginning, history."""
    shared = prompt(40, 1)
    return [
        request("greedy", prompt(3)),
        request("sampled", shared, temperature=1.0),
        request("filtered", (*shared[:33], 5, 6), temperature=0.8, top_p=0.9, top_k=20, min_p=0.01, seed=11),
        request("penalized", prompt(20, 2), repetition_penalty=1.4, frequency_penalty=0.3),
        request("hot", prompt(17, 3), temperature=1.5, presence_penalty=0.5, logprobs=2),
        request("choices", shared, temperature=1.0, n=3, max_tokens=12),
        request("resumed", prompt(31, 4), emitted=(prompt(9, 5),), temperature=0.7, min_tokens=20, ignore_eos=False),
    ]


def answers(loaded: LoadedModel, requests: list[EngineRequest]) -> dict[tuple[str, int], tuple[int, ...]]:
    """Whole outputs, without any proposer."""
    engine = engine_of(loaded)
    assert all(map(engine.add, requests))
    collector = run_to_end(engine)
    histories = {each.request_id: each.emitted[0] if each.emitted else () for each in requests}
    return {key: (*histories[key[0]], *collector.answer(*key).token_ids) for key in collector.choices}


@pytest.mark.parametrize("num_blocks", [14, 128])
def test_the_target_as_its_own_draft_is_always_right(pair: Pair, num_blocks: int) -> None:
    requests = varied_requests()
    outputs = answers(pair.target, requests)
    engine = engine_of(pair.target, num_blocks=num_blocks)
    proposer = drafting(engine, pair.target)
    assert all(map(engine.add, requests))
    collector, chance, lengths = Collector(), random.Random(1), []
    while go_on(engine, collector, chance.randint(1, DEPTH + 1)):
        for sequence, draft in propose(engine, proposer).items():
            output = outputs[sequence.group.request.request_id, sequence.choices[0]]
            known = len(sequence.output)
            assert draft.token_ids == output[known : known + len(draft)], sequence.group.request.request_id
            lengths.append(len(draft))
    assert {key: collector.answer(*key).token_ids for key in outputs} == {
        key: output[collector.choices[key].first_index :] for key, output in outputs.items()
    }
    assert lengths.count(DEPTH) > (len(lengths) // 2 if num_blocks == 128 else 5)
    assert (engine.stats().num_preemptions > 0) == (num_blocks == 14)


@pytest.mark.parametrize(("num_blocks", "catch_up_tokens"), [(128, 256), (128, 7), (14, 256), (14, 16)])
def test_another_model_drafts_what_it_would_compute_anew(pair: Pair, num_blocks: int, catch_up_tokens: int) -> None:
    """Blocks are shared, copied, lost by preemption and given to others; drafts are wrong and lie where known tokens come."""
    engine = engine_of(pair.target, num_blocks=num_blocks)
    proposer = drafting(engine, pair.other, catch_up_tokens=catch_up_tokens)
    oracle = Oracle(pair.other)
    assert all(map(engine.add, varied_requests()))
    collector, chance, num_drafts = Collector(), random.Random(2), 0
    while go_on(engine, collector, chance.choice((1, 1, 2, 3))):
        for sequence, draft in propose(engine, proposer).items():
            if draft is not NOTHING:
                num_drafts += 1
                assert draft.token_ids == oracle.draft(sequence, len(draft), engine.eos_token_ids)
    assert num_drafts > 10


class TestCatchingUp:
    def test_a_long_prompt_gets_nothing_until_the_budget_has_made_up_for_it(self, pair: Pair) -> None:
        engine = engine_of(pair.target)
        proposer = drafting(engine, pair.other, catch_up_tokens=30)
        passes = count_passes(proposer)
        engine.add(request("long", prompt(64)))
        go_on(engine, Collector(), 1)
        sizes = [[len(draft) for draft in propose(engine, proposer, 3).values()] for _ in range(4)]
        assert sizes == [[0], [0], [3], [3]]  # 64 of 65 known tokens, 30 at a time
        assert passes == [30, 30, 5, 1, 1, 1, 1, 1]

    def test_others_draft_meanwhile_and_come_first(self, pair: Pair) -> None:
        engine = engine_of(pair.target)
        proposer = drafting(engine, pair.other, catch_up_tokens=30)
        passes = count_passes(proposer)
        for each in (request("long", prompt(64)), request("a", prompt(5, 1)), request("b", prompt(8, 2))):
            engine.add(each)
        go_on(engine, Collector(), 3)
        assert [len(draft) for draft in propose(engine, proposer, 2).values()] == [0, 2, 2]
        assert passes[0] <= 30 + 2  # the budget, and each short one's last token
        assert passes[1:] == [2]

    def test_tokens_that_came_between_are_few_and_computed_together(self, pair: Pair) -> None:
        engine = engine_of(pair.target)
        proposer = drafting(engine, pair.other)
        engine.add(request("r", prompt(20)))
        go_on(engine, Collector(), 1)
        propose(engine, proposer, 1)
        go_on(engine, Collector(), 5)
        passes = count_passes(proposer)
        propose(engine, proposer, 1)
        assert passes == [5]

    def test_kept_tokens_are_not_computed_again(self, pair: Pair) -> None:
        """All drafted tokens are right: missing are the last of them, which was drawn but not computed, and the new one."""
        engine = engine_of(pair.target)
        proposer = drafting(engine, pair.target)
        engine.add(request("r", prompt(20)))
        go_on(engine, Collector(), 1)
        passes = count_passes(proposer)
        for _ in range(3):
            propose(engine, proposer, 4)
            go_on(engine, Collector(), 5)
        assert passes == [21, 1, 1, 1, 2, 1, 1, 1, 2, 1, 1, 1]

    def test_who_asks_again_without_a_step_gets_the_same(self, pair: Pair) -> None:
        engine = engine_of(pair.target)
        proposer = drafting(engine, pair.other)
        engine.add(request("r", prompt(20), temperature=1.0))
        go_on(engine, Collector(), 1)
        first = propose(engine, proposer)
        passes = count_passes(proposer)
        assert propose(engine, proposer) == first
        assert passes == [1] * DEPTH

    def test_a_prefix_that_another_sequence_left_serves_the_draft_too(self, pair: Pair) -> None:
        engine = engine_of(pair.target)
        proposer = drafting(engine, pair.other)
        shared = prompt(40, 9)
        engine.add(request("first", shared, max_tokens=3))
        go_on(engine, Collector(), 1)
        propose(engine, proposer)
        run_to_end(engine)
        passes = count_passes(proposer)
        engine.add(request("second", (*shared, 1, 2)))
        go_on(engine, Collector(), 1)
        propose(engine, proposer, 1)
        assert len(passes) == 1
        assert passes[0] <= 42 + 1 - 32  # two whole blocks, and of the third what nobody has overwritten


class TestBounds:
    def test_it_stops_where_the_chance_falls_below_what_is_asked(self, pair: Pair) -> None:
        engine = engine_of(pair.target)
        proposer = drafting(engine, pair.other)
        engine.add(request("r", prompt(20)))
        go_on(engine, Collector(), 1)
        [whole] = propose(engine, proposer, 8).values()
        for count in range(8):
            least = whole.cumulative[count]
            [draft] = propose(engine, proposer, 8, least).values()
            assert draft.token_ids == whole.token_ids[: count + 1]
            assert draft.chances == whole.chances[: count + 1]
        assert list(propose(engine, proposer, 8, 1.0).values()) == [Draft(proposer="draft_model")]

    def test_nothing_comes_behind_an_end(self, pair: Pair) -> None:
        [output] = answers(pair.target, [request("r", prompt(20))]).values()
        engine = engine_of(pair.target)
        proposer = drafting(engine, pair.target)
        stop = output[4]
        assert output.index(stop) == 4
        engine.add(request("r", prompt(20), stop_token_ids=(stop,)))
        go_on(engine, Collector(), 2)
        [draft] = propose(engine, proposer, 8).values()
        assert draft.token_ids == output[2:5]

    def test_the_fewer_of_depth_and_tokens(self, pair: Pair) -> None:
        engine = engine_of(pair.target)
        proposer = drafting(engine, pair.other)
        engine.add(request("r", prompt(20)))
        go_on(engine, Collector(), 1)
        [sequence] = decoding(engine)
        assert [len(proposer.propose([Ask(sequence, *bounds)])[0]) for bounds in ((3, 5), (5, 2), (1, 1))] == [3, 2, 1]

    def test_not_behind_its_own_context(self, pair: Pair, tmp_path: Path) -> None:
        """Positions 0 to 31: behind 30 known tokens those of the last one and two drafted ones; a third is drawn from them."""
        backend = "native" if "native" in pair.target.numeric_mode else "torch"
        near = load_tiny(make_tiny_model(tmp_path, max_position_embeddings=32), backend)
        engine = engine_of(pair.target)
        proposer = drafting(engine, near)
        engine.add(request("r", prompt(29)))
        lengths = []
        for _ in range(5):
            go_on(engine, Collector(), 1)
            lengths += [len(draft) for draft in propose(engine, proposer, 8).values()]
        assert lengths == [3, 2, 1, 0, 0]

    def test_no_room_no_draft(self, pair: Pair) -> None:
        """A block for drafts is taken while another stays free for each sequence that runs."""
        engine = engine_of(pair.target, num_blocks=3)
        proposer = drafting(engine, pair.other)
        engine.add(request("r", prompt(14), max_tokens=30))
        go_on(engine, Collector(), 1)
        assert [len(draft) for draft in propose(engine, proposer).values()] == [DEPTH]  # two of three blocks
        go_on(engine, Collector(), 15)
        assert [len(draft) for draft in propose(engine, proposer, 8).values()] == [0]
        assert engine.stats().num_free_blocks == 1

    def test_nothing_is_written_to_a_shared_block(self, pair: Pair) -> None:
        """Two choices have just parted, their last block is both of theirs; after the next step each has its own."""
        engine = engine_of(pair.target)
        proposer = drafting(engine, pair.target)
        engine.add(request("r", prompt(20), n=2, temperature=1.0))
        go_on(engine, Collector(), 1)
        assert [len(draft) for draft in propose(engine, proposer).values()] == [0, 0]
        go_on(engine, Collector(), 1)
        assert [len(draft) for draft in propose(engine, proposer).values()] == [DEPTH, DEPTH]

    def test_nobody_asks(self, pair: Pair) -> None:
        engine = engine_of(pair.target)
        assert drafting(engine, pair.other).propose([]) == []


def test_a_grammar_is_followed(pair: Pair) -> None:
    grammar = _grammar(pair)
    for loaded in (pair.target, pair.other):
        engine = engine_of(pair.target)
        proposer, oracle = drafting(engine, loaded), Oracle(loaded)
        engine.add(_constrained(grammar))
        num_drafts = 0
        while go_on(engine, Collector(), 1):
            for sequence, draft in propose(engine, proposer).items():
                assert draft.token_ids == oracle.draft(sequence, len(draft), engine.eos_token_ids)
                assert grammar.first_stray([*sequence.output, *draft.token_ids]) is None
                num_drafts += len(draft) > 0
        assert num_drafts > 3


def test_what_a_grammar_allows_behind_a_guess_is_found_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the draft; the step that verifies it looks behind the last guess at most."""
    num_found, original = 0, GrammarMatcher._find_allowed

    def counted(matcher: GrammarMatcher) -> Bits:
        nonlocal num_found
        num_found += 1
        return original(matcher)

    monkeypatch.setattr(GrammarMatcher, "_find_allowed", counted)
    engine, num_drafts = engine_of(pair.target), 0
    proposer = drafting(engine, pair.other)
    engine.add(_constrained(_grammar(pair)))
    while go_on(engine, Collector(), 1):
        for sequence, draft in propose(engine, proposer).items():
            if draft:
                before = num_found
                allowed_on_tree(sequence, draft)
                assert num_found <= before + 1
                num_drafts += 1
    assert num_drafts > 3


def _grammar(pair: Pair) -> CompiledGrammar:
    compiler = GrammarCompiler(Tokenizer.load(pair.folder).to_json(), VOCAB_SIZE, {IM_END})
    return compiler.compile("regex", "(yes|no|[a-f0-9]{6}), (maybe|never) [0-9]+")


def _constrained(grammar: CompiledGrammar) -> EngineRequest:
    return replace(request("g", prompt(12), temperature=1.2, max_tokens=30, ignore_eos=False), grammar=grammar)


class Scripted:
    """Guesses what it was told comes behind an output."""

    name = "scripted"
    is_free = True
    learns = True
    wants_hidden = False

    def __init__(self, output: tuple[int, ...], num_right: int) -> None:
        self.output, self.num_right = output, num_right
        self.learnt: list[Verified] = []

    def propose(self, asks: Sequence_[Ask]) -> list[Draft]:
        drafts = []
        for ask in asks:
            known = len(ask.sequence.output)
            guess = [
                token if i < self.num_right else (token + 1) % VOCAB_SIZE
                for i, token in enumerate(self.output[known : known + ask.max_depth])
            ]
            drafts.append(Draft.chain(guess, [0.5] * len(guess), self.name))
        return drafts

    def learn(self, sequence: Sequence, verified: Verified, hidden: object) -> None:
        self.learnt.append(verified)


class TestInnerProposer:
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize(("num_right", "num_passes"), [(0, 5), (2, 3), (4, 1), (9, 1)])
    def test_it_saves_passes_and_changes_no_draft(self, pair: Pair, temperature: float, num_right: int, num_passes: int) -> None:
        each = request("r", prompt(20), temperature=temperature)
        [output] = answers(pair.target, [each]).values()
        engine = engine_of(pair.target)
        inner: Proposer = Scripted(output, num_right)
        proposer = drafting(engine, pair.target, inner=inner)
        engine.add(each)
        go_on(engine, Collector(), 1)
        passes = count_passes(proposer)
        [draft] = propose(engine, proposer, 5).values()
        assert draft.token_ids == output[1:6]
        assert draft.proposer == "draft_model"
        assert len(passes) == num_passes
        go_on(engine, Collector(), 3)
        [draft] = propose(engine, proposer, 5).values()
        assert draft.token_ids == output[4:9]

    def test_it_stops_within_a_guess(self, pair: Pair) -> None:
        each = request("r", prompt(20))
        [output] = answers(pair.target, [each]).values()
        engine = engine_of(pair.target)
        engine.add(each)
        go_on(engine, Collector(), 1)
        [whole] = propose(engine, drafting(engine, pair.target), 5).values()
        proposer = drafting(engine, pair.target, inner=Scripted(output, 9))
        [draft] = propose(engine, proposer, 5, whole.cumulative[1]).values()
        assert draft.token_ids == whole.token_ids[:2]

    def test_it_learns(self, pair: Pair) -> None:
        engine = engine_of(pair.target)
        inner = Scripted((), 0)
        proposer = drafting(engine, pair.target, inner=inner)
        engine.add(request("r", prompt(20)))
        go_on(engine, Collector(), 1)
        [sequence] = decoding(engine)
        outcome = Verified(NOTHING, (3,))
        proposer.learn(sequence, outcome, None)
        assert inner.learnt == [outcome]
