"""The simulated mesh: every arrival ends exactly once, nothing is left behind, equal runs are equal, times add up."""

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.planning.latency_model import Work
from pdmesh.planning.objectives import ModelObjective
from pdmesh.simulator.arrivals import Arrival
from pdmesh.simulator.mesh import Mesh, PoolCounts
from pdmesh.simulator.request import End, Request
from pdmesh.simulator.routers.routing import MODEL
from pdmesh.simulator.settings import HandOff, MeshSettings
from pdmesh.simulator.workers.spec import WorkerSpec
from router.flow_control.capacity import AdmissionSettings
from router.routing.policy import POLICIES
from tests.simulator.specs import LARGE, SMALL, SPEED

OBJECTIVE = ModelObjective(MODEL, 300, 20, 0.99)
OPEN = MeshSettings(admission=None)


@dataclass
class Audience:
    """Remembers everybody."""

    ends: dict[int, tuple[End, float | None, float | None]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    num_arrived: int = 0

    def arrived(self, request: Request) -> None:
        self.num_arrived += 1

    def ended(self, request: Request, end: End, now: float) -> None:
        assert request.number not in self.ends, "it ended twice"
        self.ends[request.number] = (end, request.first_at, request.last_at)
        self.requests.append(request)

    def count(self) -> Counter[End]:
        return Counter(end for end, _, _ in self.ends.values())


def run(
    settings: MeshSettings, arrivals: list[Arrival], *, prefill: int = 0, decode: int = 0, both: int = 0, spec: WorkerSpec = LARGE
) -> tuple[Audience, Mesh]:
    audience = Audience()
    mesh = Mesh(settings, audience)
    for number, roles in ((prefill, (True, False)), (decode, (False, True)), (both, (True, True))):
        for _ in range(number):
            mesh.add_worker(spec, prefill=roles[0], decode=roles[1])
    mesh.run(arrivals)
    settle(mesh)
    return audience, mesh


def settle(mesh: Mesh) -> None:
    """What is on its way arrives; then nobody holds anything."""
    mesh.events.run(until_s=mesh.events.now + 5.0)
    mesh.check()


def steady(num: int, gap_s: float, num_input: int = 200, num_output: int = 20) -> list[Arrival]:
    return [Arrival(number * gap_s, num_input, num_output) for number in range(num)]


arrivals = st.lists(
    st.tuples(st.floats(0.0, 0.2), st.integers(1, 900), st.integers(1, 60), st.integers(1, 3), st.sampled_from("ab")), max_size=40
)


@given(
    arrivals,
    st.sampled_from(list(POLICIES)),
    st.sampled_from([None, AdmissionSettings(max_inflight=6, max_queued=4)]),
    st.sampled_from([None, OBJECTIVE]),
    st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 1)).filter(lambda counts: counts[1] + counts[2] > 0),
    st.integers(1, 2),
)
@settings(max_examples=60, deadline=None)
def test_every_arrival_ends_once(
    draws: list[tuple[float, int, int, int, str]],
    policy: str,
    admission: AdmissionSettings | None,
    objective: ModelObjective | None,
    counts: tuple[int, int, int],
    num_routers: int,
) -> None:
    at_s, load = 0.0, []
    for gap_s, num_input, num_output, priority, tenant in draws:
        at_s += gap_s
        load.append(Arrival(at_s, num_input, num_output, (), tenant, priority))
    small = replace(SMALL, num_blocks=160)
    chosen = MeshSettings(num_routers, policy, admission=admission, objective=objective)
    audience, _ = run(chosen, load, prefill=counts[0], decode=counts[1], both=counts[2], spec=small)
    assert audience.num_arrived == len(load) == len(audience.ends)
    for request in audience.requests:
        end = audience.ends[request.number][0]
        assert end is not End.LOST
        if end is End.COMPLETED:
            assert request.first_at is not None
            assert request.last_at is not None
            assert request.arrival.at_s < request.first_at <= request.last_at
            assert (request.num_output == 1) == (request.first_at == request.last_at)
        else:
            assert request.reason


def test_tokens_are_conserved() -> None:
    audience, mesh = run(replace(OPEN, policy="least-loaded"), steady(150, 0.02), prefill=2, decode=2)
    assert audience.count() == {End.COMPLETED: 150}
    figures = mesh.figures().values()
    assert sum(each.num_prefilled_tokens for each in figures) == 150 * 200
    assert sum(each.num_generated_tokens for each in figures) == 150 * 20
    assert sum(each.num_preemptions for each in figures) == 0


def test_equal_runs_are_equal() -> None:
    load = [Arrival(number * 0.013, 50 + 37 * number % 700, 1 + 11 * number % 50) for number in range(300)]
    chosen = MeshSettings(num_routers=2, objective=OBJECTIVE)
    first, _ = run(chosen, load, prefill=1, decode=1, both=1)
    second, _ = run(chosen, load, prefill=1, decode=1, both=1)
    assert first.ends == second.ends


def test_the_parts_of_a_local_request_add_up() -> None:
    chosen = MeshSettings(router_s=0.001, call_s=0.002)
    audience, _ = run(chosen, [Arrival(1.0, 200, 3)], both=1)
    first_s = 1.0 + 0.001 + 2 * 0.002 + SPEED.step_s(Work(200, 200 * 201 // 2))
    last_s = first_s + SPEED.decode_s(1, 201) + SPEED.decode_s(1, 202)
    assert audience.ends[0][0] is End.COMPLETED
    assert audience.ends[0][1:] == pytest.approx((first_s, last_s))
    assert audience.requests[0].is_local


def test_the_parts_of_a_remote_request_add_up() -> None:
    handoff = HandOff(fixed_s=0.003, bytes_per_s=1e9, num_parts=4)
    chosen = replace(OPEN, router_s=0.001, call_s=0.002, policy="round-robin", handoff=handoff)
    audience, _ = run(chosen, [Arrival(1.0, 200, 3)], prefill=1, decode=1)
    prompt_s = SPEED.step_s(Work(200, 200 * 201 // 2))
    computed_s = 1.0 + 0.001 + 3 * 0.002 + prompt_s
    transfer_s = 200 * LARGE.kv_bytes_per_token / 1e9
    exposed_s = 0.003 + max(transfer_s - prompt_s, transfer_s / 4)
    last_s = computed_s + exposed_s + SPEED.decode_s(1, 201) + SPEED.decode_s(1, 202) + 0.002
    assert audience.ends[0][0] is End.COMPLETED
    assert audience.ends[0][1:] == pytest.approx((computed_s + 0.002, last_s))
    assert not audience.requests[0].is_local


def test_overload_is_refused_and_what_was_admitted_keeps_its_objective() -> None:
    audience, _ = run(MeshSettings(objective=OBJECTIVE), steady(600, 0.01), both=1)
    counts = audience.count()
    assert counts[End.REFUSED] > 100
    assert {request.reason for request in audience.requests if audience.ends[request.number][0] is End.REFUSED} <= {
        "objective", "queue_full", "share", "priority",
    }  # fmt: skip
    done = [request for request in audience.requests if audience.ends[request.number][0] is End.COMPLETED]
    kept = sum(request.ttft_s is not None and request.ttft_s <= 0.3 for request in done)
    assert len(done) > 50
    assert kept > 0.9 * len(done)


def test_who_finds_no_room_waits_for_it_in_line() -> None:
    """Each output holds a third of the blocks: the fourth request begins when one of the first has ended."""
    narrow = replace(SMALL, num_blocks=66, max_num_seqs=3)
    audience, _ = run(OPEN, steady(6, 0.001, num_input=100, num_output=30), both=1, spec=narrow)
    assert audience.count() == {End.COMPLETED: 6}
    ended = sorted(last for _, _, last in audience.ends.values() if last is not None)
    began = sorted(first for _, first, _ in audience.ends.values() if first is not None)
    assert began[3] > ended[0]


def test_too_large_for_anybody() -> None:
    audience, _ = run(MeshSettings(), [Arrival(0.0, LARGE.max_context + 1, 5)], both=1)
    assert audience.requests[0].reason == "too_large"


def test_a_prefix_is_computed_once() -> None:
    load = [Arrival(2.0 * number, 2048 + 100, 4, (1, 2, 3, 4)) for number in range(6)]
    audience, mesh = run(MeshSettings(), load, both=3)
    assert audience.count() == {End.COMPLETED: 6}
    assert sum(each.num_prefix_hit_tokens for each in mesh.figures().values()) == 5 * 2048


def test_what_is_cut_short_is_lost() -> None:
    audience = Audience()
    mesh = Mesh(OPEN, audience)
    mesh.add_worker(LARGE, prefill=True, decode=True)
    mesh.run(steady(3, 0.1, num_output=1000), until_s=1.0)
    assert audience.count() == {End.LOST: 3}
    assert mesh.num_live == 0


def test_nobody_to_serve_it() -> None:
    audience, _ = run(replace(OPEN, place_timeout_s=2.0), steady(2, 0.1), prefill=1)
    assert {request.reason for request in audience.requests} == {"no_worker"}


def test_a_pod_starts_works_drains_and_goes() -> None:
    audience = Audience()
    mesh = Mesh(OPEN, audience)
    mesh.add_worker(LARGE, prefill=True, decode=True, name="old")
    mesh.add_worker(LARGE, prefill=True, decode=True, name="new", ready_after_s=3.0)
    seen: list[PoolCounts] = []
    mesh.every(1.0, lambda: seen.append(mesh.counts()["both"]))
    mesh.events.at(4.5, mesh.drain_worker, "old")
    mesh.run(steady(100, 0.1))
    assert audience.count() == {End.COMPLETED: 100}
    assert seen[0] == PoolCounts(starting=1, ready=1)
    assert seen[3] == PoolCounts(ready=2)
    assert seen[-1] == PoolCounts(ready=1)
    assert mesh.worker("old") is None
    gone_s = mesh.pod_seconds()["both"] - mesh.events.now
    assert 4.5 < gone_s < 6.0


def test_a_lost_worker_loses_no_request() -> None:
    audience = Audience()
    mesh = Mesh(replace(OPEN, policy="least-loaded"), audience)
    for number in range(2):
        mesh.add_worker(LARGE, prefill=False, decode=True, name=f"d{number}")
        mesh.add_worker(LARGE, prefill=True, decode=False, name=f"p{number}")
    mesh.events.at(2.01, mesh.lose_worker, "d0")
    mesh.events.at(2.6, mesh.lose_worker, "p0")
    mesh.run(steady(80, 0.05, num_output=120))
    settle(mesh)
    assert audience.count() == {End.COMPLETED: 80}
    again = [request for request in audience.requests if request.num_resubmissions]
    assert again
    assert all(0 <= request.num_emitted < request.num_output for request in again)
    assert any(request.num_emitted for request in again)


def test_roles_change_while_it_works() -> None:
    audience = Audience()
    mesh = Mesh(replace(OPEN, policy="least-loaded"), audience)
    mesh.add_worker(LARGE, prefill=False, decode=True, name="stays")
    mesh.add_worker(LARGE, prefill=True, decode=False, name="changes")
    mesh.events.at(2.0, lambda: mesh.set_roles("changes", prefill=False, decode=True))
    mesh.run(steady(80, 0.05))
    settle(mesh)
    assert audience.count() == {End.COMPLETED: 80}
    late = [request for request in audience.requests if request.arrival.at_s > 2.5]
    early = [request for request in audience.requests if request.arrival.at_s < 1.9]
    assert all(request.is_local for request in late)
    assert not any(request.is_local for request in early)
    assert mesh.counts()["decode"] == PoolCounts(ready=2)
    assert mesh.pod_seconds()["prefill"] == pytest.approx(2.0)


@pytest.mark.parametrize("name", ("num_routers", "policy", "report_period_s", "call_s", "token_s"))
def test_settings_name_what_is_wrong(name: str) -> None:
    wrong: dict[str, object] = {"num_routers": 0, "policy": "best", "report_period_s": 0.0, "call_s": -1.0, "token_s": -1.0}
    with pytest.raises(ValueError, match=name):
        replace(OPEN, **{name: wrong[name]})  # type: ignore[arg-type]


def test_who_waits_is_counted() -> None:
    mesh = Mesh(MeshSettings(admission=AdmissionSettings(max_inflight=2)), Audience())
    mesh.add_worker(LARGE, prefill=True, decode=True)
    seen: list[int] = []
    mesh.every(0.05, lambda: seen.append(mesh.num_waiting))
    mesh.run(steady(10, 0.001))
    assert max(seen) == 8
    assert mesh.num_waiting == 0
