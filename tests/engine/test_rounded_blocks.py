"""Blocks of rounded KV, and those that were computed from them: which requests are told, and which blocks count as exact."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.engine.engine import Engine
from pdmesh.engine.outputs import StartClock
from pdmesh.engine.request import EngineRequest
from pdmesh.sampling_params import SamplingParams
from tests.support.engine_requests import PROMPT, request
from tests.support.mock_engine import make_engine, run_to_end, write_kv

SIZE = 4


def hashes_of(engine: Engine, wanted: EngineRequest) -> tuple[bytes, ...]:
    return engine.sharing.lacking(wanted.block_root, wanted.prompt)[1]


def restore(engine: Engine, wanted: EngineRequest, num_blocks: int, *, is_rounded: bool = True) -> None:
    """What a tier does."""
    beginning = replace(wanted, request_id="restored", prompt=wanted.prompt[: num_blocks * SIZE])
    expected = engine.sharing.expect(replace(beginning, sampling=SamplingParams(max_tokens=1)))
    assert expected is not None
    write_kv(engine, expected.reserved.block_ids, beginning.prompt)
    engine.sharing.take_in("restored", num_blocks * SIZE, is_rounded=is_rounded)
    engine.release("restored")


def exactness(engine: Engine, wanted: EngineRequest) -> list[str]:
    pool = engine._allocator.pool
    names = {(True, False): "exact", (False, False): "derived", (False, True): "rounded"}
    found = engine.sharing.lacking(wanted.block_root, wanted.prompt)[0]
    return [names[pool.is_exact(each), pool.is_rounded(each)] for each in hashes_of(engine, wanted)[:found]]


def long_request(request_id: str = "r", num_tokens: int = 20, first: int = 1) -> EngineRequest:
    return replace(request(), request_id=request_id, prompt=tuple((first + n) % 7 + 1 for n in range(num_tokens)))


def timing_of(engine: Engine, wanted: EngineRequest) -> tuple[int, int, bool]:
    """Return how many tokens a request found cached, how many of them rounded, and whether its KV is exact."""
    assert engine.add(wanted)
    while (result := engine.step()) is not None:
        for started in result.started:
            assert started.timing is not None
            timing = started.timing
    return timing.num_cached_tokens, timing.num_rounded_tokens, timing.is_exact


def test_requests_are_told_and_what_they_compute_is_derived() -> None:
    engine, wanted = make_engine(num_blocks=40), long_request()
    restore(engine, wanted, 2)
    assert timing_of(engine, wanted) == (8, 8, False)
    assert exactness(engine, wanted) == ["rounded", "rounded", "derived", "derived", "derived"]
    assert timing_of(engine, replace(wanted, request_id="again")) == (16, 8, False)
    assert engine.sharing.pin("other worker", hashes_of(engine, wanted)) == ()
    engine.check_integrity()


@pytest.mark.parametrize("is_rounded", [True, False])
def test_requests_are_told_what_they_find_behind_their_first_step(is_rounded: bool) -> None:
    """A tier, or another worker, brings it meanwhile."""
    engine, wanted = make_engine(num_blocks=60, max_context=100, max_num_batched_tokens=16), long_request(num_tokens=60)
    assert engine.add(wanted)
    engine.step()
    restore(engine, wanted, 14, is_rounded=is_rounded)
    while (result := engine.step()) is not None:
        for started in result.started:
            timing = started.timing
    assert timing is not None
    assert timing.num_cached_tokens > 30 and timing.num_cached_tokens + timing.num_computed_tokens == 60
    assert timing.num_rounded_tokens == (timing.num_cached_tokens if is_rounded else 0)
    assert timing.is_exact is not is_rounded
    engine.check_integrity()


def test_what_a_preempted_request_finds_again_counts_once() -> None:
    clock = StartClock(0, remote=False)
    clock.took_part(0, 1, num_tokens=16, num_cached_tokens=8)
    clock.adopted(20, num_tokens=12, num_rounded_tokens=12)
    clock.adopted(32, num_tokens=16, num_rounded_tokens=16)
    clock.took_part(1, 2, num_tokens=4, num_cached_tokens=24)
    started = clock.try_stop("r", drew_token=True)
    assert started is not None and started.timing is not None
    assert (started.timing.num_cached_tokens, started.timing.num_rounded_tokens) == (16, 8)


def test_an_exact_beginning_stays_so() -> None:
    engine, wanted = make_engine(num_blocks=40), long_request()
    assert timing_of(engine, replace(wanted, request_id="short", prompt=wanted.prompt[:9])) == (0, 0, True)
    restore(engine, wanted, 4)
    assert timing_of(engine, wanted) == (16, 8, False)
    assert exactness(engine, wanted) == ["exact", "exact", "rounded", "rounded", "derived"]
    pinned = engine.sharing.pin("other worker", hashes_of(engine, wanted))
    assert len(pinned) == 2
    engine.sharing.unpin("other worker")


def test_what_is_computed_anew_after_an_eviction_is_exact() -> None:
    engine, wanted = make_engine(num_blocks=12), long_request()
    restore(engine, wanted, 3)
    for number in range(3):
        timing_of(engine, long_request(f"other {number}", 30, first=number + 2))
    assert exactness(engine, wanted) == []
    assert timing_of(engine, wanted) == (0, 0, True)
    assert set(exactness(engine, wanted)) == {"exact"}
    engine.check_integrity()


def test_fetched_blocks_are_exact() -> None:
    engine, wanted = make_engine(num_blocks=40), long_request()
    restore(engine, wanted, 2, is_rounded=False)
    assert timing_of(engine, wanted) == (8, 0, True)


@pytest.mark.parametrize("is_exact", [True, False])
def test_a_hand_off_that_is_not_exact_is_found_by_no_other_request(is_exact: bool) -> None:
    engine, wanted = make_engine(num_blocks=40), replace(long_request(), sampling=SamplingParams(max_tokens=9, temperature=0.0))
    reserved = engine.reserve(wanted)
    assert reserved is not None and reserved.num_rounded_tokens == 0
    write_kv(engine, reserved.block_ids, wanted.prompt)
    engine.start("r", {0: PROMPT[0]}, is_exact=is_exact)
    run_to_end(engine)
    assert bool(engine.published_blocks()[1]) == is_exact
    assert engine.stats().num_free_blocks == 40
    engine.check_integrity()


def test_a_reservation_says_how_much_of_its_beginning_is_rounded() -> None:
    engine, wanted = make_engine(num_blocks=40), long_request()
    restore(engine, wanted, 3)
    reserved = engine.reserve(wanted)
    assert reserved is not None and (reserved.num_cached_tokens, reserved.num_rounded_tokens) == (12, 12)
    assert engine.release("r")


def test_choices_that_part_are_as_exact_as_their_prompt() -> None:
    engine, wanted = make_engine(num_blocks=40), long_request()
    restore(engine, wanted, 2)
    several = replace(wanted, sampling=SamplingParams(max_tokens=9, temperature=0.0, n=2))
    assert timing_of(engine, several) == (8, 8, False)
    pool = engine._allocator.pool
    assert not any(pool.is_exact(each) for each in engine.published_blocks()[1])
