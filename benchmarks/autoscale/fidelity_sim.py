"""The same requests through a simulated mesh: what each took there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from benchmarks.autoscale.fidelity_calibration import Calibration
from benchmarks.autoscale.fidelity_runs import Passage, Run
from pdmesh.planning.objectives import ModelObjective
from pdmesh.simulator.arrivals import Arrival
from pdmesh.simulator.mesh import Mesh
from pdmesh.simulator.request import End, Request
from pdmesh.simulator.routers.routing import MODEL
from pdmesh.simulator.settings import MeshSettings


@dataclass
class Audience:
    """Keeps what became of those that count."""

    from_s: float
    router_s: float
    passages: list[Passage] = field(default_factory=list)
    num_refused: int = 0

    def arrived(self, request: Request) -> None:
        """Nothing is known yet."""

    def ended(self, request: Request, end: End, now: float) -> None:
        """As `pdmesh.simulator.mesh.Audience` says. Raises ValueError for one that was lost: nobody dies here."""
        if request.arrival.at_s < self.from_s:
            return
        if end is End.LOST:
            raise ValueError(f"request {request.number} was lost: {request.reason}")
        self.num_refused += end is End.REFUSED
        if end is End.COMPLETED:
            self.passages.append(_passage(request, self.router_s))


def simulated(run: Run, settings: MeshSettings, measured: Calibration, seeds: Iterable[int]) -> list[Run]:
    """The run's arrivals on its workers, as they said they were; once for each seed, which draws what is left to chance."""
    return [_simulated(run, settings, measured, seed) for seed in seeds]


def objective(ttft_ms: int, tpot_ms: int) -> ModelObjective:
    """Of the simulated model."""
    return ModelObjective(MODEL, ttft_ms, tpot_ms, 0.99)


def _simulated(run: Run, settings: MeshSettings, measured: Calibration, seed: int) -> Run:
    audience = Audience(run.from_s, settings.router_s)
    mesh = Mesh(settings, audience, prefix_tokens=0, seed=seed)
    for worker in run.workers:
        spec = worker.spec(between_s=measured.between_s, noise=measured.noise, noise_lasts_s=measured.noise_lasts_s)
        mesh.add_worker(spec, prefill=worker.prefill, decode=worker.decode, name=worker.name)
    mesh.run(Arrival(*one) for one in run.arrivals)
    return Run(run.arrivals, run.from_s, audience.passages, audience.num_refused)


def _passage(request: Request, router_s: float) -> Passage:
    trail, at_s = request.trail, request.arrival.at_s
    assert trail is not None and request.ttft_s is not None, "it was answered"
    reserve_s = trail.placed_at - trail.decided_at
    queue_s = trail.computed_at - trail.compute_s - trail.placed_at
    queued_s = trail.decided_at - at_s - router_s
    parts = {
        "route": router_s,
        "admission_queue": queued_s,
        "reserve": reserve_s,
        "prefill_queue": queue_s,
        "prefill_compute": trail.compute_s,
        "first_token_return": request.ttft_s - router_s - queued_s - reserve_s - queue_s - trail.compute_s,
        "kv_exposed": 0.0 if request.is_local else trail.after_s,
    }
    return Passage(at_s, request.num_input, request.num_output, request.ttft_s, request.tpot_s or 0.0, request.is_local, parts)
