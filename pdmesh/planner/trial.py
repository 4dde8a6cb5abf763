"""Simulates one mesh: the share of the requests that kept their objectives, and what the others missed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pdmesh.planner.meshes import Point
from pdmesh.simulator.arrivals import Arrival
from pdmesh.simulator.mesh import Mesh
from pdmesh.simulator.request import End, Request
from pdmesh.simulator.results import Results
from pdmesh.simulator.settings import MeshSettings
from router.flow_control.capacity import AdmissionSettings

SEATS_OVER = 2
"""Admitted requests as a multiple of what decode workers can hold: the rest waits in the request queue, which must not be the
limit."""


@dataclass(frozen=True)
class Outcome:
    """Hold the outcome. Shares are of all requests; seconds. `late` missed TTFT (whatever else), `slow` only TPOT. `batch`:
    concurrent sequences of a decode worker, on average; `local`: the share of completed requests whose prompt the decode worker
    computed itself."""

    attainment: float
    late: float
    slow: float
    refused: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    batch: float
    local: float


@dataclass
class Watched:
    """Stop a simulation when more than `max_misses` requests have missed; None: never. It wraps its results instead of
    inheriting: they may be compiled, and interpreted classes cannot inherit from compiled ones."""

    max_misses: int | None = None
    results: Results = field(default_factory=Results)
    stop: list[Mesh] = field(default_factory=list)
    num_late: int = 0
    num_slow: int = 0
    decoding_s: float = 0.0
    is_stopped: bool = False

    def arrived(self, request: Request) -> None:
        """Count an arrival."""
        self.results.arrived(request)

    def ended(self, request: Request, end: End, now: float) -> None:
        """Count the end of a request."""
        self.results.ended(request, end, now)
        if end is End.COMPLETED:
            late = _over(request.ttft_s, request.ttft_goal_s)
            self.num_late += late
            self.num_slow += not late and _over(request.tpot_s, request.tpot_goal_s)
            self.decoding_s += (request.last_at or 0.0) - (request.first_at or 0.0)
        if self.max_misses is not None and self.num_missed > self.max_misses and not self.is_stopped:
            self.is_stopped = True
            self.stop[0].events.stop()

    @property
    def num_missed(self) -> int:
        """Return the misses so far."""
        total = self.results.total
        return total.num_completed + total.num_refused + total.num_lost - total.num_met


def simulate(point: Point, arrivals: Sequence[Arrival], settings: MeshSettings, max_misses: int | None = None) -> Outcome | None:
    """Return the outcome; None: more than `max_misses` missed. `settings`: all except admission's bounds, which follow the mesh's
    size."""
    shape, size = point.shape, point.size
    watched = Watched(max_misses=max_misses)
    mesh = Mesh(_roomy(settings, point), watched, prefix_tokens=shape.decode.spec.prefix_tokens)
    watched.stop.append(mesh)
    for _ in range(size.num_prefill if shape.prefill else 0):
        assert shape.prefill is not None
        mesh.add_worker(shape.prefill.spec, prefill=True, decode=False)
    for _ in range(size.num_decode):
        mesh.add_worker(shape.decode.spec, prefill=False, decode=True)
    mesh.run(arrivals)
    return None if watched.is_stopped else _outcome(watched, size.num_decode)


def _roomy(settings: MeshSettings, point: Point) -> MeshSettings:
    if settings.admission is None:
        return settings
    num = max_inflight(point)
    admission = replace(settings.admission, max_inflight=num, max_queued=num)
    return replace(settings, admission=admission)


def max_inflight(point: Point) -> int:
    """Return how many requests each router admits."""
    return max(AdmissionSettings().max_inflight, SEATS_OVER * point.num_seats)


def _outcome(watched: Watched, num_decode: int) -> Outcome:
    results, total = watched.results, watched.results.total
    num = max(1, total.num_arrived)
    return Outcome(
        attainment=total.num_met / num,
        late=watched.num_late / num,
        slow=watched.num_slow / num,
        refused=(total.num_refused + total.num_lost) / num,
        ttft_p50_s=results.ttft.quantile(0.5),
        ttft_p99_s=results.ttft.quantile(0.99),
        tpot_p50_s=results.tpot.quantile(0.5),
        tpot_p99_s=results.tpot.quantile(0.99),
        batch=watched.decoding_s / max(results.ended_at, 1e-9) / num_decode,
        local=results.num_local / max(1, total.num_completed),
    )


def _over(value_s: float | None, goal_s: float | None) -> bool:
    return value_s is not None and goal_s is not None and value_s > goal_s
