"""Sessions: agents and traces as they are planned, and turns as they are sent, against real servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.errors import Overloaded
from pdmesh.loadtest.arrivals import fixed, parse
from pdmesh.loadtest.measure import Measurement, measure
from pdmesh.loadtest.record import ObjectiveBook, Objectives, Outcome
from pdmesh.loadtest.sessions import Agents, PromptIndex
from pdmesh.loadtest.stats import Window, count_sessions
from pdmesh.loadtest.targets.grpc import GrpcSettings, GrpcTarget
from pdmesh.loadtest.targets.openai import OpenAiSettings
from pdmesh.loadtest.targets.target import token_ids
from pdmesh.loadtest.traces import TraceError, TraceRow, link_sessions, scaled, some_sessions
from pdmesh.loadtest.workload import Arrivals, Limits, PlannedTurn, TrafficClass, Workload, plan
from pdmesh.v1.mesh_pb2 import GenerateRequest
from tests.pdmesh.fake_mesh import Script, start_router
from tests.pdmesh.loadtest.records import record
from tests.pdmesh.loadtest.test_runner import KINDS, QUICK, SHORT, run, serving
from tests.support.loadtest_stub import Latencies

BUSY = Arrivals(rate=50)
AGENTS = Agents(parse("uniform:50:90"), 3, tool_share=0.4, tool_tokens=fixed(700), tool_think_s=fixed(0.1))
AGENTIC = Workload(BUSY, turns=fixed(4), think_s=fixed(9), agents=AGENTS)
# Turns 2 and 4 continue 0; 1 and 3 share no more than the first block with it.
TRACE = (
    TraceRow(0.0, 1100, 5, (0, 1, 2)),
    TraceRow(0.1, 600, 5, (0, 3)),
    TraceRow(0.2, 1700, 5, (0, 1, 4, 5)),
    TraceRow(0.3, 700, 5, (0, 6)),
    TraceRow(0.4, 1300, 5, (0, 1, 7)),
)

BEFORE = [(4, "prefix0", 1.557), (2, "prefix5", 3.122), (3, "prefix4", 4.629), (3, "prefix1", 3.326)]
pieces = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4)), min_size=1, max_size=4)


def tokens_of(prompt: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Tokens that are equal where the key and the place behind its beginning are."""
    return [(key, place) for key, num_tokens in prompt for place in range(num_tokens)]


def num_shared(one: Sequence[object], other: Sequence[object]) -> int:
    return sum(accumulate((int(x == y) for x, y in zip(one, other, strict=False)), lambda so_far, same: so_far * same))


@given(st.lists(pieces, max_size=12))
def test_the_index_knows_the_longest_beginning_that_was_sent_before(prompts: list[list[tuple[str, int]]]) -> None:
    index = PromptIndex()
    for number, prompt in enumerate(prompts):
        expected = max((num_shared(tokens_of(prompt), tokens_of(earlier)) for earlier in prompts[:number]), default=0)
        assert index.add(prompt) == expected


def segments(turn: PlannedTurn) -> list[tuple[str, int]]:
    return [(segment.key, segment.num_tokens) for segment in turn.segments]


def test_sessions_share_their_system_prompts_and_plans_are_seeded() -> None:
    sessions = list(plan(AGENTIC, 7, 4))
    assert sessions == list(plan(AGENTIC, 7, 4)) != list(plan(AGENTIC, 8, 4))
    systems = {segments(session.turns[0])[0] for session in sessions}
    assert {key for key, _ in systems} == {"system0", "system1", "system2"} and len(systems) == 3
    assert all(50 <= num_tokens <= 90 for _, num_tokens in systems)
    assert all(segments(session.turns[0])[1][1] == 128 for session in sessions)


def test_tools_bring_their_share_of_later_turns_soon_and_long() -> None:
    later = [turn for session in plan(AGENTIC, 1, 20) for turn in session.turns[1:]]
    tools = [turn for turn in later if turn.think_s == 0.1]
    assert len(tools) / len(later) == pytest.approx(0.4, abs=0.04)
    assert {turn.segments[0].num_tokens for turn in tools} == {700}
    assert {(turn.think_s, turn.segments[0].num_tokens) for turn in later if turn not in tools} == {(9.0, 128)}


def test_a_system_prompt_is_cut_where_the_context_is_too_short() -> None:
    workload = replace(AGENTIC, agents=Agents(fixed(500)), limits=Limits(max_context=300))
    (system, own), *later = [segments(turn) for turn in next(plan(workload, 1, 1)).turns]
    assert (system[1], own[1], later) == (235, 1, [])


def test_without_agents_no_plan_has_changed() -> None:
    """Equal seeds are equal requests for every version: these are the draws of before there were agents."""
    workload = Workload(BUSY, turns=parse("uniform:2:4"), think_s=parse("uniform:0:9"), prefix_tokens=16, num_prefixes=9)
    sessions = list(islice(plan(workload, 3, 1), 4))
    assert [(len(s.turns), s.turns[0].segments[0].key, round(s.turns[1].think_s, 3)) for s in sessions] == BEFORE


def test_no_more_sessions_than_wanted() -> None:
    assert len(list(plan(replace(AGENTIC, max_sessions=5), 1, 10))) == 5
    assert len(list(plan(Workload(trace=TRACE, max_sessions=2), 1, 10))) == 2


def test_a_request_continues_the_one_whose_full_blocks_it_begins_with() -> None:
    assert [row.after for row in link_sessions(TRACE)] == [None, None, 0, None, 0]
    deeper = (*TRACE, TraceRow(0.5, 1800, 5, (0, 1, 4, 8)), TraceRow(0.6, 1100, 5, (0, 1, 9)))
    # Three full blocks of row 2; the last is no longer than any that it begins with.
    assert [row.after for row in link_sessions(deeper)][5:] == [2, None]
    with pytest.raises(TraceError, match="hash_ids"):
        link_sessions((TraceRow(0, 10, 5),))


def test_sessions_of_a_trace_keep_its_times_and_branches() -> None:
    first, second, third = plan(Workload(trace=link_sessions(TRACE), trace_speed=2), 0, 9)
    assert [turn.due_s for turn in first.turns] == [0.0, 0.1, 0.2] and first.next_turns(0) == [1, 2]
    assert [first.depth(number) for number in range(3)] == [0, 1, 1]
    assert [second.at_s, third.at_s] == pytest.approx([0.05, 0.15]) and len(second.turns) == 1
    (cut, *_) = plan(Workload(trace=link_sessions(TRACE)), 0, 0.3)
    assert len(cut.turns) == 2


def test_a_share_of_a_trace_has_whole_sessions() -> None:
    copies = [(number, row) for number in range(200) for row in TRACE]
    rows = link_sessions([replace(row, blocks=tuple(100 * number + block for block in row.blocks)) for number, row in copies])
    some, more = some_sessions(rows, 0.2), some_sessions(rows, 0.5)
    assert len(some) / len(rows) == pytest.approx(0.2, abs=0.05) and {row.blocks for row in some} < {row.blocks for row in more}
    by_blocks = {row.blocks: row for row in rows}
    for row in some:
        former = by_blocks[row.blocks].after
        assert (None if row.after is None else some[row.after].blocks) == (None if former is None else rows[former].blocks)
    assert some_sessions(rows, 1.0) == rows


@given(st.floats(1, 512), st.integers(1, 6))
def test_scaled_prompts_share_as_many_blocks(factor: float, num_shared_blocks: int) -> None:
    shared = tuple(range(num_shared_blocks))
    rows = (
        TraceRow(0, 3584, 100, (*shared, *range(10, 17 - num_shared_blocks))),
        TraceRow(1, 4000, 9, (*shared, *range(20, 28))),
    )
    one, other = scaled(rows, factor)
    assert (one.input_tokens, one.output_tokens) == (max(1, int(3584 / factor)), max(1, int(100 / factor)))
    prompts = [token_ids(s.turns[0].segments, 0, 32_000) for s in plan(Workload(trace=(one, other)), 0, 9)]
    assert [len(prompt) for prompt in prompts] == [one.input_tokens, other.input_tokens]
    assert num_shared(*prompts) >= min(int(num_shared_blocks * 512 / factor) - 1, one.input_tokens - 1)


@pytest.mark.parametrize("factor", [0.5, 513, float("nan")])
def test_a_factor_that_leaves_no_blocks_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match="factor"):
        scaled(TRACE, factor)


@KINDS
async def test_a_turn_of_a_trace_waits_for_the_one_before_it_and_counts_from_when_it_was_due(kind: str) -> None:
    async with serving(kind, Latencies(ttft_s=0.5, sigma=0.0, gap_s=0.01)) as (_, target):
        log = await run(target, Workload(trace=link_sessions(TRACE)), 5)
    first, second, third = sorted((r for r in log.records if r.session == 0), key=lambda r: r.turn)
    for held in (second, third):
        assert held.sent_s >= first.end_s and held.scheduled_s == 0.2 * held.turn
        assert held.held_s is not None and held.held_s >= 0.1 and held.ttft_s is not None
        assert held.ttft_s >= held.held_s + 0.5 - 0.001
        assert 0 <= held.lateness_s <= held.sent_s - first.end_s
    assert all(record.held_s is None for record in log.records if record.session)
    # Both begin with the two full blocks of the first one; nothing of its third, which it filled in part.
    assert (first.reusable_tokens, second.reusable_tokens, third.reusable_tokens) == (0, 1024, 1024)
    sessions = count_sessions(log.records, Window(0, 5))
    assert sessions is not None and (sessions.num_complete, sessions.held.num_values) == (3, 2)


async def test_a_failed_turn_is_the_last_of_its_session() -> None:
    workload = Workload(Arrivals("constant", 1), SHORT, turns=fixed(4), max_sessions=1)
    router = await start_router(script := Script())
    script.failure = Overloaded("no room", retry_delay_s=1.0)
    target = GrpcTarget(router.address, GrpcSettings())
    try:
        script.num_failures = 0
        whole = await run(target, workload, 1)
        script.num_failures = 1
        broken = await run(target, workload, 1)
    finally:
        await target.close()
        await router.stop()
    assert [record.outcome for record in whole.records] == [Outcome.OK] * 4
    assert [record.outcome for record in broken.records] == [Outcome.REFUSED]
    sessions = count_sessions(broken.records, Window(0, 9))
    assert sessions is not None and (sessions.num_broken, sessions.num_turns_lost, sessions.num_sessions) == (1, 3, 1)


async def test_ids_of_answers_over_http_are_part_of_the_next_prompt() -> None:
    workload = Workload(Arrivals("constant", 2), SHORT, turns=fixed(3))
    async with serving("http", QUICK, OpenAiSettings(return_token_ids=True)) as (_, target):
        log = await run(target, workload, 1)
    assert [[r.input_tokens for r in log.records if r.turn == turn] for turn in range(3)] == [[20] * 2, [44] * 2, [68] * 2]
    assert {r.turn: r.reusable_tokens for r in log.records} == {0: 0, 1: 23, 2: 47}


async def test_a_server_that_ignores_the_wish_for_ids_is_told_by_its_errors() -> None:
    """Else later prompts would lack the answers, and nothing would say so."""
    settings = OpenAiSettings(endpoint="chat", return_token_ids=True)
    async with serving("http", QUICK, settings) as (_, target):
        log = await run(target, Workload(Arrivals("constant", 1), SHORT), 1)
    assert [record.outcome for record in log.records] == [Outcome.ERROR] and "token_ids" in log.records[0].error


async def test_sessions_are_finished_behind_the_end_if_that_is_wanted_and_else_cut_off() -> None:
    workload = Workload(Arrivals("constant", 10), SHORT, turns=fixed(3), think_s=fixed(0.4), max_sessions=3)
    book = ObjectiveBook(Objectives(ttft_ms=60_000))
    measurement = Measurement(workload, book, seed=1, duration_s=0.5, max_lateness_s=60)
    async with serving("grpc", QUICK) as (_, target):
        cut = await measure(target, measurement)
        finished = await measure(target, replace(measurement, finish_sessions=True))
    assert cut.sessions is not None and finished.sessions is not None
    assert (finished.sessions.num_complete, finished.summary.num_requests) == (3, 9) and finished.window.end_s > 0.8
    assert cut.sessions.num_cut_off == 3 and cut.summary.num_requests < 9
    assert [point.num_requests for point in finished.turns] == [3, 3, 3]
    assert finished.by_turns["later"].num_requests == 6


async def test_requests_name_their_session_where_that_is_wanted() -> None:
    router = await start_router(script := Script())
    target = GrpcTarget(router.address, GrpcSettings(send_sessions=True))
    try:
        await run(target, Workload(Arrivals("constant", 1), SHORT, turns=fixed(2), max_sessions=1), 1)
    finally:
        await target.close()
        await router.stop()
    requests = [request for request in script.requests if isinstance(request, GenerateRequest)]
    assert [request.options.session_id for request in requests] == ["loadtest-0"] * 2


def test_how_sessions_end_is_told_apart() -> None:
    def turns(session: int, *outcomes: Outcome) -> list[object]:
        made = [record(turn, turn + 0.5, session=session, outcome=outcome) for turn, outcome in enumerate(outcomes)]
        return [replace(each, turn=turn, num_turns=3) for turn, each in enumerate(made)]

    ok = Outcome.OK
    records = [
        *turns(0, ok, ok, ok),
        *turns(1, ok, Outcome.TIMEOUT),
        *turns(2, Outcome.NOT_SENT),
        *turns(3, ok, Outcome.CANCELLED),
        *turns(4, ok, ok),
        *turns(5, ok, Outcome.ABORTED),
    ]
    sessions = count_sessions(records, Window(0, 9))  # type: ignore[arg-type]
    assert sessions is not None
    assert (sessions.num_complete, sessions.num_broken, sessions.num_cancelled, sessions.num_cut_off) == (1, 2, 1, 2)
    assert sessions.num_turns_lost == 3
    assert count_sessions([record()], Window(0, 9)) is None


def test_classes_of_traffic_are_agents_too() -> None:
    classes = (TrafficClass("a", input_tokens=fixed(10)), TrafficClass("b", input_tokens=fixed(20)))
    lengths = {s.traffic.name: segments(s.turns[0])[1][1] for s in plan(replace(AGENTIC, classes=classes), 1, 2)}
    assert lengths == {"a": 10, "b": 20}
