"""Writes Events with reasons on the objects they concern (`kubectl describe`, `kubectl events`): rate limited, never blocking."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pdmesh.autoscaler.kubernetes import objects
from pdmesh.autoscaler.kubernetes.api import Api, ApiError, Object

CONTROLLER = "pdmesh.io/autoscaler"
MAX_NOTE = 1024
"""The API's limit."""
BURST = 10
REFILL_S = 30.0
REPEAT_S = 600.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Subject:
    """Name the object that an event is about."""

    api_version: str
    kind: str
    name: str
    uid: str = ""


class Pace:
    """Limit the rate: a burst, then one more every `REFILL_S`, and no repeat within `REPEAT_S`. Pure: the time is passed in, in
    seconds."""

    def __init__(self) -> None:
        self._left = float(BURST)
        self._at_s = float("-inf")
        self._told: dict[tuple[str, str], tuple[str, float]] = {}

    def allows(self, name: str, reason: str, note: str, now_s: float) -> bool:
        """Return whether the event may be written now, and count it if so."""
        latest = self._told.get((name, reason))
        if latest is not None and latest[0] == note and now_s < latest[1] + REPEAT_S:
            return False
        self._left = min(float(BURST), self._left + (now_s - self._at_s) / REFILL_S)
        self._at_s = now_s
        if self._left < 1:
            return False
        self._left -= 1
        self._told[name, reason] = (note, now_s)
        return True


class Events:
    """Write the Events of one process."""

    def __init__(self, api: Api, namespace: str, identity: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._namespace = namespace
        self._identity = identity
        self._clock = clock
        self._pace = Pace()

    async def tell(
        self, subject: Subject, reason: str, note: str, *, action: str = "Scale", kind: Literal["Normal", "Warning"] = "Normal"
    ) -> None:
        """Write an event. Raises nothing: a decision stands without its event. `note` is cut to the API's limit."""
        if not self._pace.allows(subject.name, reason, note, self._clock()):
            return
        body = event(subject, self._namespace, self._identity, time.time_ns(), reason=reason, action=action, note=note, kind=kind)
        try:
            await self._api.create(f"/apis/events.k8s.io/v1/namespaces/{self._namespace}/events", body)
        except ApiError as error:
            logger.warning("no event for %s (%s): %s", subject.name, note, error)


def event(
    subject: Subject, namespace: str, identity: str, time_ns: int, *, reason: str, action: str, note: str, kind: str
) -> Object:
    """Return the event object; its name contains the time, as client-go's names do."""
    regarding = {"apiVersion": subject.api_version, "kind": subject.kind, "namespace": namespace, "name": subject.name}
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": f"{subject.name[:200]}.{time_ns:x}", "namespace": namespace},
        "eventTime": objects.micro_time(time_ns / 1e9),
        "reportingController": CONTROLLER,
        "reportingInstance": identity[:128],
        "action": action,
        "reason": reason,
        "regarding": regarding | ({"uid": subject.uid} if subject.uid else {}),
        "note": _cut(note),
        "type": kind,
    }


def _cut(note: str) -> str:
    raw = note.encode()
    return note if len(raw) <= MAX_NOTE else raw[: MAX_NOTE - 3].decode(errors="ignore") + "…"
