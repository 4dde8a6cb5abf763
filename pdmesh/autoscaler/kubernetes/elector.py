"""Keeps trying to lead: reads and writes the Lease in the background, as `lease.py` decides."""

import asyncio
import contextlib
import logging
import random
import secrets
import socket
import time
from collections.abc import Callable

from pdmesh.autoscaler.kubernetes import times
from pdmesh.autoscaler.kubernetes.api import Api, ApiError, ConflictError, MissingError, Object
from pdmesh.autoscaler.kubernetes.lease import Election, LeaseRecord
from pdmesh.autoscaler.kubernetes.settings import KubernetesSettings

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
        freed = self._election.resign(times.micro_time(time.time()))
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
        wanted = self._election.attempt(self._clock(), times.micro_time(time.time()))
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
