"""Memory of requests that ended here, so that late messages about them have no effect."""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.runtime import errors
from pdmesh.runtime.errors import Aborted, MeshError


@dataclass(frozen=True)
class Ending:
    """`attempt` None: cancelled before it was ever submitted, so every attempt is refused. `until` is monotonic seconds."""

    attempt: int | None
    failure: MeshError
    until: float


class EndedRequests:
    """Remembers endings for a lease. Time is passed in."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._endings: dict[str, Ending] = {}

    def __len__(self) -> int:
        return len(self._endings)

    def note(self, request_id: str, attempt: int, failure: MeshError, now: float) -> None:
        """The request ended here at `attempt`; a newer attempt may still come. `failure` is what late questions about it get."""
        self._keep(request_id, Ending(attempt, failure, now + self._keep_s))

    def note_early_cancel(self, request_id: str, now: float) -> None:
        """A Cancel came for a request that this worker does not know: a tombstone, unless it is known to have ended here."""
        if self.find(request_id, now) is None:
            self._keep(request_id, Ending(None, errors.Cancelled("it was cancelled before it was submitted"), now + self._keep_s))

    def find(self, request_id: str, now: float) -> Ending | None:
        """How the request ended, if it did within the last lease."""
        ending = self._endings.get(request_id)
        return ending if ending is not None and ending.until > now else None

    def check(self, request_id: str, attempt: int, now: float) -> None:
        """Raises Cancelled or Aborted if this attempt ended here already."""
        ending = self.find(request_id, now)
        if ending is None or (ending.attempt is not None and attempt > ending.attempt):
            return
        error: type[MeshError] = errors.Cancelled if isinstance(ending.failure, errors.Cancelled) else Aborted
        raise error(f"attempt {attempt} of request {request_id} ended here: {ending.failure.message}; only a newer one can go on")

    def forget_old(self, now: float) -> None:
        """Endings are kept for one and the same time, so the oldest come first."""
        while self._endings:
            request_id, ending = next(iter(self._endings.items()))
            if ending.until > now:
                return
            del self._endings[request_id]

    def _keep(self, request_id: str, ending: Ending) -> None:
        self._endings.pop(request_id, None)
        self._endings[request_id] = ending
