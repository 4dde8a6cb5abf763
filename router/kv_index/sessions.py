"""Where the next turn of a session finds its KV: the workers that the session had last, and the blocks of its output.

The memory of workers decides between candidates that cost the same, so a wrong or missing entry costs little. It is bounded, and
an entry expires. Each router has a memory of its own; what others placed is known from KV events.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from router.routing.worker_snapshot import WorkerKey
from router.tokenization.prepared_request import PreparedRequest

if TYPE_CHECKING:
    from router.context import RouterContext
    from router.fleet.worker import Incarnation
    from router.lifecycle.output import OutputTracker

MAX_SESSIONS = 100_000
KEEP_S = 600.0
"""A session is remembered for so long after its last request, or as long as its KV is to be kept."""


@dataclass(frozen=True, slots=True)
class _Entry:
    workers: tuple[WorkerKey, ...]
    expires_at: float


class SessionMemory:
    """Remember the last workers of at most `max_sessions` sessions, for each model that a session uses. When it is full, the
    tenant with most sessions loses the one that it has used least recently."""

    def __init__(self, max_sessions: int = MAX_SESSIONS, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_sessions = max_sessions
        self._clock = clock
        self._num_sessions = 0
        self._tenants: dict[str, OrderedDict[str, dict[str, _Entry]]] = {}  # by tenant, session and model

    def __len__(self) -> int:
        """Return the number of sessions, those included that have expired since."""
        return self._num_sessions

    def note(self, prepared: PreparedRequest, workers: tuple[WorkerKey, ...]) -> None:
        """Record the workers of a request: the decode worker, then the prefill worker if there is one."""
        if not prepared.session_id:
            return
        sessions, name = self._tenants.setdefault(prepared.tenant, OrderedDict()), prepared.session_id
        self._num_sessions += name not in sessions
        entry = _Entry(workers, self._clock() + max(KEEP_S, prepared.kv_retention_s))
        sessions.setdefault(name, {})[prepared.model.name] = entry
        sessions.move_to_end(name)
        while self._num_sessions > self._max_sessions:
            self._evict()

    def workers_of(self, prepared: PreparedRequest, is_gone: Callable[[WorkerKey], bool]) -> tuple[WorkerKey, ...]:
        """Return the last workers of the request's session, the decode worker first; empty if they are not known. A decode worker
        that is gone is forgotten."""
        sessions = self._tenants.get(prepared.tenant)
        models = sessions.get(prepared.session_id) if sessions is not None else None
        entry = models.get(prepared.model.name) if models is not None else None
        if models is None or entry is None:
            return ()
        if entry.expires_at >= self._clock() and not is_gone(entry.workers[0]):
            return entry.workers
        del models[prepared.model.name]
        if not models:
            self.forget(prepared.tenant, prepared.session_id)
        return ()

    def forget(self, tenant: str, session_id: str) -> None:
        """Forget a session that has ended; an unknown one is ignored."""
        sessions = self._tenants.get(tenant)
        if sessions is None or sessions.pop(session_id, None) is None:
            return
        self._num_sessions -= 1
        if not sessions:
            del self._tenants[tenant]

    def _evict(self) -> None:
        tenant = max(self._tenants, key=lambda name: len(self._tenants[name]))
        self.forget(tenant, next(iter(self._tenants[tenant])))


CHEAP_OUTPUT_TOKENS = 512
"""So many tokens of output are hashed in some 30 microseconds."""


def remember_turn(core: RouterContext, prepared: PreparedRequest, tracker: OutputTracker, worker: Incarnation | None) -> None:
    """Remember where the KV of a request is that has ended: its prompt and the output of each choice, without the last token,
    which has no KV. Those of chats without a session are remembered where that is cheap."""
    if prepared.session_final:
        core.sessions.forget(prepared.tenant, prepared.session_id)
    is_wanted = bool(prepared.session_id) and not prepared.session_final
    is_cheap = prepared.is_chat and tracker.num_tokens <= CHEAP_OUTPUT_TOKENS
    if worker is not None and tracker.anything_emitted and (is_wanted or is_cheap):
        outputs = [choice.token_ids[:-1] for choice in tracker.history()]
        work = core.prefixes.remember_output(prepared, outputs, worker)
        core.background.spawn(work, f"remember the output of {prepared.request_id}")
