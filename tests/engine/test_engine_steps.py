"""What other calls find, and what they leave alone, in the middle of a step."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from dataclasses import replace

from pdmesh.engine.outputs import RequestStarted
from pdmesh.engine.request import EngineRequest
from pdmesh.engine.speculation.draft import Draft
from pdmesh.engine.speculation.proposer import Ask
from pdmesh.sampling_params import SamplingParams
from tests.support.guesser import Guesser
from tests.support.mock_engine import Answer, Collector, answer, make_engine, run_to_end, write_kv


def request(request_id: str, prompt: tuple[int, ...] = (5, 6, 7, 8, 9), max_tokens: int = 8, n: int = 1) -> EngineRequest:
    return EngineRequest(request_id, prompt, SamplingParams(temperature=1.0, max_tokens=max_tokens, n=n, ignore_eos=True))


def answers(collector: Collector, wanted: EngineRequest) -> bool:
    return all(collector.answer(wanted.request_id, c) == answer(wanted, c) for c in range(wanted.sampling.n))


def test_a_prompt_that_a_step_computes_is_shared_behind_it() -> None:
    engine = make_engine()
    assert engine.add(request("a"))
    step = engine.schedule_step()
    assert step is not None
    early = engine.reserve(request("b"))
    engine.run_step(step)
    still = engine.reserve(request("c"))
    engine.postprocess_step(step)
    late = engine.reserve(request("d"))
    assert early is not None and still is not None and late is not None
    assert (early.num_cached_tokens, still.num_cached_tokens, late.num_cached_tokens) == (0, 0, 4)


def test_a_request_of_the_step_is_released_behind_it_and_any_other_at_once() -> None:
    engine = make_engine(max_num_batched_tokens=5)
    for name in ("computed", "waits"):
        assert engine.add(request(name))
    assert engine.reserve(request("reserved")) is not None
    step = engine.schedule_step()
    assert step is not None and len(step.plan.pieces) == 1
    assert engine.try_release("computed") is None
    assert engine.try_release("reserved") is True
    waits = engine.try_release("waits")  # it may have been given blocks by the step's plan
    assert waits is True and engine.try_release("waits") is False
    engine.run_step(step)
    assert engine.try_release("computed") is None, "its draws are still to be applied"
    engine.postprocess_step(step)
    assert engine.try_release("computed") is True
    engine.check_integrity()
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_total_blocks


def test_what_starts_during_a_step_is_in_the_next_one() -> None:
    engine, collector = make_engine(), Collector()
    first, second = request("first"), request("second", (4, 4, 8, 8, 4, 8))
    assert engine.add(first)
    step = engine.schedule_step()
    assert step is not None
    granted = engine.reserve(second)
    assert granted is not None
    write_kv(engine, granted.block_ids, second.prompt)
    [token] = answer(second, 0, max_new=1).token_ids
    engine.start("second", {0: token})
    engine.run_step(step)
    collector.take(engine.postprocess_step(step))
    step = engine.schedule_step()
    assert step is not None and len(step.plan.pieces) == 2
    engine.run_step(step)
    collector.take(engine.postprocess_step(step))
    run_to_end(engine, collector)
    assert answers(collector, first) and answers(collector, replace(second, emitted=((token,),)))


def test_blocks_that_drafts_of_the_step_write_are_not_taken_back_in_it() -> None:
    engine, collector = make_engine(num_blocks=6, proposers=[Guesser(1.0, branches=False)], draft_length=4), Collector()
    drafted = request("drafted", (5, 6, 7), max_tokens=20)
    assert engine.add(drafted)
    for _ in range(20):
        step = engine.schedule_step()
        assert step is not None
        [piece] = step.plan.pieces
        held = list(piece.sequence.block_ids)
        if len(held) > engine._allocator.num_blocks_for(piece.sequence.num_tokens):
            break
        engine.run_step(step)
        collector.take(engine.postprocess_step(step))
    else:
        raise AssertionError("no draft took a block")
    num_left = engine.stats().num_free_blocks
    filler = request("filler", tuple(range(4, 4 + 4 * num_left)), max_tokens=1)
    assert engine.reserve(filler) is None, "one block stays free for what runs, and the draft's is in use"
    assert engine.holds_back
    assert piece.sequence.block_ids == held
    engine.run_step(step)
    collector.take(engine.postprocess_step(step))
    assert not engine.holds_back
    run_to_end(engine, collector)
    assert collector.answer("drafted") == answer(drafted, 0)


def test_a_block_is_copied_before_its_source_can_be_granted() -> None:
    """Choices that part share their last block. Each but one copies it, in the plan of the step: behind the plan no step needs
    the source on behalf of the copies, whatever request gets it and writes into it."""
    engine, collector = make_engine(num_blocks=16), Collector()
    many = request("many", (5, 6, 7, 8, 9, 4), max_tokens=6, n=3)
    assert engine.add(many)
    num_copied = 0
    while (step := engine.schedule_step()) is not None:
        for piece in step.plan.pieces:
            for copy in piece.copies:
                num_copied += 1
                kv = engine.kv.tensor
                assert bool((kv[:, :, copy.target] == kv[:, :, copy.source]).all())
        engine.run_step(step)
        collector.take(engine.postprocess_step(step))
    assert num_copied == 2
    assert answers(collector, many)


def test_no_step_is_under_way_when_nothing_can_be_planned() -> None:
    engine = make_engine(num_blocks=4)
    assert engine.reserve(request("kept", max_tokens=8)) is not None
    assert engine.add(request("waits", (5, 6, 7) * 3, max_tokens=4))
    assert engine.schedule_step() is None
    assert engine.try_release("waits") is True and engine.try_release("kept") is True
    assert Collector().answer("waits") == Answer((), None)


def test_a_request_that_comes_while_its_first_step_is_planned_has_waited_for_no_time() -> None:
    """Its clock opens behind the step's: what it waited is none, and never less."""

    class Interrupted(Guesser):
        def propose(self, asks: Sequence_[Ask]) -> list[Draft]:
            if not added:
                added.append(engine.add(late))
            return super().propose(asks)

    late, added = request("late"), list[bool]()
    engine = make_engine(proposers=[Interrupted(1.0)], draft_length=2)
    assert engine.add(request("first"))
    started: list[RequestStarted] = []
    ended_ns = 0
    while len(started) < 2:
        result = engine.step()
        assert result is not None
        started += result.started
        ended_ns = result.ended_ns
    timing = started[1].timing
    assert started[1].request_id == "late" and timing is not None
    assert timing.queue_ns == 0 and 0 < timing.compute_ns <= ended_ns - timing.opened_ns
