"""The kept tokens of a request: each is sent once, and again when a router asks for it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_service.request import RequestOutput
from decode_service.requests import Tombstones
from decode_service.validation import deadline_of, has_passed
from pdmesh.engine.outputs import FinishReason, SequenceUpdate, TokenLogprobs
from pdmesh.runtime.errors import Aborted, Cancelled, Unavailable
from pdmesh.v1 import common_pb2


def update(index: int, tokens: tuple[int, ...], *, choice: int = 0, finish: FinishReason | None = None) -> SequenceUpdate:
    return SequenceUpdate("d:r:1", choice, index, tokens, (), finish)


def test_taken_once_then_again_after_rewind() -> None:
    output = RequestOutput("r", {0: 3})
    output.choices[0].append(update(3, (30,)))
    output.choices[0].append(update(4, (40,)))
    [taken] = output.take()
    assert (taken.request_id, taken.first_index, list(taken.token_ids)) == ("r", 3, [30, 40])
    assert output.take() == []
    output.choices[0].append(update(5, (50,), finish=FinishReason.STOP))
    [taken] = output.take()
    assert (taken.first_index, taken.finish_reason) == (5, common_pb2.FINISH_REASON_STOP)
    assert output.finished
    output.rewind({0: 4})
    [taken] = output.take()
    assert (taken.first_index, list(taken.token_ids)) == (4, [40, 50])
    output.rewind({0: 6})
    [taken] = output.take()
    assert (taken.first_index, list(taken.token_ids), taken.finish_reason) == (6, [], common_pb2.FINISH_REASON_STOP)


def test_a_gap_is_a_bug() -> None:
    output = RequestOutput("r", {0: 0})
    with pytest.raises(ValueError, match="index 1"):
        output.choices[0].append(update(1, (1,)))


def test_committed_token_has_no_log_probability() -> None:
    output = RequestOutput("r", {0: 0})
    output.choices[0].append_committed(7, common_pb2.FINISH_REASON_UNSPECIFIED, wants_logprobs=True)
    output.choices[0].append(SequenceUpdate("d", 0, 1, (8,), (TokenLogprobs((8, -0.5), ((8, -0.5),)),), None))
    [taken] = output.take()
    assert [entry.chosen.token_id for entry in taken.logprobs] == [7, 8]
    assert math.isnan(taken.logprobs[0].chosen.logprob)


def test_what_was_drafted_is_told_as_a_total() -> None:
    output = RequestOutput("r", {0: 0, 1: 0})
    for choice, index, tokens, drafted, accepted in ((0, 0, (1,), 0, 0), (0, 1, (2, 3, 4), 5, 2), (1, 0, (7,), 3, 0)):
        output.choices[choice].append(SequenceUpdate("d", choice, index, tokens, (), None, drafted, accepted))
    assert [(taken.num_drafted, taken.num_accepted) for taken in output.take()] == [(5, 2), (3, 0)]
    output.choices[0].append(SequenceUpdate("d", 0, 4, (5, 6), (), FinishReason.LENGTH, 4, 1))
    [taken] = output.take()
    assert (taken.first_index, list(taken.token_ids), taken.num_drafted, taken.num_accepted) == (4, [5, 6], 9, 3)
    output.rewind({0: 2})
    assert [(taken.num_drafted, taken.num_accepted) for taken in output.take()] == [(9, 3), (3, 0)]


def test_without_drafts_a_message_is_no_longer() -> None:
    plain, drafted = RequestOutput("r", {0: 0}), RequestOutput("r", {0: 0})
    plain.choices[0].append(update(0, (1,)))
    drafted.choices[0].append(SequenceUpdate("d", 0, 0, (1,), (), None, 3, 0))
    lengths = [len(output.take()[0].SerializeToString()) for output in (plain, drafted)]
    assert lengths[1] - lengths[0] == 2


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.integers(0, 30))))
def test_every_index_arrives_in_order(steps: list[tuple[int, bool, int]]) -> None:
    """Whatever mixture of steps, frames and resumptions: a router that keeps what it gets has every token."""
    output, drawn = RequestOutput("r", {0: 2}), 0
    router: dict[int, int] = {}
    for count, frame, back in steps:
        output.choices[0].append(update(2 + drawn, tuple(range(drawn, drawn + count))))
        drawn += count
        if back % 3 == 0:
            output.rewind({0: 2 + min(back, len(router))})
        if frame:
            for taken in output.take():
                router |= {taken.first_index + i: token for i, token in enumerate(taken.token_ids)}
    for taken in output.take():
        router |= {taken.first_index + i: token for i, token in enumerate(taken.token_ids)}
    assert router == {2 + i: i for i in range(drawn)}


def test_endings_are_remembered_for_a_while() -> None:
    ended = Tombstones(keep_s=5.0)
    ended.note("lapsed", 2, Unavailable("lease"), now=10.0)
    ended.note("cancelled", 2, Cancelled("by its router"), now=11.0)
    ended.note_early_cancel("early", now=12.0)
    ended.note_early_cancel("lapsed", now=12.0)  # known to have ended: no tombstone
    with pytest.raises(Aborted):
        ended.check("lapsed", 2, now=14.0)
    with pytest.raises(Cancelled):
        ended.check("cancelled", 1, now=14.0)
    with pytest.raises(Cancelled):
        ended.check("early", 99, now=14.0)
    ended.check("lapsed", 3, now=14.0)
    ended.check("lapsed", 2, now=15.0)
    ended.check("unknown", 1, now=14.0)
    ended.forget_old(now=16.0)
    assert len(ended) == 1


def test_deadlines() -> None:
    assert deadline_of(0, now=5.0) is None
    assert deadline_of(1500, now=5.0) == 6.5
    assert not has_passed(None, now=1e9)
    assert has_passed(6.5, now=6.5)
    assert not has_passed(6.5, now=6.49)
