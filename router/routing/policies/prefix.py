"""prefix: the workers with the longest cached prefix of the prompt, whatever their load. Pure."""

from router.routing.filters import RoutingRequest
from router.routing.worker_snapshot import WorkerSnapshot


class Prefix:
    """Compare workers by uncached tokens of the prompt, nothing else."""

    name = "prefix"

    def decode_cost(self, worker: WorkerSnapshot, routing_request: RoutingRequest) -> float:
        """Return the uncached tokens."""
        return routing_request.uncached(worker)

    def prefill_cost(self, worker: WorkerSnapshot, routing_request: RoutingRequest) -> float:
        """Return the uncached tokens."""
        return routing_request.uncached(worker)

    def placed(self, decode: WorkerSnapshot, prefill: WorkerSnapshot | None) -> None:
        """Remember nothing."""
