"""Plans: seeded, within limits, with the shares, prefixes and turns that were asked for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.loadtest.arrivals import fixed, parse
from pdmesh.loadtest.targets.target import FIRST_TOKEN_ID, token_ids, words
from pdmesh.loadtest.traces import TraceRow
from pdmesh.loadtest.workload import Arrivals, Limits, PlannedSession, Segment, TrafficClass, Workload, num_cut, plan

BUSY = Arrivals(rate=50)


def tokens_in(session: PlannedSession) -> int:
    return sum(segment.num_tokens for segment in session.turns[0].segments)


@given(st.integers(0, 2**32), st.sampled_from(["poisson", "gamma", "constant", "ramp"]))
@settings(max_examples=20)
def test_the_same_seed_is_the_same_plan(seed: int, kind: str) -> None:
    workload = Workload(
        Arrivals(kind, 20, 0.5, 40), turns=parse("uniform:1:3"), cancel_share=0.2, prefix_tokens=10, num_prefixes=3
    )
    first, second = list(plan(workload, seed, 2)), list(plan(workload, seed, 2))
    assert first == second
    assert all(0 <= session.at_s < 2 for session in first)
    assert [session.index for session in first] == list(range(len(first)))


def test_other_lengths_leave_the_arrivals_where_they_are() -> None:
    short = Workload(BUSY)
    long = replace(short, classes=(TrafficClass(input_tokens=parse("normal:500:100")),), turns=parse("3"))
    assert [s.at_s for s in plan(short, 5, 3)] == [s.at_s for s in plan(long, 5, 3)]


def test_shares_of_classes() -> None:
    classes = (TrafficClass("a", 1), TrafficClass("b", 3))
    counts = Counter(session.traffic.name for session in plan(Workload(BUSY, classes), 1, 100))
    assert counts["b"] / counts.total() == pytest.approx(0.75, abs=0.03)


def test_a_shared_prefix_is_part_of_the_length_and_leaves_a_token() -> None:
    workload = Workload(BUSY, (TrafficClass(input_tokens=parse("uniform:1:40")),), prefix_tokens=32, num_prefixes=2)
    sessions = list(plan(workload, 1, 10))
    for session in sessions:
        *prefix, own = session.turns[0].segments
        assert own.num_tokens >= 1 and sum(p.num_tokens for p in prefix) == min(32, tokens_in(session) - 1)
    assert {s.turns[0].segments[0].key for s in sessions if len(s.turns[0].segments) == 2} == {"prefix0", "prefix1"}


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(2, 2000), st.integers(1, 2000), st.integers(1, 2000))
def test_limits_hold(num_input: int, num_output: int, context: int, max_input: int, max_output: int) -> None:
    first, second = Limits(max_input, max_output, context).lengths(num_input, num_output)
    assert 1 <= first <= min(num_input, max_input) and 1 <= second <= min(num_output, max_output)
    assert first + second <= context


def test_a_conversation_ends_before_the_context_does() -> None:
    classes = (TrafficClass(input_tokens=fixed(30), output_tokens=fixed(20)),)
    workload = Workload(BUSY, classes, turns=fixed(10), limits=Limits(max_context=160))
    assert {len(session.turns) for session in plan(workload, 1, 1)} == {3}


def test_later_turns_think_and_share_no_prefix() -> None:
    workload = Workload(BUSY, turns=fixed(2), think_s=fixed(1.5), prefix_tokens=16)
    session = next(plan(workload, 1, 1))
    assert [turn.think_s for turn in session.turns] == [0.0, 1.5]
    assert [len(turn.segments) for turn in session.turns] == [2, 1]


def test_cancellations_have_their_share() -> None:
    sessions = list(plan(Workload(BUSY, cancel_share=0.25, cancel_after_s=fixed(0.5)), 1, 100))
    cancelled = [s for s in sessions if s.turns[0].cancel_after_s is not None]
    assert len(cancelled) / len(sessions) == pytest.approx(0.25, abs=0.03)
    assert {s.turns[0].cancel_after_s for s in cancelled} == {0.5}


def test_a_replay_keeps_times_lengths_and_shared_blocks() -> None:
    rows = (TraceRow(0, 1000, 5, (1, 2)), TraceRow(4, 600, 6, (1, 3)), TraceRow(9, 10, 7))
    sessions = list(plan(Workload(trace=rows, trace_speed=2), 0, 4))
    assert [(s.at_s, tokens_in(s), s.turns[0].output_tokens) for s in sessions] == [(0, 1000, 5), (2, 600, 6)]
    first, second = (token_ids(s.turns[0].segments, 0, 32_000) for s in sessions)
    assert first[:512] == second[:512] and first[512:600] != second[512:600]


def test_blocks_that_do_not_cover_the_prompt_leave_the_rest_to_the_request() -> None:
    session = next(plan(Workload(trace=(TraceRow(0, 1500, 5, (1,)),)), 0, 1))
    assert [segment.num_tokens for segment in session.turns[0].segments] == [512, 988]


def test_lengths_from_a_trace_come_in_its_pairs() -> None:
    rows = (TraceRow(0, 100, 1), TraceRow(1, 200, 2))
    pairs = {(tokens_in(s), s.turns[0].output_tokens) for s in plan(Workload(BUSY, length_rows=rows), 0, 3)}
    assert pairs == {(100, 1), (200, 2)}


@given(st.text(min_size=1, max_size=8), st.integers(1, 300), st.integers(0, 300), st.integers(0, 9))
def test_equal_keys_are_equal_tokens_as_far_as_both_go(key: str, length: int, more: int, seed: int) -> None:
    short, long = Segment(key, length), Segment(key, length + more)
    ids = token_ids([long], seed, 32_000)
    assert ids[:length] == token_ids([short], seed, 32_000)
    assert len(ids) == length + more and all(FIRST_TOKEN_ID <= token < 32_000 for token in ids)
    assert words([long], seed).split()[:length] == words([short], seed).split()


def test_what_the_limits_cut_of_a_trace_is_counted() -> None:
    rows = [TraceRow(0, 10, 5), TraceRow(1, 100, 5), TraceRow(2, 10, 50), TraceRow(3, 95, 10)]
    assert num_cut(rows, Limits()) == 0
    assert num_cut(rows, Limits(max_input_tokens=99, max_output_tokens=40)) == 2
    assert num_cut(rows, Limits(max_context=100)) == 2
