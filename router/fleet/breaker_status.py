"""What this router thinks of its workers, as clients ask for it."""

from __future__ import annotations

from collections.abc import Mapping

from pdmesh.v1 import mesh_pb2, worker_pb2
from router.fleet.circuit_breaker import Breaker, Role, State
from router.fleet.judge import Judge
from router.routing.fleet_snapshot import Roster
from router.routing.worker_snapshot import WorkerKey

MAX_REASON_CHARS = 200
_ROLES = {Role.PREFILL: worker_pb2.ROLE_PREFILL, Role.DECODE: worker_pb2.ROLE_DECODE}
_STATES = {
    State.CLOSED: mesh_pb2.BREAKER_STATE_CLOSED,
    State.OPEN: mesh_pb2.BREAKER_STATE_OPEN,
    State.HALF_OPEN: mesh_pb2.BREAKER_STATE_HALF_OPEN,
}


class BreakerStatuses:
    """As of one moment: whom requests leave out is asked once for all workers."""

    def __init__(self, judge: Judge, roster: Roster, now: float) -> None:
        """`now` is monotonic seconds."""
        self._judge = judge
        self._left_out: Mapping[Role, frozenset[WorkerKey]] = {role: judge.ejected(roster, role) for role in Role}
        self._now = now

    def of(self, worker: WorkerKey) -> list[mesh_pb2.BreakerStatus]:
        """Of the roles in which it was ever left out."""
        breakers = ((role, self._judge.health.breaker(worker, role)) for role in Role)
        return [self._status(worker, role, each) for role, each in breakers if each is not None and each.num_ejections]

    def _status(self, worker: WorkerKey, role: Role, breaker: Breaker) -> mesh_pb2.BreakerStatus:
        left_s = 0.0 if breaker.state is State.CLOSED else max(0.0, breaker.until - self._now)
        return mesh_pb2.BreakerStatus(
            role=_ROLES[role],
            state=_STATES[breaker.state],
            left_out=worker in self._left_out[role],
            left_ms=round(left_s * 1000),
            num_ejections=breaker.num_ejections,
            reason=breaker.reason[:MAX_REASON_CHARS],
        )
