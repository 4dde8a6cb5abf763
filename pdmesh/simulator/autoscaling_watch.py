"""What an autoscaler is told of a simulated mesh: counted by `router/traffic.py`, made figures of by `autoscaler/collect_*.py`.

requests ─► a Traffic of each router ─► look: TrafficStatus ─► Rounds ─► traffic: rates, lengths, latencies of a window

Nothing is on a wire: every router answers every look, at once.
"""

from pdmesh.autoscaler.collect.collect_counts import Counts, Rounds, counts_of, total
from pdmesh.autoscaler.collect.traffic import traffic_of
from pdmesh.autoscaler.collect.workers import SeenWorker
from pdmesh.autoscaler.views import PoolName, Traffic
from pdmesh.planning.capacity_load import Limits
from pdmesh.simulator.mesh import Audience
from pdmesh.simulator.request import End, Request
from pdmesh.simulator.routers.ledger import EPOCH, MODEL
from pdmesh.simulator.workers.spec import WorkerSpec
from pdmesh.simulator.workers.stats import Figures
from pdmesh.v1 import mesh_pb2
from router.flow_control.types import BATCH
from router.telemetry.traffic import ModelTraffic, Visit
from router.telemetry.traffic import Traffic as RouterTraffic
from router.telemetry.traffic_status import traffic_status


class Watch:
    """Hears of every request, and passes it on. `look` is a round of the collector, at times that grow. As of the last one:
    what each router `told`, the `counts` of all of them since the beginning, the `traffic` of the latest window."""

    def __init__(self, audience: Audience, num_routers: int, window_s: float) -> None:
        self.counts = Counts()
        self._audience, self._window_s = audience, window_s
        self._routers = [RouterTraffic((MODEL,), 0.0) for _ in range(num_routers)]
        self._visits: dict[Request, Visit] = {}
        self._rounds = Rounds(2 * window_s)
        self.told: list[mesh_pb2.TrafficStatus] = []
        self.look(0.0)  # from which the first round is counted

    def arrived(self, request: Request) -> None:
        """It is at a router."""
        arrival = request.arrival
        is_batch = arrival.priority == BATCH
        self._visits[request] = self._router(request).arrive(request.num_input, arrival.at_s, is_batch=is_batch)
        self._audience.arrived(request)

    def ended(self, request: Request, end: End, now: float) -> None:
        """It is over."""
        visit, is_complete = self._visits.pop(request), end is End.COMPLETED
        if end is End.REFUSED:
            visit.refused()
        visit.ended(request.num_output if is_complete else request.num_emitted, request.num_cached)
        if is_complete:
            self._compare(request)
        self._audience.ended(request, end, now)

    def look(self, now: float) -> None:
        """Every router is asked."""
        for request, visit in self._visits.items():
            if request.decided_at is not None:
                visit.placed()
        self.told = [told for router in self._routers for told in traffic_status(router, now)]
        counts = [counts_of(told) for told in self.told]
        for number, counted in enumerate(counts):
            self._rounds.heard(number, counted, now)
        self._rounds.close(now)
        self.counts = total(counts)

    def traffic(self, quantile: float) -> Traffic:
        """From the second look on."""
        traffic = traffic_of(self._rounds.rounds, self.told, self._window_s, quantile, age_s=0.0)
        assert traffic is not None, "nobody has looked since the beginning"
        return traffic

    def _router(self, request: Request) -> ModelTraffic:
        """The mesh deals requests out in turn."""
        return self._routers[request.number % len(self._routers)].of(MODEL)

    def _compare(self, request: Request) -> None:
        """As `router/learning.py`: of requests that went smoothly, from the policy's decision on."""
        predicted, first_s, decided_s = request.prediction, request.first_at, request.decided_at
        if predicted is None or first_s is None or decided_s is None or request.num_resubmissions:
            return
        counted, tpot_s = self._router(request), request.tpot_s
        counted.ttft.add(first_s - decided_s, predicted.ttft_s)
        if tpot_s:
            counted.tpot.add(tpot_s, predicted.tpot_s)


def seen_worker(name: str, figures: Figures, spec: WorkerSpec, now: float, *, pool: PoolName, home: PoolName) -> SeenWorker:
    """A worker as all routers tell of it."""
    return SeenWorker(
        worker_id=name,
        address=name,
        epoch=EPOCH,
        pool=pool,
        home=home,
        draining=figures.draining,
        num_busy=figures.num_running + figures.num_waiting + figures.num_reserved + figures.num_held,
        used_blocks=figures.num_total_blocks - figures.num_free_blocks,
        total_blocks=figures.num_total_blocks,
        reported_s=now,
        latency=spec.speed,
        limits=Limits(spec.max_num_batched_tokens, spec.max_num_seqs, spec.num_blocks * spec.block_size),
    )
