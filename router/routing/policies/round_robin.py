"""round-robin: every decode worker in turn, and every prefill worker in turn. Pure but for its memory of turns."""

from router.routing.filters import RoutingRequest
from router.routing.worker_snapshot import WorkerSnapshot


class RoundRobin:
    """Prefer the worker whose turn is longest ago. Turns of `MAX_REMEMBERED` addresses are kept; a dropped one comes first."""

    name = "round-robin"
    MAX_REMEMBERED = 65536

    def __init__(self) -> None:
        self._latest_turn: dict[tuple[str, str], int] = {}
        self._num_turns = 0

    def decode_cost(self, worker: WorkerSnapshot, routing_request: RoutingRequest) -> float:
        """Return the number of the worker's latest turn."""
        return self._latest_turn.get(("decode", worker.address), -1)

    def prefill_cost(self, worker: WorkerSnapshot, routing_request: RoutingRequest) -> float:
        """Return the number of the worker's latest turn."""
        return self._latest_turn.get(("prefill", worker.address), -1)

    def placed(self, decode: WorkerSnapshot, prefill: WorkerSnapshot | None) -> None:
        """Count a turn of these workers."""
        if len(self._latest_turn) > self.MAX_REMEMBERED:
            self._latest_turn.clear()
        self._num_turns += 1
        self._latest_turn["decode", decode.address] = self._num_turns
        if prefill is not None:
            self._latest_turn["prefill", prefill.address] = self._num_turns
