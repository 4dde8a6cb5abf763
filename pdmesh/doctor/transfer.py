"""The check of the KV transports: measures each on this machine, and names the one that a pair of workers would use."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from pdmesh.doctor.check import Check, missing, ok, warn

NAME = "kv transport"
BEST_FIRST = ("shm", "tcp", "grpc")
ACROSS_HOSTS = ("tcp", "grpc")
IF_NAMED = ("nixl",)  # measured if it is installed; workers offer it only when configured
_WHY = {
    "shm": "one copy out of shared memory",
    "tcp": "no copies in Python, several connections",
    "grpc": "needs no port but gRPC's",
}
LIMIT_S = 45.0  # allows for a busy machine


def transports() -> Check:
    """Move 64 MiB between two processes over each transport."""
    # A client-only installation lacks what this needs; the rest of the doctor works without it.
    from pdmesh.doctor.transfer_probe import measure

    measured = asyncio.run(asyncio.wait_for(measure(), LIMIT_S))
    return judge(measured.bytes_per_s, measured.failures)


def judge(bytes_per_s: Mapping[str, float], failures: Mapping[str, str]) -> Check:
    """Return the result of the measurement, and the transport that follows from it on this host and across hosts."""
    if not bytes_per_s:
        cost = "workers cannot hand over KV: each prefills for itself"
        return missing(NAME, f"none works: {_listed(failures)}", cost, "see the checks of shared memory and loopback")
    here, far = _choice(bytes_per_s, BEST_FIRST), _choice(bytes_per_s, ACROSS_HOSTS)
    found = f"{_speeds(bytes_per_s)}; on this host {here}; across hosts {far}"
    if not failures:
        return ok(NAME, found)
    if all(name in IF_NAMED for name in failures):
        return warn(NAME, found, "workers that are told to use it take the next one", f"leave it out, or: {_listed(failures)}")
    cost = "the next one carries KV instead, more slowly"
    return warn(NAME, found, cost, f"see the checks of shared memory and loopback: {_listed(failures)}")


def _speeds(bytes_per_s: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {bytes_per_s[name] / 1e9:.2f} GB/s" for name in (*BEST_FIRST, *IF_NAMED) if name in bytes_per_s)


def _choice(bytes_per_s: Mapping[str, float], best_first: tuple[str, ...]) -> str:
    name = next((name for name in best_first if name in bytes_per_s), None)
    return "none" if name is None else f"{name} ({_WHY[name]})"


def _listed(failures: Mapping[str, str]) -> str:
    return "; ".join(failures.values())
