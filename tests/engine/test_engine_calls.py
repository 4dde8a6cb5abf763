"""Release in every state, errors of their own types, and what is measured."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from pdmesh.engine.errors import DuplicateRequest, IntegrityError, InvalidRequest, InvalidState, RequestTooLarge, UnknownRequest
from pdmesh.engine.request import EngineRequest
from tests.support.engine_requests import PROMPT, assert_answers, assert_whole, push, request
from tests.support.mock_engine import Collector, make_engine, run_to_end


class TestRelease:
    @pytest.mark.parametrize("n", [1, 3])
    @pytest.mark.parametrize("num_steps", range(7))
    def test_in_every_state_frees_everything(self, n: int, num_steps: int) -> None:
        engine = make_engine(num_blocks=10, max_num_batched_tokens=4)
        engine.add(request("r", n=n, temperature=1.5, max_tokens=12))
        other = request("other", PROMPT[:5])
        engine.add(other)
        collector = Collector()
        for _ in range(num_steps):
            collector.take(engine.step())
        assert engine.release("r")
        engine.check_integrity()
        assert_answers(run_to_end(engine, collector), other)
        assert_whole(engine)

    def test_of_the_unknown_says_so(self) -> None:
        assert not make_engine().release("nobody")

    def test_frees_the_id(self) -> None:
        engine = make_engine()
        engine.add(request())
        engine.release("r")
        assert engine.add(request())


class TestErrors:
    def test_duplicates(self) -> None:
        engine = make_engine()
        engine.reserve(request())
        for enter in (engine.reserve, engine.add):
            with pytest.raises(DuplicateRequest, match="'r'"):
                enter(request())

    @pytest.mark.parametrize(
        ("first_tokens", "finished"),
        [({}, ()), ({0: 1}, ()), ({0: 1, 1: 2, 2: 3}, ()), ({0: 1}, {2}), ({0: 1, 1: 999}, ()), ({0: 1, 1: -1}, ())],
    )
    def test_start_with_wrong_choices_or_tokens_leaves_the_reservation(
        self, first_tokens: dict[int, int], finished: set[int]
    ) -> None:
        engine = make_engine()
        good = push(engine, request(n=2))
        with pytest.raises(InvalidRequest, match="first_tokens"):
            engine.start("r", first_tokens, finished)
        engine.start("r", good)
        run_to_end(engine)
        assert_whole(engine)

    def test_start_in_the_wrong_state(self) -> None:
        engine = make_engine()
        with pytest.raises(UnknownRequest):
            engine.start("r", {0: 1})
        engine.add(request())
        with pytest.raises(InvalidState, match="active, not reserved"):
            engine.start("r", {0: 1})
        with pytest.raises(InvalidState, match="active, not reserved"):
            engine.run_local("r", request())
        engine.reserve(request("p", prefill_only=True))
        with pytest.raises(InvalidState, match="prefill_only"):
            engine.start("p", {0: 1})

    @pytest.mark.parametrize(
        "restated",
        [
            request(prompt=(1, *PROMPT[1:])),
            request(prompt=PROMPT[:9]),
            request("other"),
            replace(request(), cache_root=b"other"),
            request(n=2),
        ],
    )
    def test_run_local_of_another_request_leaves_the_reservation(self, restated: EngineRequest) -> None:
        engine = make_engine()
        engine.reserve(request())
        with pytest.raises(InvalidRequest):
            engine.run_local("r", restated)
        engine.run_local("r", request())
        assert_answers(run_to_end(engine), request())

    @pytest.mark.parametrize(
        ("bad", "field"),
        [
            (request(prompt=()), "prompt"),
            (request(prompt=(1, 24)), "prompt"),
            (request(prompt=(-1,)), "prompt"),
            (request(emitted=((99,),)), "emitted"),
            (request(emitted=((1,), (2,))), "emitted"),
            (request(finished=(True,)), "finished"),
            (request(n=2, finished=(True,)), "finished"),
            (request(emitted=((1,) * 6,)), "emitted: choice 0 has ended"),
            (request(n=2, emitted=((1,), (2,)), prefill_only=True), "emitted"),
            (request(temperature=float("nan")), "sampling.temperature"),
        ],
    )
    def test_contradictory_requests_name_the_field(self, bad: EngineRequest, field: str) -> None:
        engine = make_engine()
        for enter in (engine.reserve, engine.add):
            with pytest.raises(InvalidRequest, match=field):
                enter(bad)
        assert_whole(engine)

    @pytest.mark.parametrize(
        ("large", "field"),
        [
            (request(max_tokens=55), "max_tokens"),
            (request(prompt=(1,) * 64, max_tokens=1), "prompt"),
            (request(n=9), "n: 9 choices"),
            (request(prompt=(1,) * 60, prefill_only=True), "max_tokens"),
        ],
    )
    def test_what_never_fits_is_an_error_of_its_own(self, large: EngineRequest, field: str) -> None:
        engine = make_engine(num_blocks=13)
        for enter in (engine.reserve, engine.add):
            with pytest.raises(RequestTooLarge, match=field):
                enter(large)

    def test_what_just_fits_alone_runs(self) -> None:
        engine = make_engine(num_blocks=4)
        each = request(n=3, temperature=1.5)
        assert engine.add(each)
        assert_answers(run_to_end(engine), each)
        assert_whole(engine)

    def test_a_lost_block_is_found_when_idle(self) -> None:
        engine = make_engine()
        engine._pool.allocate(1)
        with pytest.raises(IntegrityError):
            engine.step()


class TestTimings:
    def test_queue_and_compute_add_up_to_the_whole(self) -> None:
        engine = make_engine(max_num_batched_tokens=4)
        added: dict[str, tuple[int, int]] = {}
        for name, prompt in (("a", PROMPT), ("b", (1, *PROMPT))):
            before = time.monotonic_ns()
            engine.add(request(name, prompt))
            added[name] = (before, time.monotonic_ns())
        queue_ns: dict[str, int] = {}
        step_ns = []
        while len(queue_ns) < 2:
            result = engine.step()
            assert result is not None
            step_ns.append(result.ended_ns - result.started_ns)
            for started in result.started:
                assert started.timing is not None
                before, after = added[started.request_id]
                whole = started.timing.queue_ns + started.timing.compute_ns
                assert result.ended_ns - after <= whole <= result.ended_ns - before
                assert started.timing.compute_ns > 0
                assert started.timing.num_steps >= 3
                queue_ns[started.request_id] = started.timing.queue_ns
        assert queue_ns["b"] >= sum(step_ns[:2]), "b waited while the first two steps computed a"

    def test_decode_queue_is_reported_with_the_first_step_after_start(self) -> None:
        engine = make_engine()
        engine.start("r", push(engine, request()))
        first, second = engine.step(), engine.step()
        assert first is not None
        assert second is not None
        [started] = first.started
        assert started.timing is None
        assert started.decode_queue_ns > 0
        assert second.started == ()
        assert first.started_ns <= first.ended_ns <= second.started_ns
        assert (first.step, second.step) == (1, 2)

    def test_stats_count(self) -> None:
        engine = make_engine()
        engine.add(request("a", n=2))
        engine.reserve(request("b", (1, 2, 4)))
        stats = engine.stats()
        assert (stats.num_waiting, stats.num_waiting_tokens, stats.num_reserved, stats.num_running) == (2, 10, 1, 0)
        engine.step()
        engine.step()
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_waiting_tokens) == (2, 0, 0)
        assert (stats.num_steps, stats.num_prefilled_tokens, stats.num_generated_tokens) == (2, 10, 4)
