"""least-loaded: the decode worker with the fewest blocks and sequences, the prefill worker with the fewest tokens ahead. Pure."""

from router.routing.filters import RoutingRequest, blocks_for
from router.routing.worker_snapshot import WorkerSnapshot

PREFIX_CREDIT = 0.25
"""A worker that has all of the prompt cached may be this share of its capacity fuller and still win."""


class LeastLoaded:
    """Compare workers by load, less a credit for the cached share of the prompt."""

    name = "least-loaded"

    def decode_cost(self, worker: WorkerSnapshot, routing_request: RoutingRequest) -> float:
        """Return the larger of the used shares of sequences and of blocks, less the credit."""
        seq_share = (worker.num_seqs + worker.dispatched_seqs + routing_request.num_choices) / worker.max_num_seqs
        own = blocks_for(routing_request.uncached(worker), worker)
        used_blocks = worker.num_total_blocks - worker.num_free_blocks + worker.dispatched_blocks + own
        cached_share = 1 - routing_request.uncached(worker) / routing_request.num_tokens
        return max(seq_share, used_blocks / worker.num_total_blocks) - PREFIX_CREDIT * cached_share

    def prefill_cost(self, worker: WorkerSnapshot, routing_request: RoutingRequest) -> float:
        """Return the tokens that `worker` computes until this prompt is done."""
        return worker.tokens_ahead + routing_request.uncached(worker)

    def placed(self, decode: WorkerSnapshot, prefill: WorkerSnapshot | None) -> None:
        """Remember nothing: the snapshots count what was dispatched."""
