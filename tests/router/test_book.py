"""The book: whatever arrives, in whatever order and how often, each index comes out once and in order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.v1 import common_pb2
from router.lifecycle.output import MAX_EARLY_TOKENS, UNFINISHED, OutputError, OutputTracker, TokenChunk

LENGTH, STOP = common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_STOP
TRUTH = [list(range(100, 140)), list(range(200, 230))]


def _span(choice: int, start: int, end: int) -> TokenChunk:
    """The truth's tokens [start, end), finished with the last."""
    tokens = TRUTH[choice][start:end]
    return TokenChunk(choice, start, tokens, finish_reason=LENGTH if end >= len(TRUTH[choice]) else UNFINISHED)


def _check_in_order(spans: list[TokenChunk]) -> None:
    following = [0, 0]
    for span in spans:
        assert span.first_index == following[span.choice]
        following[span.choice] += len(span.token_ids)
        assert span.token_ids == TRUTH[span.choice][span.first_index : following[span.choice]]


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 40), st.integers(0, 12)), max_size=60))
def test_any_order_and_repetition(arrivals: list[tuple[int, int, int]]) -> None:
    tracker = OutputTracker(2)
    spans: list[TokenChunk] = []
    for choice, start, length in arrivals:
        spans += tracker.accept(_span(choice, start, start + length)) if start < len(TRUTH[choice]) else []
        _check_in_order(spans)
    for choice in range(2):  # then everything comes once more
        spans += tracker.accept(_span(choice, 0, len(TRUTH[choice])))
    _check_in_order(spans)
    assert tracker.all_finished and tracker.num_mismatches == 0
    assert tracker.num_tokens == len(TRUTH[0]) + len(TRUTH[1])
    assert [list(choice.token_ids) for choice in tracker.history()] == TRUTH
    assert sum(bool(span.finish_reason) for span in spans) == 2


@given(st.sets(st.integers(0, 9)))
def test_mismatches_are_counted_and_history_stays(wrong: set[int]) -> None:
    tracker = OutputTracker(1)
    tracker.accept(TokenChunk(0, 0, TRUTH[0][:10]))
    assert tracker.accept(TokenChunk(0, 0, [7 if index in wrong else TRUTH[0][index] for index in range(10)])) == []
    assert tracker.num_mismatches == len(wrong)
    assert list(tracker.history()[0].token_ids) == TRUTH[0][:10]


def test_history_of_a_resumed_stream() -> None:
    emitted = [
        common_pb2.EmittedChoice(index=0, token_ids=[1, 2]),
        common_pb2.EmittedChoice(index=1, token_ids=[3], finish_reason=STOP),
    ]
    tracker = OutputTracker(2, emitted)
    assert tracker.history() == emitted
    assert (tracker.next_index(0), tracker.is_finished(0), tracker.is_finished(1)) == (2, False, True)
    assert tracker.accept(TokenChunk(0, 2, [5]))[0].first_index == 2


def test_nothing_emitted_is_no_history() -> None:
    assert OutputTracker(3, [common_pb2.EmittedChoice(index=index) for index in range(3)]).history() == []


def test_stop_string_truncates_and_drops_what_follows() -> None:
    tracker = OutputTracker(2)
    tracker.accept(_span(0, 0, 10))
    tracker.accept(_span(0, 12, 14))
    tracker.stop(0, 6)
    assert tracker.accept(_span(0, 10, 12)) == []
    assert (tracker.next_index(0), tracker.is_finished(0), tracker.all_finished, tracker.has_gap) == (6, True, False, False)


def test_finish_reason_may_follow_alone() -> None:
    tracker = OutputTracker(1)
    tracker.accept(TokenChunk(0, 0, [1]))
    (span,) = tracker.accept(TokenChunk(0, 1, [], finish_reason=LENGTH))
    assert (span.token_ids, span.finish_reason) == ([], LENGTH)


def test_early_tokens_are_bounded_and_dropped_on_demand() -> None:
    tracker = OutputTracker(1)
    tracker.accept(TokenChunk(0, 1, [0] * MAX_EARLY_TOKENS))
    assert tracker.has_gap
    with pytest.raises(OutputError, match="index 0 of choice 0 is missing"):
        tracker.accept(TokenChunk(0, MAX_EARLY_TOKENS + 1, [0]))
    tracker.drop_early()
    assert not tracker.has_gap


def test_unknown_choice_is_a_peer_gone_wrong() -> None:
    with pytest.raises(OutputError, match="choice 1 does not exist"):
        OutputTracker(1).accept(TokenChunk(1, 0, [1]))


def test_logprobs_stay_with_their_tokens() -> None:
    logprobs = [common_pb2.Logprobs(chosen=common_pb2.TokenLogprob(token_id=token)) for token in (1, 2, 3)]
    tracker = OutputTracker(1)
    tracker.accept(TokenChunk(0, 0, [1]))
    (span,) = tracker.accept(TokenChunk(0, 0, [1, 2, 3], logprobs))
    assert [entry.chosen.token_id for entry in span.logprobs] == span.token_ids == [2, 3]
