"""What a session's requests retain in an engine: found again after others have passed, and in no one's way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.engine.engine import Engine
from pdmesh.engine.errors import InvalidRequest
from pdmesh.engine.kv_cache.retention import Retention
from pdmesh.engine.request import EngineRequest
from tests.support.ahead_model import AheadMock
from tests.support.engine_requests import assert_answers, assert_whole, behind, push, request
from tests.support.mock_engine import Collector, answer, make_engine, run_to_end

FIRST = tuple(4 + token % 5 for token in range(12))  # three blocks
TWIN = tuple(9 + token % 5 for token in range(12))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def of_session(
    request_id: str, prompt: tuple[int, ...] = FIRST, *, session: str = "s", seconds: float = 60, final: bool = False, **more: int
) -> EngineRequest:
    return replace(request(request_id, prompt, **more), retention=Retention("t", session, seconds, final))  # type: ignore[arg-type]


def run(engine: Engine, *requests: EngineRequest) -> Collector:
    for each in requests:
        assert engine.add(each)
    collector = run_to_end(engine)
    assert_answers(collector, *[each for each in requests if not each.prefill_only])
    return collector


def press(engine: Engine, name: str = "press") -> None:
    """Other requests pass, each with as many blocks as nothing retains: the pool has four more."""
    for number in range(3):
        size = 4 * (engine.stats().num_total_blocks - 4)
        run(engine, request(f"{name}{number}", (20, *[14 + number] * (size - 6)), max_tokens=5))


def hits(engine: Engine, prompt: tuple[int, ...]) -> int:
    """The tokens of a next turn that are found."""
    before = engine.stats().num_prefix_hit_tokens
    run(engine, request("probe", (*prompt, 21), max_tokens=1))
    return engine.stats().num_prefix_hit_tokens - before


def test_under_pressure_a_retained_prefix_is_found_and_an_equal_one_is_not() -> None:
    engine = make_engine(num_blocks=16)
    run(engine, request("twin", TWIN, max_tokens=2), of_session("r", max_tokens=2))
    press(engine)
    assert hits(engine, TWIN) == 0
    assert hits(engine, FIRST) == 12
    assert_whole(engine)


def test_prompt_and_output_are_retained_and_each_turn_continues() -> None:
    engine = make_engine(num_blocks=16, max_retained_share=0.5)
    turn = of_session("first", max_tokens=6)
    run(engine, turn)
    assert engine.stats().num_retained_blocks == 4, "12 tokens of prompt, 5 of 6 output tokens are computed"
    press(engine)
    told = (*FIRST, *answer(turn, 0).token_ids, 5, 6, 7)
    before = engine.stats().num_prefix_hit_tokens
    run(engine, of_session("second", told, max_tokens=1))
    assert engine.stats().num_prefix_hit_tokens - before == 16
    assert engine.stats().num_retained_blocks == 5, "the session has moved on: nothing is retained twice"


@pytest.mark.parametrize("how", ["expired", "released", "final"])
def test_what_lapses_is_evicted_as_any_other(how: str) -> None:
    clock = Clock()
    engine = make_engine(num_blocks=16, clock=clock)
    run(engine, of_session("r", max_tokens=2))
    assert engine.stats().num_retained_blocks == 3
    if how == "expired":
        clock.now += 60
    elif how == "released":
        assert engine.release_retained("other", "s") == 0
        assert engine.release_retained("t", "s") == 3
        assert engine.release_retained("t", "s") == 0
    else:
        run(engine, of_session("last", max_tokens=2, final=True))
    assert engine.stats().num_retained_blocks == 0
    assert hits(engine, FIRST) == 12, "until it is evicted it is found"
    press(engine)
    assert hits(engine, FIRST) == 0


def test_the_time_begins_at_the_end_and_the_next_request_renews_it() -> None:
    clock = Clock()
    engine = make_engine(num_blocks=16, clock=clock)
    engine.add(of_session("r", seconds=10))
    engine.step()
    clock.now += 100
    run_to_end(engine)
    clock.now += 9
    assert engine.stats().num_retained_blocks == 4
    run(engine, of_session("again", seconds=10))
    clock.now += 9
    assert engine.stats().num_retained_blocks == 4
    clock.now += 1
    assert engine.stats().num_retained_blocks == 0


def test_what_is_evicted_before_its_time_is_counted() -> None:
    engine = make_engine(num_blocks=16)
    run(engine, of_session("r", max_tokens=2))
    press(engine)
    assert engine.stats().num_retained_evicted == 0, "there was room beside them"
    run(engine, request("large", (20, *[22] * 57), max_tokens=1))
    assert (engine.stats().num_retained_blocks, engine.stats().num_retained_evicted) == (1, 2)


def test_zero_seconds_retain_nothing_and_take_nothing_away() -> None:
    engine = make_engine(num_blocks=16)
    run(engine, of_session("none", seconds=0))
    assert engine.stats().num_retained_blocks == 0
    run(engine, of_session("some", max_tokens=1))
    run(engine, of_session("none", seconds=0))
    assert engine.stats().num_retained_blocks == 3


def test_a_cancelled_request_retains_what_it_has_computed() -> None:
    engine = make_engine(num_blocks=16, max_num_batched_tokens=4)
    engine.add(of_session("r"))
    engine.step()
    engine.step()
    assert engine.release("r")
    assert engine.stats().num_retained_blocks == 2
    engine.add(of_session("waits"))
    assert engine.release("waits"), "it has no blocks yet"
    assert engine.stats().num_retained_blocks == 2
    assert_whole(engine)


def test_a_prefilled_prompt_is_retained_from_the_end_of_its_push() -> None:
    engine = make_engine(num_blocks=16)
    run(engine, replace(of_session("r"), prefill_only=True))
    assert engine.stats().num_retained_blocks == 0
    assert engine.release("r")
    assert engine.stats().num_retained_blocks == 3


def test_what_a_decode_worker_was_handed_is_retained_with_the_output() -> None:
    engine = make_engine(num_blocks=16)
    each = of_session("r")
    first = push(engine, each)
    engine.start("r", first)
    assert_answers(run_to_end(engine), behind(each, first))
    assert engine.stats().num_retained_blocks == 4
    assert engine.reserve(of_session("again")) is not None
    assert engine.release("again")
    assert engine.stats().num_retained_blocks == 4


def test_choices_retain_what_they_share_once() -> None:
    engine = make_engine(num_blocks=40)
    run(engine, of_session("r", n=3, max_tokens=6, temperature=1))
    assert 4 <= engine.stats().num_retained_blocks <= 6
    assert engine.release_retained("t", "s") >= 4
    assert engine.stats().num_retained_blocks == 0


def test_the_last_choice_of_a_final_request_ends_its_session() -> None:
    engine = make_engine(num_blocks=40)
    run(engine, of_session("before"))
    retained = engine.stats().num_retained_blocks
    engine.add(of_session("r", n=2, temperature=1, final=True))
    engine.step()
    assert engine.stats().num_retained_blocks == retained
    run_to_end(engine)
    assert engine.stats().num_retained_blocks == 0


@pytest.mark.parametrize("how", ["released", "final", "cancelled final"])
def test_a_session_that_is_released_while_it_runs_retains_nothing_until_its_next_request(how: str) -> None:
    engine = make_engine(num_blocks=24)
    engine.add(of_session("runs"))
    engine.add(of_session("other", TWIN, session="o"))
    reserved = of_session("reserved")
    assert engine.reserve(reserved) is not None
    if how == "released":
        engine.step()
        assert engine.release_retained("t", "s") == 0
    else:
        engine.add(of_session("last", max_tokens=1 if how == "final" else 8, final=True))
        engine.step()
        assert engine.release("last") is (how == "cancelled final")
    engine.restate("reserved", replace(reserved, emitted=((7,),)))
    engine.release("reserved")
    run_to_end(engine)
    assert engine.release_retained("t", "s") == 0
    assert engine.stats().num_retained_blocks > 0, "the other session's"
    run(engine, of_session("next"))
    assert engine.release_retained("t", "s") > 0


def test_a_final_request_ends_its_session_although_that_was_released_in_the_meantime() -> None:
    engine = make_engine(num_blocks=24)
    engine.add(of_session("last", max_tokens=12, final=True))
    engine.add(of_session("early", max_tokens=1, final=True))
    engine.step()
    assert engine.release_retained("t", "s") == 0
    engine.add(of_session("next", TWIN, max_tokens=1))
    engine.step()
    assert engine.stats().num_retained_blocks == 3
    run_to_end(engine)
    assert engine.stats().num_retained_blocks == 0
    assert_whole(engine)


def test_a_preempted_request_finds_its_blocks_again() -> None:
    engine = make_engine(num_blocks=12, max_retained_share=0.5)
    requests = [of_session(f"r{n}", (5 + n, *FIRST[1:10]), session=f"s{n}", max_tokens=20) for n in range(3)]
    run(engine, *requests)
    assert engine.stats().num_preemptions > 0
    assert_whole(engine)


@pytest.mark.parametrize("ahead", [False, True])
def test_retention_makes_no_request_wait(ahead: bool) -> None:
    """The same requests take the same steps with and without it, in a pool that is much too small."""
    counts = []
    for seconds in (0, 3600):
        engine = make_engine(num_blocks=10, max_retained_share=0.5, model=AheadMock() if ahead else None)
        prompts = [(4 + number, *FIRST[: 5 + number]) for number in range(12)]
        requests = [
            of_session(f"r{number}", prompt, session=f"s{number}", seconds=seconds, max_tokens=12)
            for number, prompt in enumerate(prompts)
        ]
        for each in requests[:8]:
            assert engine.add(each)
        run_to_end(engine)
        run(engine, *requests[8:])
        stats = engine.stats()
        counts.append((stats.num_steps, stats.num_preemptions, stats.num_generated_tokens))
        assert (stats.num_retained_blocks > 0) is (seconds > 0)
    assert counts[0] == counts[1]


def test_one_tenant_has_its_share_and_no_more() -> None:
    engine = make_engine(num_blocks=32, max_retained_share=0.25, max_num_seqs=16)
    run(engine, *[of_session(f"a{n}", (4 + n, *FIRST[1:]), session=f"s{n}", max_tokens=1) for n in range(6)])
    assert engine.stats().num_retained_blocks == 8
    other = replace(request("b", TWIN, max_tokens=1), cache_root=b"u", retention=Retention("u", "s", 60))
    run(engine, other)
    assert engine.stats().num_retained_blocks == 11


def test_logits_that_are_not_finite_leave_nothing_retained() -> None:
    engine = make_engine(num_blocks=16)
    run(engine, of_session("r", max_tokens=1))
    blocks = engine.reserve(of_session("again"))
    assert blocks is not None
    engine._pool.withdraw(blocks.block_ids)
    assert engine.release("again")
    assert engine.stats().num_retained_blocks == 0
    assert_whole(engine)


def test_an_engine_that_retains_nothing_takes_the_hint_and_says_so() -> None:
    for engine in (make_engine(max_retained_share=0.0), make_engine(prefix_caching=False), make_engine(num_blocks=3)):
        assert not engine.can_retain
        run(engine, of_session("r", FIRST[:4], max_tokens=3))
        assert engine.stats().num_retained_blocks == 0
        assert engine.release_retained("t", "s") == 0
    assert make_engine().can_retain


@pytest.mark.parametrize(
    ("retention", "field"),
    [
        (Retention("t", "s", -1), "retention.seconds"),
        (Retention("t", "s", 86_401), "retention.seconds"),
        (Retention("t", "s", float("nan")), "retention.seconds"),
        (Retention("t", "", 5, final=True), "retention.final"),
    ],
)
def test_nonsense_is_refused_by_name(retention: Retention, field: str) -> None:
    engine = make_engine()
    for call in (engine.add, engine.reserve):
        with pytest.raises(InvalidRequest, match=field):
            call(replace(request(), retention=retention))
    assert_whole(engine)
