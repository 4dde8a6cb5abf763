"""A proposer may raise, or give anything at all for a draft: the tokens are those of the oracle, and it is not asked again."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Sequence_
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdmesh.engine.scheduler.sequence import Sequence
from pdmesh.engine.speculation.draft import Draft, Verified
from pdmesh.engine.speculation.guarded_proposer import GuardedProposer
from pdmesh.engine.speculation.handover import packed
from pdmesh.engine.speculation.ngrams.prompt_lookup import PromptLookup
from pdmesh.engine.speculation.proposer import Ask
from tests.engine.speculation.copying import decoding
from tests.support.engine_requests import PROMPT, assert_answers, assert_whole, behind, push, request
from tests.support.guesser import Guesser
from tests.support.mock_engine import VOCAB_SIZE, make_engine, run_to_end

HIDDEN_SIZE = 4  # of the mock model
FAULTY_CALL = 4


class Faulty(Guesser):
    """Right, until its fourth call of `method`. It is told of every fault that it is called at all afterwards."""

    def __init__(self, method: str, is_free: bool) -> None:
        super().__init__(1.0, wants_hidden=True)
        self.is_free = is_free
        self._method, self._left = method, FAULTY_CALL
        self.num_after = 0

    def propose(self, asks: Sequence_[Ask]) -> list[Draft]:
        self._called("propose")
        return super().propose(asks)

    def learn(self, sequence: Sequence, verified: Verified, hidden: Tensor | None) -> None:
        self._called("learn")
        super().learn(sequence, verified, hidden)

    def restore(self, sequence: Sequence, hidden: Tensor) -> None:
        if self._method == "restore":
            self._left = 1
        self._called("restore")

    def _called(self, method: str) -> None:
        self.num_after += self._left <= 0
        self._left -= method == self._method
        if not self._left:
            raise RuntimeError("as told")


class Making(Guesser):
    """Whatever `make(ask)` says is its draft, but for the first steps, in which it is right."""

    def __init__(self, make: Any, is_free: bool = True) -> None:
        super().__init__(1.0)
        self.is_free = is_free
        self._make, self.num_calls = make, 0

    def propose(self, asks: Sequence_[Ask]) -> list[Draft]:
        self.num_calls += 1
        return super().propose(asks) if self.num_calls < FAULTY_CALL else [self._make(ask) for ask in asks]


def of(token_ids: Sequence_[Any], parents: Sequence_[Any], chances: Sequence_[Any]) -> Draft:
    return Draft(tuple(token_ids), tuple(parents), tuple(chances), "guesser")


def chain(*token_ids: Any, chance: Any = 0.9) -> Draft:
    return of(token_ids, range(-1, len(token_ids) - 1), [chance] * len(token_ids))


BROKEN = {
    "no numbers": lambda ask: chain(1, 2, chance=float("nan")),
    "too likely": lambda ask: chain(1, 2, chance=2.0),
    "endless": lambda ask: chain(1, chance=float("inf")),
    "less than never": lambda ask: chain(1, chance=-0.5),
    "chances are words": lambda ask: chain(1, chance="likely"),
    "no such token": lambda ask: chain(1, VOCAB_SIZE),
    "below the first token": lambda ask: chain(-1),
    "half a token": lambda ask: chain(1.5),
    "too deep": lambda ask: chain(*[1] * (ask.max_depth + 1)),
    "too many": lambda ask: of([1] * (ask.max_tokens + 1), [-1] * (ask.max_tokens + 1), [0.5] * (ask.max_tokens + 1)),
    "parents behind children": lambda ask: of([1, 2], [1, -1], [0.9, 0.9]),
    "no such parent": lambda ask: of([1], [-2], [0.9]),
    "too few chances": lambda ask: of([1, 2], [-1, 0], [0.9]),
    "somebody else's": lambda ask: replace(chain(1), proposer="other"),
    "no draft": lambda ask: None,
}


def assert_unharmed(guesser: Guesser) -> None:
    """Twice: what is left behind by the first requests does not harm the next ones."""
    engine = make_engine(proposers=[guesser, PromptLookup()])
    for name in "ab":
        requests = [request(f"{name}{i}", PROMPT[: 3 + i], max_tokens=20, temperature=float(i)) for i in range(2)]
        assert all(map(engine.add, requests))
        assert_answers(run_to_end(engine), *requests)
        assert_whole(engine)
    speculation = engine.stats().speculation
    assert speculation is not None and speculation.failed == ("guesser",)


@pytest.mark.parametrize("is_free", [True, False])
@pytest.mark.parametrize("method", ["propose", "learn"])
def test_one_that_raises_is_not_called_again(method: str, is_free: bool, caplog: pytest.LogCaptureFixture) -> None:
    faulty = Faulty(method, is_free)
    with caplog.at_level(logging.ERROR):
        assert_unharmed(faulty)
    assert faulty.num_after == 0
    [record] = [record for record in caplog.records if record.exc_info]
    assert "guesser" in record.getMessage()


def test_one_that_raises_when_it_takes_over() -> None:
    faulty, each = Faulty("restore", is_free=True), request(max_tokens=12)
    engine = make_engine(proposers=[faulty])
    first_tokens = push(engine, each)
    engine.start(each.request_id, first_tokens, draft_states={0: packed(torch.ones(HIDDEN_SIZE))})
    assert_answers(run_to_end(engine), behind(each, first_tokens))
    assert_whole(engine)
    assert faulty.num_after == 0
    assert not faulty.learned


@pytest.mark.parametrize("is_free", [True, False])
@pytest.mark.parametrize("broken", BROKEN)
def test_one_whose_drafts_are_broken_is_not_asked_again(broken: str, is_free: bool) -> None:
    making = Making(BROKEN[broken], is_free)
    assert_unharmed(making)
    assert making.num_calls == FAULTY_CALL


def test_too_few_drafts() -> None:
    class Short(Guesser):
        def propose(self, asks: Sequence_[Ask]) -> list[Draft]:
            return super().propose(asks)[1:]

    assert_unharmed(Short(1.0))


def test_a_chance_that_was_rounded_up_is_no_fault() -> None:
    faults: list[str] = []
    door = GuardedProposer(Making(lambda ask: chain(1, chance=1.0 + 1e-9)), VOCAB_SIZE, faults.append)
    for _ in range(FAULTY_CALL):
        drafts = door.propose([Ask(decoding([1], [2]), 4, 4)])
    assert drafts[0].chances == (1.0,) and not faults


NUMBERS = st.one_of(st.integers(-3, VOCAB_SIZE + 3), st.floats(-1, 2), st.none())


@settings(max_examples=200)
@given(st.lists(NUMBERS, max_size=6), st.lists(NUMBERS, max_size=6), st.lists(st.one_of(st.floats(0, 1), NUMBERS), max_size=6))
def test_what_passes_the_door_is_a_tree_of_tokens(token_ids: list[Any], parents: list[Any], chances: list[Any]) -> None:
    making = Making(lambda ask: of(token_ids, parents, chances))
    making.num_calls = FAULTY_CALL
    door = GuardedProposer(making, VOCAB_SIZE, lambda name: None)
    [draft] = door.propose([Ask(decoding([1], [2]), 3, 5)])
    assert len(draft) <= 5 and max(draft.depths, default=0) <= 3
    assert all(isinstance(token_id, int) and 0 <= token_id < VOCAB_SIZE for token_id in draft.token_ids)
    assert all(draft.branch(index)[-1] == index for index in range(len(draft)))
    assert all(0.0 <= chance <= 1.0 for chance in draft.cumulative)
