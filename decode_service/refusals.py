"""What routers are told when a request cannot be taken, or cannot go on, here."""

from __future__ import annotations

from kvtransfer.reservation import AlreadyRunning, InvalidTransition, StaleAttempt
from pdmesh.runtime.errors import Aborted, FailedPrecondition, MeshError, ResourceExhausted, Unavailable

# To a router that asks for finished output too late: it can have the tokens drawn again elsewhere.
OUTPUT_GONE = Unavailable("it has finished here, and its output is no longer kept")


def no_room(retry_delay_s: float) -> ResourceExhausted:
    """The engine has no blocks or seats for the request now; nothing was kept."""
    return ResourceExhausted("no room for the request's KV blocks now", retry_delay_s=retry_delay_s)


def released_by_worker(reason: str) -> Unavailable:
    """This worker gives a request up; another one may take it."""
    return Unavailable(f"this worker gave the request up: {reason}")


def refusal_of(error: InvalidTransition) -> MeshError:
    """The status of a Submit that the state machine does not allow."""
    if isinstance(error, StaleAttempt):
        return Aborted(str(error))
    if isinstance(error, AlreadyRunning):
        return FailedPrecondition("attempt", f"the request runs already: {error}")
    return FailedPrecondition("mode", str(error))
