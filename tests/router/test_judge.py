"""Whom requests leave out: as if every worker had been looked at."""

from collections import defaultdict
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.layout import Layout
from router.fleet.circuit_breaker import HealthRecorder, Role
from router.routing.fleet_snapshot import FleetSnapshot
from router.routing.worker_snapshot import WorkerKey, WorkerSnapshot
from tests.router.fleets import worker


@st.composite
def fleets(draw: st.DrawFn) -> list[WorkerSnapshot]:
    views = []
    for number in range(draw(st.integers(1, 16))):
        view = worker(draw(st.sampled_from(["p", "d", "pd"])) + str(number), identity=("m", draw(st.sampled_from("ab"))))
        views.append(replace(view, layout=Layout(16, draw(st.sampled_from(["float32", "bfloat16"])))))
    return views


def by_kind(views: list[WorkerSnapshot], role: Role) -> list[list[WorkerKey]]:
    groups = defaultdict(list)
    for view in views:
        if view.decode if role is Role.DECODE else view.prefill:
            groups[view.kind].append(view.key)
    return list(groups.values())


bad_ones = st.lists(st.tuples(st.integers(0, 15), st.sampled_from(Role)), max_size=12)


@settings(deadline=None)
@given(
    fleets(), st.lists(st.tuples(st.integers(0, 15), st.sampled_from(Role)), max_size=12), st.sampled_from([0.0, 0.3, 0.5, 1.0])
)
async def test_a_few_peers_are_enough_to_know(views: list[WorkerSnapshot], bad: list[tuple[int, Role]], share: float) -> None:
    fleet_snapshot = FleetSnapshot(views)
    health_recorder = HealthRecorder(fleet_snapshot.views)
    health_recorder.health.limits = replace(health_recorder.health.limits, max_share=share)
    for number, role in bad:
        for _ in range(3):
            health_recorder.failed(views[number % len(views)].key, role, "it broke")
    health_recorder.failed(("gone:1", 1), Role.PREFILL, "it was lost")
    for role in Role:
        everybody = (health_recorder.health.ejected(role, group, 0.0) for group in by_kind(views, role))
        assert health_recorder.ejected(fleet_snapshot, role) == frozenset[WorkerKey]().union(*everybody)


def test_silent_workers_get_nothing_while_there_are_others_of_their_kind() -> None:
    views = [worker(name, identity=("m", "a")) for name in ("p0", "p1", "pd2")]
    silent: set[WorkerKey] = set()
    health_recorder = HealthRecorder(lambda: views, lambda: frozenset(silent))
    fleet_snapshot = FleetSnapshot(views)
    assert health_recorder.left_out(fleet_snapshot, Role.PREFILL) == frozenset()
    silent.add(views[0].key)
    assert health_recorder.left_out(fleet_snapshot, Role.PREFILL) == {views[0].key}
    silent.update(view.key for view in views)
    assert health_recorder.left_out(fleet_snapshot, Role.PREFILL) == frozenset(), "one of them has to"
    silent.discard(views[2].key)
    assert health_recorder.left_out(fleet_snapshot, Role.PREFILL) == {views[0].key, views[1].key}
    assert health_recorder.left_out(fleet_snapshot, Role.DECODE) == frozenset(), "those that prefill only are not asked"
