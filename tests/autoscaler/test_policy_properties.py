"""What holds whatever comes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.autoscaler.policy.policy import Policy
from pdmesh.autoscaler.settings import AutoscalerSettings, PoolSettings
from pdmesh.autoscaler.views import Hold, PoolName, Snapshot
from tests.autoscaler.scenes import DECODE, GOALS, PREFILL, policy, traffic, view

TICK_S = 10.0
BASE = AutoscalerSettings(
    prefill=PoolSettings(max_replicas=20), decode=PoolSettings(max_replicas=20), max_gpus=24, cool_down_s=60.0, zero_after_s=60.0
)


@dataclass
class Cluster:
    """Does what it is told: pods start in a minute, leave in two ticks, and change sides at once."""

    ready: dict[PoolName, int] = field(default_factory=lambda: {PREFILL: 1, DECODE: 1})
    starting: dict[PoolName, list[float]] = field(default_factory=lambda: {PREFILL: [], DECODE: []})
    draining: dict[PoolName, list[float]] = field(default_factory=lambda: {PREFILL: [], DECODE: []})
    hold: Hold | None = None

    def snapshot(self, now_s: float, rate: float, age_s: float = 0.0, num_queued: int = 0) -> Snapshot:
        for name in (PREFILL, DECODE):
            self.ready[name] += sum(now_s - since_s >= 60 for since_s in self.starting[name])
            self.starting[name] = [since_s for since_s in self.starting[name] if now_s - since_s < 60]
            self.draining[name] = [since_s for since_s in self.draining[name] if now_s - since_s < 2 * TICK_S]
        pools = tuple(
            view(
                name,
                self.ready[name],
                starting_ages_s=tuple(now_s - since_s for since_s in self.starting[name]),
                num_draining=len(self.draining[name]),
                age_s=age_s,
                hold=self.hold if name is PREFILL else None,
            )
            for name in (PREFILL, DECODE)
        )
        return Snapshot(now_s, traffic(rate, window_s=TICK_S, num_queued=num_queued), pools)

    def replicas(self, name: PoolName) -> int:
        return self.ready[name] + len(self.starting[name])

    def apply(self, scaler: Policy, snapshot: Snapshot) -> dict[PoolName, int]:
        """The change of each pool."""
        decision = scaler.decide(snapshot)
        changes = {name: decision.replicas(name) - self.replicas(name) for name in (PREFILL, DECODE)}
        rest = dict(changes)
        for flip in decision.flips:
            self.ready[flip.giver] -= flip.num
            self.ready[flip.taker] += flip.num
            rest[flip.giver] += flip.num
            rest[flip.taker] -= flip.num
        for name, num in rest.items():
            for _ in range(-num):
                if self.starting[name]:
                    self.starting[name].pop()
                else:
                    self.ready[name] -= 1
                    self.draining[name].append(snapshot.now_s)
            self.starting[name] += [snapshot.now_s] * max(0, num)
        return changes


LOADS = st.lists(st.one_of(st.just(0.0), st.floats(0, 200)), min_size=20, max_size=60)


@settings(max_examples=40, deadline=None)
@given(loads=LOADS, queues=st.lists(st.integers(0, 500), min_size=1, max_size=5), zero=st.booleans(), flips=st.booleans())
def test_bounds_and_budget_are_kept_and_nothing_shrinks_soon_after_it_grew(
    loads: list[float], queues: list[int], zero: bool, flips: bool
) -> None:
    pools = PoolSettings(max_replicas=20, allow_zero=zero)
    cluster, scaler = Cluster(), Policy(replace(BASE, prefill=pools, flips=flips), GOALS)
    grew_s = {PREFILL: float("-inf"), DECODE: float("-inf")}
    for number, rate in enumerate(loads):
        now_s = number * TICK_S
        changes = cluster.apply(scaler, cluster.snapshot(now_s, rate, num_queued=queues[number % len(queues)]))
        for name, change in changes.items():
            assert (0 if zero and name is PREFILL else 1) <= cluster.replicas(name) <= 20
            assert change >= 0 or now_s - grew_s[name] >= BASE.cool_down_s
            if change > 0:
                grew_s[name] = now_s
        assert sum(cluster.replicas(name) + len(cluster.draining[name]) for name in (PREFILL, DECODE)) <= 24


@settings(max_examples=40, deadline=None)
@given(loads=LOADS)
def test_growing_again_soon_after_shrinking_takes_more_than_the_headroom(loads: list[float]) -> None:
    """With arrivals known exactly and no lack of GPUs: what is reversed was caused by the load."""
    cluster, scaler = Cluster(), policy(settings=replace(BASE, max_gpus=None, flips=False, forecast="last"))
    shrank: dict[PoolName, tuple[float, float]] = {}
    for number, rate in enumerate(loads):
        now_s = number * TICK_S
        seen = cluster.snapshot(now_s, rate)
        seen = replace(seen, traffic=replace(seen.traffic, window_s=1e9))
        for name, change in cluster.apply(scaler, seen).items():
            if change < 0:
                shrank[name] = (now_s, rate)
            elif change > 0 and name in shrank and now_s - shrank[name][0] < BASE.cool_down_s:
                assert rate > shrank[name][1] * (1 + BASE.headroom)


@settings(max_examples=40, deadline=None)
@given(loads=LOADS, age_s=st.floats(30.1, 1e5))
def test_stale_figures_change_nothing(loads: list[float], age_s: float) -> None:
    cluster, scaler = Cluster(ready={PREFILL: 4, DECODE: 7}), Policy(BASE, GOALS)
    for number, rate in enumerate(loads):
        changes = cluster.apply(scaler, cluster.snapshot(number * TICK_S, rate, age_s=age_s))
        assert changes == {PREFILL: 0, DECODE: 0}


@settings(max_examples=30, deadline=None)
@given(loads=LOADS)
def test_a_person_is_never_fought(loads: list[float]) -> None:
    cluster, scaler = Cluster(ready={PREFILL: 4, DECODE: 1}, hold=Hold("ana", 1e9)), Policy(BASE, GOALS)
    for number, rate in enumerate(loads):
        assert cluster.apply(scaler, cluster.snapshot(number * TICK_S, rate))[PREFILL] == 0


@settings(max_examples=30, deadline=None)
@given(rates=st.tuples(st.floats(0.1, 300), st.floats(0.1, 300)))
def test_more_load_never_gets_fewer(rates: tuple[float, float]) -> None:
    roomy = replace(BASE, max_gpus=None)
    few, many = (
        policy(settings=roomy).decide(Snapshot(0, traffic(rate), (view(PREFILL, 1), view(DECODE, 1)))) for rate in sorted(rates)
    )
    assert all(few.replicas(name) <= many.replicas(name) for name in (PREFILL, DECODE))
