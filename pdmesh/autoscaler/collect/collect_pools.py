"""From workers that are seen, and replicas that were asked for, to the pools that the policy decides on. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from pdmesh.autoscaler.collect.starts import Starts
from pdmesh.autoscaler.collect.workers import SeenWorker, kv_occupancy, typical
from pdmesh.autoscaler.platform import Asked
from pdmesh.autoscaler.views import PoolName, PoolView


@dataclass(frozen=True)
class Pools:
    """Of one model's mesh. `asked` of the platform, `workers` that live."""

    asked: Mapping[PoolName, Asked]
    workers: tuple[SeenWorker, ...]

    def pool_of(self, worker: SeenWorker) -> PoolName:
        """Where it counts: by its roles now, or, where no pool has such roles, by those that it was started with."""
        return worker.pool if worker.pool in self.asked else worker.home

    def here(self, name: PoolName) -> list[SeenWorker]:
        """Those that serve with the pool's roles."""
        return [worker for worker in self.workers if worker.serves and self.pool_of(worker) is name]

    def own(self, name: PoolName) -> list[SeenWorker]:
        """Those that serve and were started for it, whatever they do now."""
        return [worker for worker in self.workers if worker.serves and worker.home is name]

    def num_leaving(self, name: PoolName) -> int:
        """Of its own, those that are not asked for any more and have not been told so far."""
        return max(0, len(self.own(name)) - self.asked[name].replicas)

    def num_lent(self, name: PoolName) -> int:
        """Of its own, those that work for another pool."""
        return sum(self.pool_of(worker) is not name for worker in self.own(name))

    def num_borrowed(self, name: PoolName) -> int:
        """Of those that work for it, others' own."""
        return sum(worker.home is not name for worker in self.here(name))

    def num_own(self, name: PoolName, replicas: int) -> int:
        """How many of its own the platform has to be asked for, so that so many work for it."""
        return max(0, replicas + self.num_lent(name) - self.num_borrowed(name))

    def moved(self, worker: SeenWorker, pool: PoolName) -> "Pools":
        """The same, with other roles for one of the workers."""
        changed = replace(worker, pool=pool)
        return replace(self, workers=tuple(changed if each.key == worker.key else each for each in self.workers))

    def views(self, starts: Mapping[PoolName, Starts], now_s: float, heard_s: float) -> tuple[PoolView, ...]:
        """As the policy takes them; `starts` have been told of these pools already. `heard_s`: when a router was heard last."""
        return tuple(self._view(name, starts[name], now_s, heard_s) for name in self.asked)

    def _view(self, name: PoolName, starts: Starts, now_s: float, heard_s: float) -> PoolView:
        here, leaving = self.here(name), self.num_leaving(name)
        latency, limits = typical(here)
        draining = sum(not worker.serves and worker.home is name for worker in self.workers)
        reported_s = min([heard_s, *(worker.reported_s for worker in here)])
        return PoolView(
            name=name,
            num_ready=max(0, len(here) - leaving),
            starting_ages_s=starts.ages_s(now_s),
            num_draining=draining + leaving,
            latency=latency,
            limits=limits,
            kv_occupancy=kv_occupancy(here),
            num_borrowed=self.num_borrowed(name),
            age_s=max(0.0, now_s - reported_s),
            hold=self.asked[name].hold,
        )

    def follow(self, starts: Mapping[PoolName, Starts], now_s: float) -> None:
        """Tell `starts` who has come."""
        for name, asked in self.asked.items():
            starts[name].update(now_s, asked.replicas, len(self.own(name)) - self.num_leaving(name))


def idlest(workers: Collection[SeenWorker], taker: PoolName, num: int) -> list[SeenWorker]:
    """Of those that may change sides: those come home first that the taker had lent, then those who have least to do."""
    return sorted(workers, key=lambda worker: (worker.home is not taker, worker.num_busy, worker.used_blocks, worker.key))[:num]
