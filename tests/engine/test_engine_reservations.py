"""Blocks held for KV that comes from elsewhere, or is computed here after all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.engine.engine import Engine
from tests.support.engine_requests import PROMPT, assert_answers, assert_whole, behind, push, request
from tests.support.guesser import Guesser
from tests.support.mock_engine import Collector, answer, make_engine, run_to_end, write_kv


def guessing_wrongly() -> tuple[Engine, int]:
    """An engine whose one sequence has blocks more than it needs; and how many blocks would be free if it had not."""
    engine = make_engine(proposers=[Guesser(0.0)], draft_length=8)
    assert engine.add(request("running", PROMPT[:6], max_tokens=30))
    num_tokens = 6
    while (
        num_free := engine.stats().num_total_blocks - -(-num_tokens // 4)
    ) == engine.stats().num_free_blocks or num_tokens == 6:
        result = engine.step()
        assert result is not None
        num_tokens += sum(len(update.token_ids) for update in result.updates)
    return engine, num_free


class TestReservations:
    def test_started_goes_on_behind_the_first_token(self) -> None:
        engine = make_engine()
        first = push(engine, request())
        assert engine.step() is None, "a reservation is not scheduled"
        engine.start("r", first)
        collector = run_to_end(engine)
        assert_answers(collector, behind(request(), first))
        assert collector.choices["r", 0].first_index == 1
        assert collector.started == ["r"]
        assert_whole(engine)

    def test_started_with_several_choices(self) -> None:
        engine = make_engine(num_blocks=9)
        several = request(n=3, temperature=1.5, max_tokens=9)
        first = push(engine, several)
        engine.start("r", first)
        assert_answers(run_to_end(engine), behind(several, first))
        assert_whole(engine)

    def test_started_with_history_of_the_only_choice(self) -> None:
        engine = make_engine()
        resumed = request(emitted=((1, 2, 4),))
        first = push(engine, resumed, (*PROMPT, 1, 2, 4))
        engine.start("r", first)
        assert_answers(run_to_end(engine), behind(resumed, first))

    def test_choices_that_ended_with_their_first_token_are_not_continued(self) -> None:
        engine = make_engine()
        several = request(n=3, temperature=1.5)
        first = push(engine, several)
        ended = first.pop(1)
        engine.start("r", first, finished={1})
        collector = run_to_end(engine)
        assert_answers(collector, replace(behind(several, {**first, 1: ended}), finished=(False, True, False)))
        assert ("r", 1) not in collector.choices

    def test_a_first_token_that_ends_the_request_frees_it_without_an_update(self) -> None:
        engine = make_engine()
        engine.start("r", push(engine, request(max_tokens=1)))
        assert engine.step() is None
        assert not engine.release("r")
        assert_whole(engine)

    def test_its_blocks_are_shared_only_from_start_on(self) -> None:
        engine = make_engine()
        first = push(engine, request("a"))
        granted = engine.reserve(request("b"))
        assert granted is not None
        assert (granted.num_cached_tokens, granted.num_tokens) == (0, 10)
        engine.start("a", first)
        shared = engine.reserve(request("c"))
        assert shared is not None
        assert shared.num_cached_tokens == 8
        assert shared.block_ids[:2] == (0, 1)

    def test_release_publishes_nothing(self) -> None:
        engine = make_engine()
        push(engine, request())
        assert engine.release("r")
        assert engine.stats().num_cached_blocks == 0
        assert_whole(engine)

    def test_the_cached_prefix_stays_pinned(self) -> None:
        engine = make_engine(num_blocks=8)
        engine.add(request("a"))
        run_to_end(engine)
        granted = engine.reserve(request("b"))
        assert granted is not None
        for i in range(4):  # would evict everything that is not pinned
            engine.add(request(f"other{i}", (i, 1, 2, 4, 5, 6, 7)))
        run_to_end(engine)
        write_kv(engine, granted.block_ids, PROMPT, granted.num_cached_tokens)
        first = {0: answer(request("b"), 0, max_new=1).token_ids[0]}
        engine.start("b", first)
        assert_answers(run_to_end(engine), behind(request("b"), first))

    def test_the_last_token_is_never_cached(self) -> None:
        engine = make_engine()
        engine.add(request("a", PROMPT[:8]))
        run_to_end(engine)
        granted = engine.reserve(request("b", PROMPT[:8]))
        assert granted is not None
        assert (granted.num_cached_tokens, granted.num_tokens) == (4, 8)

    def test_run_local_computes_what_is_missing_into_the_same_blocks(self) -> None:
        engine = make_engine()
        granted = engine.reserve(request())
        assert granted is not None
        write_kv(engine, granted.block_ids[:1], (1, 1, 1, 1))  # a push that failed half way
        engine.run_local("r", request())
        result = engine.step()
        assert result is not None
        timing = result.started[0].timing
        assert timing is not None
        assert timing.num_computed_tokens == 10
        collector = Collector()
        collector.take(result)
        assert_answers(run_to_end(engine, collector), request())
        assert_whole(engine)

    @pytest.mark.parametrize("n", [1, 2])
    def test_run_local_with_more_history_than_was_reserved_for(self, n: int) -> None:
        engine = make_engine()
        engine.reserve(request(n=n, temperature=1.5))
        restated = request(n=n, temperature=1.5, emitted=((1, 2, 4),) * n)
        engine.run_local("r", restated)
        assert_answers(run_to_end(engine), restated)
        assert_whole(engine)

    def test_run_local_with_fewer_choices_left(self) -> None:
        engine = make_engine()
        engine.reserve(request(n=2, temperature=1.5))
        restated = request(n=2, temperature=1.5, emitted=((1,), (2,)), finished=(True, False))
        engine.run_local("r", restated)
        assert engine.stats().num_running == 1
        assert_answers(run_to_end(engine), restated)

    def test_restate_grows_a_reservation(self) -> None:
        engine = make_engine(num_blocks=4)
        granted = engine.reserve(request())
        assert granted is not None
        restated = request(emitted=((1, 2, 4),))
        grown = engine.restate("r", restated)
        assert grown is not None
        assert grown.block_ids == (*granted.block_ids, 3)
        assert grown.num_tokens == 13
        write_kv(engine, grown.block_ids, (*PROMPT, 1, 2, 4))
        first = {0: answer(restated, 0, max_new=1).token_ids[0]}
        engine.start("r", first)
        assert_answers(run_to_end(engine), behind(restated, first))
        assert_whole(engine)

    def test_restate_without_room_changes_nothing(self) -> None:
        engine = make_engine(num_blocks=6)
        granted = engine.reserve(request("a"))
        engine.reserve(request("b", (1, 2, 4), max_tokens=2))
        engine.reserve(request("c", (1, 2, 4), max_tokens=2))
        assert engine.stats().num_free_blocks == 1
        engine.add(request("d", (1, 2, 4), max_tokens=1, prefill_only=True))
        run_to_end(engine)
        assert engine.restate("a", request("a", emitted=((1, 2, 4),))) is None
        engine.check_integrity()
        assert granted is not None
        assert engine.release("a")

    def test_none_when_there_is_no_room_and_nothing_is_kept(self) -> None:
        engine = make_engine(num_blocks=5)
        assert engine.reserve(request("a")) is not None
        assert engine.reserve(request("b")) is None
        engine.check_integrity()
        assert engine.reserve(request("b", (1, 2, 4), max_tokens=2)) is not None, "an id that was refused is free"

    def test_reservations_leave_room_for_preempted_sequences(self) -> None:
        engine = make_engine(num_blocks=6)
        requests = [request(str(i), (i, *PROMPT[:7]), max_tokens=12) for i in range(2)]
        assert all(map(engine.add, requests))
        while not engine.stats().num_preemptions:
            engine.step()
        assert engine.reserve(request("late", (1, 2), max_tokens=2)) is None

    def test_no_reservation_is_refused_for_blocks_of_wrong_guesses(self) -> None:
        engine, num_free = guessing_wrongly()
        assert engine.reserve(request("late", (5,) * 4 * (num_free - 1), max_tokens=2)) is not None
        assert engine.stats().num_free_blocks == 1  # spare
        engine.check_integrity()

    def test_nor_one_that_grows(self) -> None:
        engine, num_free = guessing_wrongly()
        late = request("late", (5,) * 4 * (num_free - 4), max_tokens=18)
        assert engine.reserve(late) is not None
        assert engine.stats().num_free_blocks < 4
        assert engine.restate("late", replace(late, emitted=((6,) * 16,))) is not None
        assert engine.stats().num_free_blocks == 0
        engine.check_integrity()

    def test_running_sequences_are_preempted_but_no_reservation_is(self) -> None:
        engine = make_engine(num_blocks=6)
        granted = engine.reserve(request("kept"))
        running = request("running", PROMPT[:4], max_tokens=16)
        assert engine.add(running)
        collector = run_to_end(engine)
        assert engine.has_work, "it waits for blocks that the reservation holds"
        assert collector.answer("running").finish_reason is None
        assert granted is not None
        assert engine.release("kept")
        assert_answers(run_to_end(engine, collector), running)
        assert_whole(engine)
