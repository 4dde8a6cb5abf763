"""The check of the KV transports: measures each on this machine, and names the one that a pair of workers would use."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from kvtransfer.layout import Scope
from pdmesh.doctor.machine import Check, missing, ok, warn

if TYPE_CHECKING:
    from kvtransfer.transports.base import Transport

NAME = "kv transport"
LIMIT_S = 45.0  # enough for a machine that is busy with other work


def transports() -> Check:
    """Check the transports: move 64 MiB between two processes over each."""
    # A client's installation lacks the packages for this check; the other checks work without them.
    from kvtransfer.transports.registry import transports_with
    from pdmesh.doctor.transfer_probe import Measured, measure

    async def within_limit() -> Measured:
        async with asyncio.timeout(LIMIT_S):
            return await measure()

    measured = asyncio.run(within_limit())
    return judge(measured.bytes_per_s, measured.failures, transports_with(None))


def judge(bytes_per_s: Mapping[str, float], failures: Mapping[str, str], known: Mapping[str, Transport]) -> Check:
    """Return the finding, with the transport out of `known` (best first) that workers use on this host, and across hosts.
    Transports that workers do not offer by default are measured where they are installed."""
    if not bytes_per_s:
        cost = "workers cannot hand over KV: each prefills for itself"
        return missing(NAME, f"none works: {_listed(failures)}", cost, "see the checks of shared memory and loopback")
    offered = [transport for transport in known.values() if transport.is_default]
    others = [transport for transport in known.values() if not transport.is_default]
    distant = [transport for transport in offered if transport.reach.scope is Scope.EVERYWHERE]
    here, far = _choice(bytes_per_s, offered), _choice(bytes_per_s, distant)
    found = f"{_speeds(bytes_per_s, (*offered, *others))}; on this host {here}; across hosts {far}"
    if not failures:
        return ok(NAME, found)
    if not any(transport.name in failures for transport in offered):
        return warn(NAME, found, "workers that are told to use it take the next one", f"leave it out, or: {_listed(failures)}")
    cost = "the next one carries KV instead, more slowly"
    return warn(NAME, found, cost, f"see the checks of shared memory and loopback: {_listed(failures)}")


def _speeds(bytes_per_s: Mapping[str, float], known: Iterable[Transport]) -> str:
    return ", ".join(f"{each.name} {bytes_per_s[each.name] / 1e9:.2f} GB/s" for each in known if each.name in bytes_per_s)


def _choice(bytes_per_s: Mapping[str, float], best_first: Iterable[Transport]) -> str:
    works = next((each for each in best_first if each.name in bytes_per_s), None)
    return "none" if works is None else f"{works.name} ({works.summary})"


def _listed(failures: Mapping[str, str]) -> str:
    return "; ".join(failures.values())
