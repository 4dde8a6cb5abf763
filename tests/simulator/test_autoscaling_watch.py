"""What a simulated mesh's autoscaler is told is what a real one's collector would make of the same routers and workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from pdmesh.autoscaler.collect.collect import Collector
from pdmesh.autoscaler.collect.traffic import USUAL_GAPS
from pdmesh.autoscaler.collect.workers import workers_of
from pdmesh.autoscaler.views import PoolName, Traffic
from pdmesh.planning.latency_model import Drafts
from pdmesh.planning.objectives import ModelObjective
from pdmesh.simulator.arrivals import Arrival
from pdmesh.simulator.autoscaling import Watch, seen_worker
from pdmesh.simulator.mesh import Mesh
from pdmesh.simulator.results import Results
from pdmesh.simulator.routers.routing import EPOCH, MODEL
from pdmesh.simulator.settings import MeshSettings
from pdmesh.v1 import common_pb2, mesh_pb2, worker_pb2
from pdmesh.v1.worker_pb2 import ROLE_DECODE, ROLE_PREFILL
from router.flow_control.slo_admission import BATCH, STANDARD
from tests.autoscaler.routers import ToldRouter, serving
from tests.simulator.specs import SMALL, SPEED

PERIOD_S, WINDOW_S, QUANTILE = 5.0, 15.0, 0.95
OBJECTIVE = ModelObjective(MODEL, 500, 40, QUANTILE)


@dataclass
class Watched:
    """A mesh with one worker, looked at every period: what its routers told, and what became of it."""

    num_routers: int = 1
    told: list[list[mesh_pb2.TrafficStatus]] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.results = Results()
        self.watch = Watch(self.results, self.num_routers, WINDOW_S)
        settings = MeshSettings(num_routers=self.num_routers, objective=OBJECTIVE)
        self.mesh = Mesh(settings, self.watch, prefix_tokens=SMALL.prefix_tokens)
        self.worker = self.mesh.add_worker(SMALL, prefill=True, decode=True)
        self.told.append(self.watch.told)
        self.every(PERIOD_S, self._look)

    def every(self, period_s: float, action: Callable[[], None]) -> None:
        self.mesh.every(period_s, action)

    def _look(self) -> None:
        self.watch.look(self.mesh.events.now)
        self.told.append(self.watch.told)
        self.traffic.append(self.watch.traffic(QUANTILE))


def arrivals(num: int, at_s: Callable[[int], float], num_output: int = 10, priority: int = STANDARD) -> list[Arrival]:
    return [Arrival(at_s(number), 100, num_output, priority=priority) for number in range(num)]


def overload(priority: int) -> list[Arrival]:
    """More than the worker can do."""
    return arrivals(2000, lambda number: number / 50, 20, priority)


async def test_a_collector_on_the_wire_says_the_same_of_the_same_routers() -> None:
    """Two of them, with requests that wait, are refused and are answered."""
    watched = Watched(num_routers=2)
    watched.mesh.run(overload(STANDARD))
    assert any(seen.num_queued and seen.queue_wait_s for seen in watched.traffic)
    assert watched.watch.counts.num_arrived > 1000 and all(told.num_arrived and told.num_refused for told in watched.told[-1])

    routers = [ToldRouter(mesh_pb2.GetStatusResponse(epoch=number + 1)) for number in range(2)]
    async with serving(routers[0]), serving(routers[1]):
        collector, heard = Collector([router.address for router in routers], MODEL, window_s=WINDOW_S), []
        for number, all_told in enumerate(watched.told):
            for router, told in zip(routers, all_told, strict=True):
                router.status = mesh_pb2.GetStatusResponse(epoch=router.status.epoch, traffic=[told])
            routers[0].status.num_inflight = watched.traffic[number - 1].num_open if number else 0
            await collector.look(PERIOD_S * number)
            assert not collector.problems
            heard.append(collector.traffic(PERIOD_S * number, QUANTILE))
        await collector.close()
    assert heard[0] is None and heard[1:] == watched.traffic


def test_bursts_are_seen_and_each_router_sees_its_own() -> None:
    """Three at a time every 0.3 s: gaps of 0, 0 and 0.3 s, whose variance is twice their mean squared."""
    threes, even = Watched(), Watched(num_routers=2)
    threes.mesh.run(arrivals(300, lambda number: number // 3 * 0.3))
    assert threes.traffic[2].burstiness == pytest.approx((150 * 2 + USUAL_GAPS) / (150 + USUAL_GAPS), rel=0.02)
    even.mesh.run(arrivals(300, lambda number: number / 10))
    assert even.traffic[4].rate_per_s == pytest.approx(10.0)
    assert even.traffic[4].burstiness == pytest.approx(USUAL_GAPS / (75 + USUAL_GAPS)), "75 gaps at each of two"


def test_nobody_promised_batch_that_it_would_not_wait() -> None:
    standard, batch = Watched(), Watched()
    for watched, priority in ((standard, STANDARD), (batch, BATCH)):
        watched.mesh.run(overload(priority))
        assert any(seen.num_queued for seen in watched.traffic)
    assert max(seen.queue_wait_s for seen in standard.traffic) > 0
    assert max(seen.queue_wait_s for seen in batch.traffic) == 0


def test_who_has_a_worker_waits_no_more() -> None:
    watched, live = Watched(), list[int]()
    watched.every(PERIOD_S, lambda: live.append(watched.mesh.num_live))
    watched.mesh.run(arrivals(60, lambda number: number / 2 + 0.1, num_output=400))
    assert min(live[:6]) >= 2, "they run for seconds"
    assert {(seen.num_queued, seen.queue_wait_s) for seen in watched.traffic} == {(0, 0.0)}


def test_latencies_are_those_from_the_decision_on() -> None:
    """Nobody waits for another here: all take as long as was predicted, one step more or less."""
    watched = Watched()
    watched.mesh.run(arrivals(200, lambda number: number / 4))
    ttft, tpot = watched.traffic[3].ttft, watched.traffic[3].tpot
    exact = watched.results.ttft.quantile(QUANTILE) - MeshSettings().router_s
    assert ttft.observed_s == pytest.approx(exact, rel=0.06) and ttft.predicted_s == pytest.approx(exact, rel=0.2)
    assert tpot.observed_s == pytest.approx(watched.results.tpot.quantile(QUANTILE), rel=0.06)
    assert tpot.observed_s == pytest.approx(SPEED.decode_s(1, 105), rel=0.1)


def test_a_router_tells_the_same_of_a_worker() -> None:
    """By the fields of its load report that carry these figures, each another number."""
    watched, now = Watched(), 20.0
    figures = watched.mesh.figures()[watched.worker]._replace(
        num_running=1, num_waiting=2, num_reserved=4, num_held=8, num_free_blocks=123, draining=True, drafts=Drafts(1.5, 2.0)
    )
    names = ("num_running", "num_waiting", "num_reserved", "num_held", "num_free_blocks", "num_total_blocks", "draining")
    prices = ("fixed_s", "per_prefill_token_s", "per_prefill_context_s", "per_sequence_s", "per_context_token_s", "num_steps")
    load = worker_pb2.LoadReport(
        roles=[ROLE_PREFILL],
        latency_model=worker_pb2.LatencyModel(**{name: getattr(SPEED, name) for name in prices}),
        speculation=worker_pb2.SpeculationReport(tokens_per_row=1.5, computed_per_row=2.0, num_rows=1),
        **{name: getattr(figures, name) for name in names},
    )
    info = worker_pb2.WorkerInfo(
        worker_id=watched.worker, address=watched.worker, epoch=EPOCH, home_roles=[ROLE_DECODE], num_blocks=SMALL.num_blocks,
        identity=common_pb2.Identity(model=MODEL, weights_hash="w"), layout=common_pb2.KVLayout(block_size=SMALL.block_size),
        max_num_seqs=SMALL.max_num_seqs, max_num_batched_tokens=SMALL.max_num_batched_tokens,
    )  # fmt: skip
    told = mesh_pb2.GetStatusResponse(workers=[mesh_pb2.WorkerStatus(info=info, load=load, alive=True)])
    seen = seen_worker(watched.worker, figures, SMALL, now, pool=PoolName.PREFILL, home=PoolName.DECODE)
    assert workers_of([(now, told)], MODEL) == [seen] and seen.num_busy == 15
