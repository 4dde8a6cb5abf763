"""A router's tenants: limits from the file, followed as it changes, at the part of them that this router gives out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.file_stamp import Stamp, stamp_of
from router.auth import tenants_file
from router.auth.tenants_file import TenantsProblem, TenantTable
from router.fleet.peers import DemandMeter
from router.flow_control.tenant_limits import TenantLimits

PERIOD_S = 1.0
Share = Callable[[str], float]

logger = logging.getLogger(__name__)


class Tenants:
    """The book that admission looks into. `share` says which part of a tenant's limits is this router's."""

    def __init__(self, path: str = "", fixed_share: float = 1.0) -> None:
        """`fixed_share` holds until `share` is set. Raises ConfigError for a file that cannot be used."""
        self.share: Share = lambda tenant: fixed_share
        self.demand = DemandMeter()
        self._path = Path(path) if path else None
        self._table = TenantTable()
        self._stamp: Stamp | None = None
        self._task: asyncio.Task[None] | None = None
        try:
            self._take()
        except (OSError, TenantsProblem) as error:
            raise ConfigError("--tenants", str(error)) from error

    def limits_of(self, tenant: str) -> TenantLimits:
        """What this router may give the tenant now."""
        limits = self._table.limits_of(tenant)
        if limits.tokens_per_s is None and limits.max_inflight is None:
            return limits
        return at_share(limits, self.share(tenant))

    def asked(self, tenant: str, tokens: int) -> None:
        """A request of the tenant has come, for so many tokens of prompt and output."""
        self.demand.asked(tenant, float(tokens), time.monotonic())

    def start(self) -> None:
        """Follow the file."""
        if self._path is not None:
            self._task = asyncio.create_task(self._follow(), name="follow tenants")

    async def stop(self) -> None:
        """Ends it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def refresh(self) -> None:
        """Read the file again if it has changed; what is wrong in it is logged, and what was read before stands."""
        try:
            self._take()
        except (OSError, TenantsProblem) as error:
            logger.error("the tenants file cannot be used: %s; limits stay as they were", error)
        except Exception:  # limits are to be followed for as long as the router lives
            logger.exception("reading the tenants file %s failed; limits stay as they were", self._path)

    def _take(self) -> None:
        if self._path is None:
            return
        stamp = stamp_of(self._path)
        if stamp != self._stamp:
            self._stamp = stamp
            self._table = tenants_file.read_tenants_file(self._path)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            self.refresh()


def at_share(limits: TenantLimits, share: float) -> TenantLimits:
    """A part of rate, burst and requests in flight; at least one request, so that a large one is slow rather than never."""
    part = limits.at_share(share)
    if part.max_inflight is None:
        return part
    return replace(part, max_inflight=max(1, int(part.max_inflight * share + 1e-9)))
