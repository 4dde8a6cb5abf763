"""The tenants file, and a router's tenants: limits from that file, followed as it changes, scaled to this router's share."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.files import Stamp, stamp_of
from router.fleet.peers import DemandMeter
from router.flow_control.capacity import TenantLimits

# The tenants file: the limits of each tenant, in TOML or JSON (by the file's ending), one table for each:
#
# [default]                   # tenants without a table; if it is absent: weight 1, no limits
# weight = 1.0
# [tenants.search]
# weight = 4.0
# max_inflight = 64
# tokens_per_s = 20000        # prompt and output
# burst_tokens = 200000       # ten seconds of the rate when absent

MAX_TENANTS = 100_000
_KNOWN = tuple(field.name for field in fields(TenantLimits))


class TenantsProblem(ValueError):
    """Report a file that cannot be used; the message names file, tenant and field."""


@dataclass(frozen=True)
class TenantTable:
    """Hold limits by tenant. Immutable."""

    default: TenantLimits = field(default_factory=TenantLimits)
    tenants: Mapping[str, TenantLimits] = field(default_factory=dict)

    def limits_of(self, tenant: str) -> TenantLimits:
        """Return the limits of any name; each name without a table has the default's limits to itself."""
        return self.tenants.get(tenant, self.default)


def read_tenants_file(path: Path) -> TenantTable:
    """Return the table in a file. Raises OSError, TenantsProblem."""
    try:
        text = path.read_text(encoding="utf-8")
        return parse(json.loads(text) if path.suffix == ".json" else tomllib.loads(text))
    except RecursionError as error:
        raise TenantsProblem(f"{path}: is nested too deeply") from error
    except ValueError as error:
        raise TenantsProblem(f"{path}: {error}") from error


def parse(content: object) -> TenantTable:
    """Return the table in parsed TOML or JSON. Raises ValueError naming tenant and field."""
    content = _table("the file", content)
    unknown = sorted(content.keys() - {"default", "tenants"})
    if unknown:
        raise ValueError(f"{unknown[0][:40]}: unknown; known are default and tenants")
    tables = _table("tenants", content.get("tenants", {}))
    if len(tables) > MAX_TENANTS:
        raise ValueError(f"tenants: there are more than {MAX_TENANTS}")
    limits = {name: _limits(f"tenants.{name}", table) for name, table in tables.items()}
    return TenantTable(_limits("default", content.get("default", {})), limits)


def _limits(where: str, content: object) -> TenantLimits:
    table = _table(where, content)
    for name, value in table.items():
        if name not in _KNOWN:
            raise ValueError(f"{where}.{name}: unknown; known are {', '.join(_KNOWN)}")
        kinds = (int,) if name == "max_inflight" else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise ValueError(f"{where}.{name}: must be a {'whole ' if kinds == (int,) else ''}number, not {value!r}")
        if not abs(value) < 1e15:
            raise ValueError(f"{where}.{name}: is out of bounds")
    limits = TenantLimits(**table)
    try:
        limits.validate()
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from error
    return limits


def _table(where: str, content: object) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ValueError(f"{where}: must be a table")
    return content


PERIOD_S = 1.0
Share = Callable[[str], float]

logger = logging.getLogger(__name__)


class Tenants:
    """Supply the limits that admission reads. `share` returns this router's part of a tenant's limits."""

    def __init__(self, path: str = "", fixed_share: float = 1.0) -> None:
        """Read the file. `fixed_share` applies until `share` is set. Raises ConfigError for a file that cannot be used."""
        self.share: Share = lambda tenant: fixed_share
        self.routing_request = DemandMeter()
        self._path = Path(path) if path else None
        self._table = TenantTable()
        self._stamp: Stamp | None = None
        self._task: asyncio.Task[None] | None = None
        try:
            self._take()
        except (OSError, TenantsProblem) as error:
            raise ConfigError("--tenants", str(error)) from error

    def limits_of(self, tenant: str) -> TenantLimits:
        """Return what this router may give the tenant now."""
        limits = self._table.limits_of(tenant)
        if limits.tokens_per_s is None and limits.max_inflight is None:
            return limits
        return at_share(limits, self.share(tenant))

    def asked(self, tenant: str, tokens: int) -> None:
        """Record a request of the tenant, of `tokens` of prompt and output."""
        self.routing_request.asked(tenant, float(tokens), time.monotonic())

    def start(self) -> None:
        """Follow the file in the background."""
        if self._path is not None:
            self._task = asyncio.create_task(self._follow(), name="follow tenants")

    async def stop(self) -> None:
        """Stop following."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def refresh(self) -> None:
        """Read the file again if it has changed. An error in it is logged, and the old limits stay."""
        try:
            self._take()
        except (OSError, TenantsProblem) as error:
            logger.error("the tenants file cannot be used: %s; limits stay as they were", error)
        except Exception:  # the limits have to be followed for as long as the router lives
            logger.exception("reading the tenants file %s failed; limits stay as they were", self._path)

    def _take(self) -> None:
        if self._path is None:
            return
        stamp = stamp_of(self._path)
        if stamp != self._stamp:
            self._stamp = stamp
            self._table = read_tenants_file(self._path)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            self.refresh()


def at_share(limits: TenantLimits, share: float) -> TenantLimits:
    """Return a part of rate, burst and requests in flight; at least one request, so that a small share is slow, not a denial."""
    part = limits.at_share(share)
    if part.max_inflight is None:
        return part
    return replace(part, max_inflight=max(1, int(part.max_inflight * share + 1e-9)))
