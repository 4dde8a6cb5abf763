"""KV from elsewhere: what a modelled worker fetches and restores before it computes, and that it decides as a real one does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.engine import block_sharing
from pdmesh.simulator.arrivals import Arrival
from pdmesh.simulator.events import EventQueue
from pdmesh.simulator.mesh import Mesh
from pdmesh.simulator.results import Results, numbers
from pdmesh.simulator.routers import lease
from pdmesh.simulator.settings import Fetching, MeshSettings, Tiers
from pdmesh.simulator.workers import kv_room, kv_sources
from pdmesh.simulator.workers.kv_room import CacheChanges, KvRoom, TierRoom
from pdmesh.simulator.workers.kv_sources import NOTHING, Brought, KvSources
from pdmesh.simulator.workers.worker import ModelledWorker
from prefill_service import kv_pull, kv_send
from router.lifecycle import kv_holder
from tests.simulator.specs import LARGE
from tests.simulator.test_kv_room import prompt
from tests.simulator.test_mesh import settle

FAST, SLOW = Fetching(1e10), Fetching(1e8)
TIERS = Tiers(1e12, 1e10)
OPEN = MeshSettings(admission=None)
NAMES = (1, 2, 3, 4)
TOKENS = 4 * 512 + 100


def test_the_numbers_are_those_of_real_workers() -> None:
    assert kv_sources.WORTH == kv_pull.WORTH
    assert FAST.fixed_s == kv_pull.FIXED_S
    assert FAST.max_sends == kv_send.MOST_SENDS
    assert kv_room.FREE_SHARE == block_sharing.FREE_SHARE
    assert lease.MAX_HOLDERS == kv_holder.MAX_HOLDERS


def test_blocks_from_elsewhere_take_the_place_of_idle_ones_and_leave_a_quarter_free() -> None:
    room = KvRoom(16, 16, 64)
    old = prompt(129, 7, 8)
    assert room.admit(old, 0)
    room.publish(old)
    room.release(old)
    assert room.take_in([1, 2, 3]) == 3
    assert room.take_changes() == CacheChanges([7, 1, 2, 3], [8], [], [])
    assert room.take_in([1, 2, 3, 4]) == 0, "only a quarter is left"
    assert room.num_leading([1, 2, 3, 4]) == 3
    busy = prompt(150, 1, 2)
    assert room.admit(busy, 0) and busy.num_cached == 128
    assert room.take_in([1, 2]) == 0 and room.take_in([9]) == 0, "what runs leaves too little"
    room.release(busy)
    assert room.num_used == 0


def test_tiers_keep_what_was_used_last_and_beginnings_before_ends() -> None:
    tiers = TierRoom(3)
    tiers.store([1, 2])
    tiers.store([3])
    assert tiers.take_changes() == ([2, 1, 3], [])
    tiers.store([1])
    tiers.store([4])
    assert tiers.take_changes() == ([4], [2]) and len(tiers) == 3 and 1 in tiers
    tiers.store([5, 6, 7, 8])
    assert [name for name in range(10) if name in tiers] == [5, 6, 7]


def test_what_is_published_is_in_the_tiers_when_the_pool_has_lost_it() -> None:
    room = KvRoom(12, 16, 64, TierRoom(10))
    for name in (1, 2, 3):
        one = prompt(129, name, 10 + name)
        assert room.admit(one, 0)
        room.publish(one)
        room.release(one)
    assert room.num_leading([1, 11]) == 0 and room.num_leading([1, 11], with_tiers=True) == 2
    changes = room.take_changes()
    assert set(changes.tier_stored) == {1, 2, 3, 11, 12, 13} and not changes.tier_evicted and 1 in changes.evicted


class Asking:
    """Two workers, one of which has the prompt."""

    def __init__(self, settings: MeshSettings) -> None:
        self.events = EventQueue()
        tier_bytes = settings.tiers.num_bytes if settings.tiers else 0.0
        self.here, self.holder = (ModelledWorker(name, LARGE, self.events, 0, tier_bytes) for name in ("here", "there"))
        assert self.holder.take_in(NAMES) == len(NAMES)
        self.sources = KvSources(self.events, settings)
        self.came: list[tuple[float, Brought]] = []

    def bring(self, names: tuple[int, ...] = NAMES, num_tokens: int = TOKENS) -> None:
        self.sources.bring(self.here, names, num_tokens, self.holder, lambda came: self.came.append((self.events.now, came)))


def test_what_another_worker_has_is_fetched_once() -> None:
    asking = Asking(replace(OPEN, fetching=FAST))
    asking.bring()
    asking.bring()
    assert asking.holder.num_sends == 1 and not asking.came
    asking.events.run(None)
    took_s = FAST.fetch_s(4 * 512 * LARGE.kv_bytes_per_token)
    assert asking.came == [(took_s, Brought(num_fetched=2048)), (took_s, NOTHING)]
    assert asking.here.room.num_leading(NAMES) == 4 and asking.holder.num_sends == 0 and not asking.here.fetches
    asking.bring()
    assert asking.came[-1] == (took_s, NOTHING), "it has all of it now"


def test_what_is_not_worth_it_is_computed() -> None:
    compute_s = LARGE.speed.prefill_s(0, TOKENS, chunk=512) - LARGE.speed.prefill_s(2048, TOKENS, chunk=512)
    num_bytes = 2048 * LARGE.kv_bytes_per_token
    for share, is_fetched in ((0.78, True), (0.82, False)):
        asking = Asking(replace(OPEN, fetching=Fetching(num_bytes / (share * compute_s), fixed_s=0.0)))
        asking.bring()
        assert bool(asking.holder.num_sends) is is_fetched
    asking = Asking(replace(OPEN, fetching=replace(FAST, max_sends=1)))
    asking.bring()
    asking.bring(NAMES[:3], 3 * 512 + 1)
    assert asking.came == [(0.0, NOTHING)], "the holder sends as much as it may"


def test_the_least_of_three_is_taken() -> None:
    for fetching, tiers, source in ((SLOW, TIERS, "restored"), (FAST, Tiers(1e12, 1e8), "fetched"), (FAST, None, "fetched")):
        asking = Asking(replace(OPEN, fetching=fetching, tiers=tiers))
        if tiers is not None:
            asking.here.take_in(NAMES[:3])
            asking.here.room = KvRoom(LARGE.num_blocks, LARGE.block_size, 512, asking.here.room._tiers)  # its pool is lost
        asking.bring()
        asking.events.run(None)
        ((_, came),) = asking.came
        assert (came.num_restored, came.num_fetched) == ((1536, 0) if source == "restored" else (0, 2048))


def test_a_holder_restores_first_what_its_tiers_alone_have() -> None:
    asking = Asking(replace(OPEN, fetching=FAST, tiers=TIERS))
    asking.holder.take_in(NAMES)
    asking.holder.room = KvRoom(LARGE.num_blocks, LARGE.block_size, 512, asking.holder.room._tiers)  # its pool is lost
    asking.holder.take_in(NAMES[:1])
    asking.bring()
    asking.events.run(None)
    num_bytes = 512 * LARGE.kv_bytes_per_token
    took_s = FAST.fetch_s(4 * num_bytes) + TIERS.restore_s(3 * num_bytes)
    [(at_s, came)] = asking.came
    assert at_s == pytest.approx(took_s)
    assert came == Brought(num_fetched=2048)
    assert asking.holder.room.num_leading(NAMES) == 4, "they are in its pool now"


def test_prefill_workers_fetch_from_tiers_of_others() -> None:
    """Small pools lose earlier turns; round-robin sends later ones elsewhere."""
    arrivals = [arrival for number in range(11) for arrival in conversation(number, 5)]
    config = replace(OPEN, local_prefill_tokens=0, policy="round-robin", fetching=FAST)
    plain, tiered = (run(replace(config, tiers=each), arrivals, prefill=3, num_blocks=700) for each in (None, TIERS))
    assert tiered.sources["fetched"] > 1.1 * plain.sources["fetched"]
    assert tiered.sources["computed"] < plain.sources["computed"]


def test_a_holder_that_dies_meanwhile_brings_nothing() -> None:
    asking = Asking(replace(OPEN, fetching=FAST))
    asking.bring()
    asking.holder.stop(0.0)
    asking.events.run(None)
    assert [came for _, came in asking.came] == [NOTHING] and asking.here.room.num_leading(NAMES) == 0


def conversation(number: int, num_turns: int, gap_s: float = 4.0) -> list[Arrival]:
    names = tuple(range(100 * number, 100 * number + num_turns * 2))
    turns = range(num_turns)
    return [Arrival(0.31 * number + gap_s * turn, 1024 * turn + 1100, 20, names[: 2 * turn + 2]) for turn in turns]


def run(config: MeshSettings, arrivals: list[Arrival], *, prefill: int = 0, both: int = 0, num_blocks: int = 8192) -> Results:
    results, spec = Results(), replace(LARGE, num_blocks=num_blocks)
    mesh = Mesh(config, results)
    for number, roles in ((prefill, (True, False)), (prefill, (False, True)), (both, (True, True))):
        for _ in range(number):
            mesh.add_worker(spec, prefill=roles[0], decode=roles[1])
    mesh.run(sorted(arrivals))
    settle(mesh)
    assert sum(results.sources.values()) == results.num_input_tokens
    assert min(results.sources.values()) >= 0
    return results


def test_tiers_restore_what_the_pool_has_lost() -> None:
    """On workers that compute prompts themselves, and on prefill workers."""
    arrivals = [arrival for number in range(8) for arrival in conversation(number, 5)]
    for pools in ({"both": 1}, {"prefill": 1}):
        plain = run(OPEN, arrivals, num_blocks=700, **pools)
        tiered = run(replace(OPEN, tiers=TIERS), arrivals, num_blocks=700, **pools)
        assert plain.sources["restored"] == 0 and tiered.sources["restored"] > 0.2 * tiered.num_input_tokens
        assert tiered.sources["computed"] < 0.7 * plain.sources["computed"]
        assert tiered.ttft.quantile(0.5) < plain.ttft.quantile(0.5)
        one_block = Tiers(512 * LARGE.kv_bytes_per_token, 1e10)
        assert run(replace(OPEN, tiers=one_block), arrivals, num_blocks=700, **pools).sources["restored"] <= 512 * 40


def test_prefill_workers_fetch_what_others_have() -> None:
    arrivals = [arrival for number in range(11) for arrival in conversation(number, 5)]
    config = replace(OPEN, local_prefill_tokens=0, policy="round-robin")  # so that turns go to different workers
    plain, fetching = (run(replace(config, fetching=each), arrivals, prefill=3) for each in (None, FAST))
    assert plain.sources["fetched"] == 0 and fetching.sources["fetched"] > 0.2 * fetching.num_input_tokens
    assert fetching.sources["computed"] < 0.8 * plain.sources["computed"]


def test_the_time_of_a_restore_is_not_learned_as_one_of_calls() -> None:
    """The policy predicts it by itself: learned besides, it would count twice, for every request."""
    slow = Tiers(1e12, 1e10, fixed_s=0.15)
    results = Results()
    mesh = Mesh(replace(OPEN, tiers=slow), results)
    mesh.add_worker(replace(LARGE, num_blocks=700), prefill=True, decode=True, name="w")
    mesh.run(sorted(arrival for number in range(8) for arrival in conversation(number, 5)))
    assert results.sources["restored"] > 512 * 20
    outlook = mesh._routers[0].outlook
    view = next(iter(outlook.roster.views()))
    assert outlook.overheads.between(None, view).before_s < 0.02


@given(
    st.sampled_from([None, FAST, SLOW]),
    st.sampled_from([None, TIERS, Tiers(1e9, 1e9)]),
    st.integers(700, 1500),
    st.sampled_from([{"both": 2}, {"prefill": 2}]),
)
@settings(max_examples=12, deadline=None)
def test_nothing_is_left_behind_and_equal_runs_are_equal(
    fetching: Fetching | None, tiers: Tiers | None, num_blocks: int, pools: dict[str, int]
) -> None:
    arrivals = [arrival for number in range(6) for arrival in conversation(number, 4, gap_s=1.0)]
    config = replace(OPEN, fetching=fetching, tiers=tiers)
    first, second = (run(config, arrivals, num_blocks=num_blocks, **pools) for _ in range(2))
    assert first.total.num_completed == len(arrivals)
    assert numbers(first, {}, wall_s=1.0) == numbers(second, {}, wall_s=1.0)


def test_a_lost_worker_takes_its_fetches_and_tiers_with_it() -> None:
    results = Results()
    mesh = Mesh(replace(OPEN, fetching=FAST, tiers=TIERS, local_prefill_tokens=0, policy="round-robin"), results)
    for number in range(2):
        mesh.add_worker(LARGE, prefill=True, decode=False, name=f"p{number}")
        mesh.add_worker(LARGE, prefill=False, decode=True)

    def replaced(number: int) -> None:
        mesh.lose_worker(f"p{number}")
        mesh.add_worker(LARGE, prefill=True, decode=False, name=f"p{number + 2}")

    for number in range(40):
        mesh.events.after(1.0 + 0.13 * number, replaced, number)
    mesh.run(sorted(arrival for number in range(10) for arrival in conversation(number, 4, gap_s=1.5)))
    settle(mesh)
    assert results.sources["fetched"] > 0 and results.num_resubmissions == 0
    assert results.total.num_completed == 40


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"fetching": Fetching(0.0)}, "fetching"),
        ({"fetching": Fetching(1e9, max_sends=0)}, "fetching"),
        ({"tiers": Tiers(0.0, 1e9)}, "tiers"),
        ({"tiers": Tiers(1e9, -1.0)}, "tiers"),
    ],
)
def test_settings_are_checked(change: dict[str, Fetching | Tiers], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        MeshSettings(**change)  # type: ignore[arg-type]
