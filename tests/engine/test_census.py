"""What each step says of its work and of what the engine holds behind it."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.engine.engine import Engine
from pdmesh.engine.outputs import EngineStats, StepResult, StepWork
from pdmesh.engine.scheduler.stats import PERIOD_NS
from tests.support.engine_requests import request
from tests.support.mock_engine import make_engine


def step(engine: Engine) -> StepResult:
    result = engine.step()
    assert result is not None
    return result


def stats_of(result: StepResult) -> EngineStats:
    assert result.stats is not None
    return result.stats


def test_a_prompt_in_chunks_then_tokens() -> None:
    """Ten tokens, six in a step: the first six attend to 1 to 6 tokens, the others to 7 to 10."""
    engine = make_engine(max_num_batched_tokens=6)
    engine.add(request("a"))
    assert [step(engine).work for _ in range(4)] == [
        StepWork(6, 21, 0, 0),
        StepWork(4, 34, 0, 0),
        StepWork(0, 0, 1, 11),
        StepWork(0, 0, 1, 12),
    ]


def test_prompts_and_decode_rows_in_one_step() -> None:
    engine = make_engine()
    engine.add(request("a", n=2))
    step(engine)
    engine.add(request("b", (1, 2, 3)))
    assert step(engine).work == StepWork(3, 6, 2, 22)
    assert step(engine).work == StepWork(0, 0, 3, 12 + 12 + 4)


def test_what_a_preempted_sequence_computes_again_is_prefill() -> None:
    engine = make_engine(num_blocks=7, prefix_caching=False)
    engine.add(request("a", max_tokens=8))
    engine.add(request("b", max_tokens=8))
    works = []
    while engine.stats().num_preemptions == 0:
        works.append(step(engine).work)
    while (result := engine.step()) is not None:
        works.append(result.work)
    again = [work for work in works[1:] if work.prefill_tokens]
    assert len(again) == 1
    assert again[0].prefill_tokens > 10
    assert again[0].num_decoding == 0
    assert sum(work.num_decoding for work in works) + len(again) + 2 == 16


def test_counts_come_with_the_step_that_changes_them() -> None:
    engine = make_engine(max_num_batched_tokens=6)
    engine.add(request("a", max_tokens=2))
    engine.add(request("b", (1, 2, 3, 4, 5, 6, 7), max_tokens=5))
    first = stats_of(step(engine))
    assert (first.num_running, first.num_waiting, first.num_decoding, first.num_prefilling) == (1, 1, 0, 2)
    step(engine)
    third = step(engine)
    last = stats_of(third)
    assert (last.num_running, last.num_waiting, last.num_prefilling) == (1, 0, 0)
    assert (last.num_decoding, last.decode_context) == (1, 8)
    assert last.taken_ns == third.ended_ns
    assert last == replace(engine.stats(), taken_ns=last.taken_ns)


def test_counts_are_not_taken_anew_while_nothing_comes_or_goes() -> None:
    engine = make_engine()
    engine.add(request("a"))
    census = engine._stats
    now_ns = census.take(0).taken_ns
    assert census.take_if_due(now_ns + PERIOD_NS - 1) is None
    assert census.take_if_due(now_ns + PERIOD_NS) is not None
    engine.add(request("b"))
    assert census.take_if_due(now_ns + PERIOD_NS + 1) is not None
    assert census.take_if_due(now_ns + PERIOD_NS + 2) is None
