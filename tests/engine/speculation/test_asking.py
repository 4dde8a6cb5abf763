"""A proposer that runs a model is asked where it pays, seldom where it does not, and found again when it begins to."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_

from pdmesh.engine.engine import Engine
from pdmesh.engine.speculation.draft import Draft
from pdmesh.engine.speculation.proposer import Ask
from pdmesh.engine.speculation.proposer_gating import FIRST_PAUSE, LONGEST_PAUSE, PROBE, ProposerRecord
from tests.support.engine_requests import assert_whole, request
from tests.support.guesser import Guesser
from tests.support.mock_engine import make_engine


class Dear(Guesser):
    """Counts how often it is asked."""

    is_free = False
    num_calls = 0

    def propose(self, asks: Sequence_[Ask]) -> list[Draft]:
        self.num_calls += 1
        return super().propose(asks)


def calls_in(engine: Engine, dear: Dear, num_steps: int) -> int:
    """One request after the other, for so many steps that decode."""
    before, left = dear.num_calls, num_steps
    while left:
        if not engine.has_work:
            engine.add(request(max_tokens=50))
        result = engine.step()
        left -= bool(result and result.work.num_decoding)
    return dear.num_calls - before


def test_right_guesses_are_asked_for_at_every_step() -> None:
    dear = Dear(1.0)
    assert calls_in(make_engine(proposers=[dear]), dear, 200) > 150


def test_wrong_ones_seldom() -> None:
    dear = Dear(0.0)
    engine = make_engine(proposers=[dear])
    calls_in(engine, dear, 1500)
    assert 0 < calls_in(engine, dear, 4 * LONGEST_PAUSE) <= 5 * (PROBE + 1)


def test_who_becomes_right_is_found_again() -> None:
    dear = Dear(0.0)
    engine = make_engine(proposers=[dear])
    calls_in(engine, dear, 1500)
    dear.right = 1.0
    calls_in(engine, dear, 4 * LONGEST_PAUSE)
    assert calls_in(engine, dear, 200) > 150


def test_a_free_guess_that_promises_as_much_saves_the_question() -> None:
    dear, free = Dear(1.0), Guesser(1.0, seed=1)
    engine = make_engine(proposers=[free, dear])
    assert calls_in(engine, dear, 200) < 140  # where the free draft is short, and so a longer one is hoped for
    while engine.step() is not None:
        pass
    assert_whole(engine)


def test_pauses_go_on_while_nobody_is_asked() -> None:
    """Steps in which looking itself does not pay count as well: else a pause of 256 became one of 2300."""
    habit = ProposerRecord()
    habit.decide(gain=0.0, price=0.0)
    for _ in range(FIRST_PAUSE):
        assert not habit.is_next
        habit.rest()
    assert habit.is_next
    habit.rest()
    assert habit.is_due()
