"""Leader election by a Lease: the decision as client-go makes it, and the background task that reads and renews the Lease."""

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
from pdmesh.autoscaler.platform import PlatformError

# The decision. Pure: both clocks are passed in.
#
# A candidate trusts only its own clock: it waits until the record has not changed for as long as the record says. The leader
# counts from before it sent its latest renewal, and stops leading earlier than another candidate may begin.


@dataclass(frozen=True)
class LeaseRecord:
    """Hold the spec of a Lease. An empty `holder` means none. Times are kept as written: only whether they change matters."""

    holder: str
    duration_s: int
    acquired: str
    renewed: str
    transitions: int
    version: str = ""

    @classmethod
    def of(cls, lease: dict[str, Any]) -> "LeaseRecord":
        """Return the record of a Lease object; missing fields are empty."""
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
        """Return the spec in the API's form."""
        return {
            "holderIdentity": self.holder,
            "leaseDurationSeconds": self.duration_s,
            "acquireTime": self.acquired,
            "renewTime": self.renewed,
            "leaseTransitions": self.transitions,
        }


class Election:
    """Hold one candidate's view. `now_s` is its own monotonic clock; `wall` is the time in words, for people who read the
    Lease."""

    def __init__(self, identity: str, duration_s: int, renew_deadline_s: float) -> None:
        self.identity = identity
        self._duration_s = duration_s
        self._renew_deadline_s = renew_deadline_s
        self._record: LeaseRecord | None = None
        self._changed_s = float("-inf")
        self._renewed_s: float | None = None

    @property
    def leader(self) -> str:
        """Return the leader as last seen; empty: none."""
        return self._record.holder if self._record is not None else ""

    def seen(self, record: LeaseRecord | None, now_s: float) -> None:
        """Note the record that the API showed at `now_s`. None: there is no Lease, and any candidate may create one."""
        if record is None or self._record is None or replace(record, version="") != replace(self._record, version=""):
            self._changed_s = now_s
        self._record = record
        if self.leader != self.identity:
            self._renewed_s = None

    def attempt(self, now_s: float, wall: str) -> LeaseRecord | None:
        """Return the record to write in place of the one seen, if that is still current; None while another candidate leads."""
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
        """Note that the API accepted an attempt sent at `sent_s`."""
        self._record, self._changed_s = record, sent_s
        self._renewed_s = sent_s if record.holder == self.identity else None

    def leads(self, now_s: float) -> bool:
        """Return whether this candidate may act now."""
        return self._renewed_s is not None and now_s < self._renewed_s + self._renew_deadline_s

    def silent_s(self, now_s: float) -> float | None:
        """Return the age of the renewal that this candidate's lead rests on, or rested on; None without one."""
        return None if self._renewed_s is None else now_s - self._renewed_s

    def resign(self, wall: str) -> LeaseRecord | None:
        """Give up the lead. Returns the record to write so that others need not wait; None if it did not lead."""
        holds = self._renewed_s is not None and self.leader == self.identity
        self._renewed_s = None
        if not holds or self._record is None:
            return None
        return replace(self._record, holder="", duration_s=1, acquired=wall, renewed=wall)


_JITTER = 0.2  # so that candidates do not all ask at once
_ATTEMPT_REQUESTS = 3  # the Lease, its owner where it has to be made, the write

logger = logging.getLogger(__name__)


class Ownership:
    """Say who owns what the autoscaler makes: the Deployment of the workers that decode, so that Lease and saved state go with
    the mesh, whatever deletes that (`helm uninstall` knows only what the chart made)."""

    def __init__(self, api: Api, namespace: str, settings: KubernetesSettings) -> None:
        name = settings.both_deployment or settings.decode_deployment
        self._api, self._path = api, f"/apis/apps/v1/namespaces/{namespace}/deployments/{name}"

    async def metadata(self) -> Object:
        """Return the metadata to add to what is made; empty where the Deployment cannot be had: then it has no owner."""
        try:
            owner = objects.seen_of(await self._api.get(self._path))
        except PlatformError as error:
            logger.info("what the autoscaler saves has no owner: %s", error)
            return {}
        return {"ownerReferences": [{"apiVersion": "apps/v1", "kind": "Deployment", "name": owner.name, "uid": owner.uid}]}


class Elector:
    """Run the election from the first `leads` to `close`."""

    def __init__(
        self, api: Api, namespace: str, settings: KubernetesSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._api = api
        self._leases = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._name = settings.lease
        self._ownership = Ownership(api, namespace, settings)
        self._retry_s, self._request_s = settings.retry_period_s, settings.request_timeout_s
        self._clock = clock
        self.identity = settings.identity or f"{socket.gethostname()[:100]}_{secrets.token_hex(8)}"
        self._election = Election(self.identity, settings.lease_duration_s, settings.renew_deadline_s)
        self._task: asyncio.Task[None] | None = None
        self._attempted, self._stopping = asyncio.Event(), asyncio.Event()
        self._error: ApiError | None = None
        self._shown = False
        self.term = 0
        """Increases each time this process begins to lead: state from an earlier term may be stale."""

    @property
    def leads(self) -> bool:
        """Return whether this process leads now."""
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
            logger.warning("%s no longer leads; %s does", self.identity, self._election.leader or "no other")
        elif silent_s is None:
            logger.info("%s has given up the lead", self.identity)
        else:
            logger.warning("%s could not renew the Lease for %.0f s, and no longer leads", self.identity, silent_s)

    async def ask(self) -> bool:
        """Return whether this process leads; the first call waits for the first answer. Raises ApiError while that is unknown."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="lease")
        await self._attempted.wait()
        if not self.leads and self._error is not None:
            raise self._error
        return self.leads

    async def close(self) -> None:
        """Release the lead at once for another candidate. Raises nothing."""
        self._stopping.set()
        if self._task is not None:
            # If cancelled, a running attempt might still arrive after the write that frees the Lease.
            await asyncio.wait({self._task}, timeout=_ATTEMPT_REQUESTS * self._request_s)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        freed = self._election.resign(objects.micro_time(time.time()))
        _ = self.leads  # logs the change
        if freed is not None:
            try:
                await self._api.patch(f"{self._leases}/{self._name}", self._lease(freed))
            except ApiError as error:
                logger.warning("the Lease will expire by itself: %s", error)

    async def _run(self) -> None:
        while not self._stopping.is_set():
            await self._attempt()
            self._attempted.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._retry_s * (1 + random.uniform(0, _JITTER))):
                    await self._stopping.wait()

    async def _attempt(self) -> None:
        """Make one attempt; a failure is raised by `ask`, and logged when it begins."""
        try:
            await self._step()
        except ApiError as error:
            if self._error is None:
                logger.warning("cannot renew the Lease: %s", error)
            self._error = error
        except Exception as error:  # a bug here must not end the task: the missing leader would go unnoticed
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
            # Another candidate may have been faster: the next attempt will see it.
            with contextlib.suppress(ConflictError):
                await self._write(wanted, is_new=shown is None)

    async def _write(self, wanted: LeaseRecord, *, is_new: bool) -> None:
        sent_s = self._clock()
        if is_new:
            lease = self._lease(wanted)
            lease["metadata"] |= await self._ownership.metadata()
            written = await self._api.create(self._leases, lease)
        else:
            written = await self._api.patch(f"{self._leases}/{self._name}", self._lease(wanted))
        self._election.wrote(LeaseRecord.of(written), sent_s)

    def _lease(self, record: LeaseRecord) -> Object:
        metadata = {"name": self._name} | ({"resourceVersion": record.version} if record.version else {})
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": record.spec()}
