"""Keeps trying to lead: reads and writes the Lease in the background, as `elector.py` decides."""

import asyncio
import contextlib
import logging
import random
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pdmesh.autoscaler.kubernetes import objects
from pdmesh.autoscaler.kubernetes.api import Api, ApiError, ConflictError, MissingError, Object
from pdmesh.autoscaler.kubernetes.settings import KubernetesSettings

# Who leads, decided from a Lease as client-go decides it. Pure: both clocks are passed in.
#
# A candidate believes nobody's clock but its own: it waits until the record has not changed for as long as the record says. The
# leader counts from before it sent its latest renewal, and stops leading earlier than anybody else may begin.


@dataclass(frozen=True)
class LeaseRecord:
    """The spec of a Lease. `holder` is empty: nobody. Times are kept as they were written: only whether they change matters."""

    holder: str
    duration_s: int
    acquired: str
    renewed: str
    transitions: int
    version: str = ""

    @classmethod
    def of(cls, lease: dict[str, Any]) -> "LeaseRecord":
        """A Lease of the API; what it leaves out counts as nothing."""
        spec = lease.get("spec") or {}
        return cls(
            holder=str(spec.get("holderIdentity") or ""),
            duration_s=int(spec.get("leaseDurationSeconds") or 0),
            acquired=str(spec.get("acquireTime") or ""),
            renewed=str(spec.get("renewTime") or ""),
            transitions=int(spec.get("leaseTransitions") or 0),
            version=str(lease.get("metadata", {}).get("resourceVersion", "")),
        )

    def spec(self) -> dict[str, Any]:
        """As the API wants it."""
        return {
            "holderIdentity": self.holder,
            "leaseDurationSeconds": self.duration_s,
            "acquireTime": self.acquired,
            "renewTime": self.renewed,
            "leaseTransitions": self.transitions,
        }


class Election:
    """One candidate's view. `now_s` is its own monotonic clock; `wall` is the time in words, for people who read the Lease."""

    def __init__(self, identity: str, duration_s: int, renew_deadline_s: float) -> None:
        self.identity = identity
        self._duration_s = duration_s
        self._renew_deadline_s = renew_deadline_s
        self._record: LeaseRecord | None = None
        self._changed_s = float("-inf")
        self._renewed_s: float | None = None

    @property
    def leader(self) -> str:
        """As last seen; empty: nobody."""
        return self._record.holder if self._record is not None else ""

    def seen(self, record: LeaseRecord | None, now_s: float) -> None:
        """What the API showed; `now_s` when it had. None: there is no Lease, and anybody may make one."""
        if record is None or self._record is None or replace(record, version="") != replace(self._record, version=""):
            self._changed_s = now_s
        self._record = record
        if self.leader != self.identity:
            self._renewed_s = None

    def attempt(self, now_s: float, wall: str) -> LeaseRecord | None:
        """What to write in place of what was seen, provided that it is still the same; None: another one leads."""
        record = self._record
        if record is None:
            return LeaseRecord(self.identity, self._duration_s, wall, wall, 0)
        if record.holder == self.identity:
            return replace(record, duration_s=self._duration_s, renewed=wall)
        if record.holder and now_s < self._changed_s + record.duration_s:
            return None
        taken = replace(record, holder=self.identity, duration_s=self._duration_s, acquired=wall, renewed=wall)
        return replace(taken, transitions=record.transitions + 1)

    def wrote(self, record: LeaseRecord, sent_s: float) -> None:
        """The API took an attempt that was sent at `sent_s`."""
        self._record, self._changed_s = record, sent_s
        self._renewed_s = sent_s if record.holder == self.identity else None

    def leads(self, now_s: float) -> bool:
        """Whether this candidate may act now."""
        return self._renewed_s is not None and now_s < self._renewed_s + self._renew_deadline_s

    def silent_s(self, now_s: float) -> float | None:
        """How long ago the renewal was sent that this candidate leads by, or has led by; None: there is none."""
        return None if self._renewed_s is None else now_s - self._renewed_s

    def resign(self, wall: str) -> LeaseRecord | None:
        """Leads no more from here on. What to write so that others need not wait; None: it held nothing."""
        holds = self._renewed_s is not None and self.leader == self.identity
        self._renewed_s = None
        if not holds or self._record is None:
            return None
        return replace(self._record, holder="", duration_s=1, acquired=wall, renewed=wall)


_JITTER = 0.2  # so that candidates do not ask all at once
_ATTEMPT_REQUESTS = 2

logger = logging.getLogger(__name__)


class Elector:
    """From the first `leads` to `close`."""

    def __init__(
        self, api: Api, namespace: str, settings: KubernetesSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._api = api
        self._leases = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._name = settings.lease
        self._retry_s, self._request_s = settings.retry_period_s, settings.request_timeout_s
        self._clock = clock
        self.identity = settings.identity or f"{socket.gethostname()[:100]}_{secrets.token_hex(8)}"
        self._election = Election(self.identity, settings.lease_duration_s, settings.renew_deadline_s)
        self._task: asyncio.Task[None] | None = None
        self._attempted, self._stopping = asyncio.Event(), asyncio.Event()
        self._error: ApiError | None = None
        self._shown = False
        self.term = 0
        """Rises with each time that this process begins to lead: what it knew before may be old."""

    @property
    def leads(self) -> bool:
        """At this moment."""
        leads = self._election.leads(self._clock())
        if leads != self._shown:
            self._shown = leads
            self.term += leads
            self._log_change(leads)
        return leads

    def _log_change(self, leads: bool) -> None:
        silent_s, other = self._election.silent_s(self._clock()), self._election.leader != self.identity
        if leads:
            logger.info("%s leads", self.identity)
        elif other:
            logger.warning("%s does not lead any more; %s does", self.identity, self._election.leader or "nobody")
        elif silent_s is None:
            logger.info("%s has given up the lead", self.identity)
        else:
            logger.warning("%s could not renew the Lease for %.0f s, and does not lead any more", self.identity, silent_s)

    async def ask(self) -> bool:
        """Whether this process leads; the first call waits for the first answer. Raises ApiError where nobody can tell."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="lease")
        await self._attempted.wait()
        if not self.leads and self._error is not None:
            raise self._error
        return self.leads

    async def close(self) -> None:
        """Lets another one lead at once. Raises nothing."""
        self._stopping.set()
        if self._task is not None:
            # Cut off, an attempt that is under way might still arrive, and outlive what frees the Lease.
            await asyncio.wait({self._task}, timeout=_ATTEMPT_REQUESTS * self._request_s)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        freed = self._election.resign(objects.micro_time(time.time()))
        _ = self.leads  # logs the change
        if freed is not None:
            try:
                await self._api.patch(f"{self._leases}/{self._name}", self._lease(freed))
            except ApiError as error:
                logger.warning("the Lease ends by itself: %s", error)

    async def _run(self) -> None:
        while not self._stopping.is_set():
            await self._attempt()
            self._attempted.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), self._retry_s * (1 + random.uniform(0, _JITTER)))

    async def _attempt(self) -> None:
        """One; what goes wrong is told by `ask`, and logged when it begins."""
        try:
            await self._step()
        except ApiError as error:
            if self._error is None:
                logger.warning("cannot renew the Lease: %s", error)
            self._error = error
        except Exception as error:  # a bug here must not end the task: nobody would learn why there is no leader
            logger.exception("cannot renew the Lease")
            self._error = ApiError("the Lease", f"cannot be renewed: {error!r}")
        else:
            self._error = None
        _ = self.leads  # logs a change

    async def _step(self) -> None:
        shown: LeaseRecord | None = None
        with contextlib.suppress(MissingError):
            shown = LeaseRecord.of(await self._api.get(f"{self._leases}/{self._name}"))
        self._election.seen(shown, self._clock())
        wanted = self._election.attempt(self._clock(), objects.micro_time(time.time()))
        if wanted is not None:
            # Another one may have been faster: the next attempt will see.
            with contextlib.suppress(ConflictError):
                await self._write(wanted, is_new=shown is None)

    async def _write(self, wanted: LeaseRecord, *, is_new: bool) -> None:
        sent_s = self._clock()
        if is_new:
            written = await self._api.create(self._leases, self._lease(wanted))
        else:
            written = await self._api.patch(f"{self._leases}/{self._name}", self._lease(wanted))
        self._election.wrote(LeaseRecord.of(written), sent_s)

    def _lease(self, record: LeaseRecord) -> Object:
        metadata = {"name": self._name} | ({"resourceVersion": record.version} if record.version else {})
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": record.spec()}
