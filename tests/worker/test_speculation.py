"""What a worker says of its guesses: counts since start, and what steps give of late."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from pdmesh.engine.speculation.stats import ProposerStats, SpeculationStats, Tally
from pdmesh.worker.load import HALF_LIFE_ROWS, RecentDrafts, speculation_message


def stats(num_rows: int, *, verified_each: int, kept_each: int, drafting_s: float = 0.0) -> SpeculationStats:
    """Rows that were all alike."""
    proposer = ProposerStats((num_rows * verified_each, 0, 0), (num_rows * kept_each, 0, 0))
    return SpeculationStats(num_rows, num_rows, num_rows * (1 + kept_each), drafting_s, {"lookup": proposer})


def added(first: SpeculationStats, then: SpeculationStats) -> SpeculationStats:
    by_proposer = {
        name: ProposerStats(
            *(tuple(a + b for a, b in zip(*both, strict=True)) for both in zip(astuple(old), astuple(new), strict=True))
        )
        for (name, old), new in zip(first.by_proposer.items(), then.by_proposer.values(), strict=True)
    }
    return SpeculationStats(
        first.num_rows + then.num_rows,
        first.num_drafts + then.num_drafts,
        first.num_tokens + then.num_tokens,
        first.drafting_s + then.drafting_s,
        by_proposer,
    )


def test_before_the_first_row_a_row_gives_one_token() -> None:
    recent = RecentDrafts()
    assert (recent.tokens_per_row, recent.computed_per_row) == (1.0, 1.0)
    recent.take(SpeculationStats())
    assert (recent.tokens_per_row, recent.computed_per_row) == (1.0, 1.0)


def test_the_latest_rows_count_most_in_whatever_portions_they_come() -> None:
    long_ago, lately = (
        stats(8 * HALF_LIFE_ROWS, verified_each=3, kept_each=2),
        stats(HALF_LIFE_ROWS, verified_each=1, kept_each=0),
    )
    recent = RecentDrafts()
    recent.take(long_ago)
    assert recent.tokens_per_row == pytest.approx(3.0, abs=0.03)
    assert recent.computed_per_row == pytest.approx(4.0, abs=0.03)
    recent.take(added(long_ago, lately))
    assert recent.tokens_per_row == pytest.approx(2.0, abs=0.03)
    for _ in range(8):
        long_ago = added(long_ago, lately)
        recent.take(long_ago)
    assert recent.tokens_per_row == pytest.approx(1.0, abs=0.02)
    assert recent.computed_per_row == pytest.approx(2.0, abs=0.02)


def test_small_portions_come_to_the_same() -> None:
    whole, bit = RecentDrafts(), RecentDrafts()
    total = SpeculationStats(by_proposer={"lookup": ProposerStats((0, 0, 0), (0, 0, 0))})
    for _ in range(40 * HALF_LIFE_ROWS // 16):
        total = added(total, stats(16, verified_each=4, kept_each=1))
        bit.take(total)
    whole.take(total)
    assert bit.tokens_per_row == pytest.approx(whole.tokens_per_row, rel=1e-3)
    assert bit.computed_per_row == pytest.approx(whole.computed_per_row, rel=1e-3)


def test_the_message_holds_depths_as_far_as_drafts_went() -> None:
    recent = RecentDrafts()
    heads = ProposerStats((9, 7, 0, 0), (5, 1, 0, 0))
    recent.take(SpeculationStats(20, 9, 26, 0.25, {"heads": heads, "lookup": ProposerStats((0, 0, 0, 0), (0, 0, 0, 0))}))
    message = speculation_message(recent)
    assert (message.num_rows, message.num_drafts, message.num_tokens, message.drafting_s) == (20, 9, 26, 0.25)
    told = [(each.name, list(each.verified), list(each.kept)) for each in message.proposers]
    assert told == [("heads", [9, 7], [5, 1]), ("lookup", [], [])]
    assert not message.failed_proposers
    assert message.tokens_per_row == recent.tokens_per_row > 1.0


def test_the_message_names_who_has_failed() -> None:
    recent, tally = RecentDrafts(), Tally()
    recent.take(tally.stats())
    tally.fault("heads")
    recent.take(tally.stats())
    assert list(speculation_message(recent).failed_proposers) == ["heads"]
