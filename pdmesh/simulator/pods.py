"""One pod of the simulated mesh: a worker, its roles, and where it is in its life."""

from dataclasses import dataclass

from pdmesh.simulator.pools import Phase, pool_of
from pdmesh.simulator.workers.stats import Figures, figures_of
from pdmesh.simulator.workers.worker import ModelledWorker


@dataclass(eq=False, slots=True)
class Pod:
    """Roles are what routers may give it: what it has it finishes."""

    worker: ModelledWorker
    prefill: bool
    decode: bool
    phase: Phase = Phase.STARTING
    told_changes: int = -1
    told_phase: Phase = Phase.STARTING

    @property
    def pool(self) -> str:
        """By its roles."""
        return pool_of(prefill=self.prefill, decode=self.decode)

    def figures(self, now: float) -> Figures:
        """What it reports at `now`."""
        is_draining = self.phase is Phase.DRAINING
        return figures_of(self.worker, now, prefill=self.prefill, decode=self.decode, draining=is_draining)

    def has_news(self) -> bool:
        """Would its report differ from the one before? To be asked once for each."""
        worker = self.worker
        before = (self.told_changes, self.told_phase)
        self.told_changes, self.told_phase = worker.num_changes, self.phase
        return worker.course is not None or before != (worker.num_changes, self.phase)
