"""Asks every router for its status and combines the answers into the figures that the policy reads.

Targets are names that are resolved anew each time, so a headless Service stands for all of its routers. A router that does not
answer stays known until its address is no longer listed. Meanwhile the figures grow old, and the policy holds.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from pdmesh.autoscaler.collect.traffic import Key, Rounds, counts_of, traffic_of
from pdmesh.autoscaler.collect.workers import SeenWorker, workers_of
from pdmesh.autoscaler.views import Traffic
from pdmesh.runtime.addresses import bare_host, join_address
from pdmesh.runtime.rpc.channel import Channels, connect
from pdmesh.v1 import mesh_pb2, mesh_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdmesh.runtime.rpc.tls import Tls


# The router processes that exist, and those that have answered. Pure.
#
# An address may stand for several processes (`python -m router --processes N`), and a connection reaches any one of them. A
# process is forgotten when its address is no longer listed, or when others have replaced it: as many processes as share the port
# have answered since it last did.


@dataclass(eq=False)
class _Place:
    num_processes: int = 1
    heard_s: dict[Key, float] = field(default_factory=dict)  # most recent last


class Routers:
    """Hold the known router processes by address."""

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}

    def listed(self, addresses: Collection[str]) -> set[Key]:
        """Set the addresses that exist; return the processes that are gone with the others."""
        gone = {key for address, place in self._places.items() if address not in addresses for key in place.heard_s}
        self._places = {address: self._places.get(address, _Place()) for address in addresses}
        return gone - self.keys

    def heard(self, address: str, key: Key, num_processes: int, now_s: float) -> set[Key]:
        """Note that a process has answered; return the processes that it has replaced."""
        place = self._places.setdefault(address, _Place())
        place.num_processes = max(1, num_processes)
        place.heard_s.pop(key, None)
        place.heard_s[key] = now_s
        replaced = list(place.heard_s)[: -place.num_processes]
        for each in replaced:
            del place.heard_s[each]
        return set(replaced) - self.keys

    @property
    def keys(self) -> set[Key]:
        """Return the keys of all known processes."""
        return {key for place in self._places.values() for key in place.heard_s}

    def num_missing(self, address: str, since_s: float) -> int:
        """Return how many processes at the address have not answered since then."""
        place = self._places[address]
        return place.num_processes - sum(heard_s >= since_s for heard_s in place.heard_s.values())

    def unknown(self) -> list[str]:
        """Return the addresses that have processes which never answered."""
        return [address for address, place in self._places.items() if len(place.heard_s) < place.num_processes]


ASK_TIMEOUT_S = 2.0
MAX_TRIES = 4
"""Attempts for each process behind one address: the kernel assigns connections to processes at random."""

logger = logging.getLogger(__name__)


class Collector:
    """Collect the status of one model's routers. Call `look` regularly; the other methods return what is known since. Runs on one
    event loop."""

    def __init__(self, routers: Sequence[str], model: str, *, window_s: float, tls: Tls | None = None, api_key: str = "") -> None:
        """Create a collector. `routers` are host:port; rates are measured over `window_s` seconds."""
        self._targets, self._model, self._window_s, self._tls = tuple(routers), model, window_s, tls
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._channels, self._opened = Channels(tls=tls), set[str]()
        self._routers, self._rounds = Routers(), Rounds(2 * window_s)
        self._resolved: dict[str, tuple[str, ...]] = {}
        self._answers: dict[Key, mesh_pb2.GetStatusResponse] = {}  # of the latest look that got any answer
        self._waiting: dict[Key, mesh_pb2.TrafficStatus] = {}
        self._had_registry: set[Key] = set()
        self.heard_s: float | None = None  # when a router last answered
        self.workers: tuple[SeenWorker, ...] = ()
        self.problems: dict[str, str] = {}  # by address, or by name that could not be resolved

    async def look(self, now_s: float) -> None:
        """Ask all routers. Raises nothing: `problems` holds what went wrong."""
        self.problems.clear()
        addresses = await self._resolve()
        self._drop(self._routers.listed(addresses))
        await self._close_unused(set(addresses))
        answers: dict[Key, mesh_pb2.GetStatusResponse] = {}
        for found in await asyncio.gather(*(self._ask(address, now_s) for address in addresses)):
            answers |= found
        if answers:
            self._answers, self.heard_s = answers, now_s
            self.workers = tuple(workers_of(((now_s, answer) for answer in answers.values()), self._model))
        for address in self._routers.unknown():
            self.problems.setdefault(address, f"not all router processes at {address} have answered yet")
        if not self.problems:
            self._rounds.close(now_s)

    def traffic(self, now_s: float, quantile: float) -> Traffic | None:
        """Return the traffic of the latest window; None before all routers have answered twice."""
        oldest_s = self._rounds.oldest_s
        age_s = max(0.0, now_s - oldest_s) if oldest_s is not None else 0.0
        if self._rounds.rounds:
            age_s = max(age_s, now_s - self._rounds.rounds[-1].at_s)
        traffic = traffic_of(self._rounds.rounds, self._waiting.values(), self._window_s, quantile, age_s)
        num_open = sum(answer.num_inflight + answer.num_queued for answer in self._answers.values())
        return None if traffic is None else replace(traffic, num_open=num_open)

    @property
    def lost_registry(self) -> bool:
        """Return whether a router has lost its registry: workers that start now are not discovered."""
        return any(key in self._had_registry and not answer.registry_connected for key, answer in self._answers.items())

    async def close(self) -> None:
        """Close all connections."""
        await self._channels.close()

    async def _resolve(self) -> list[str]:
        """Return the addresses of all targets. A target that cannot be resolved keeps its last ones: a DNS outage removes no
        router."""
        found = await asyncio.gather(*(self._addresses(target) for target in self._targets))
        return list(dict.fromkeys(address for addresses in found for address in addresses))

    async def _addresses(self, target: str) -> tuple[str, ...]:
        host, _, port = target.rpartition(":")
        if _is_address(host):
            return (target,)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                infos = await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
            self._resolved[target] = tuple(sorted({join_address(host, port) for host in _hosts(infos)}))
        except (OSError, TimeoutError) as error:
            self.problems[target] = f"{host} cannot be resolved: {error or 'no answer'}"
        return self._resolved.get(target, ())

    def _drop(self, gone: set[Key]) -> None:
        self._rounds.forget(gone)
        for key in gone:
            self._waiting.pop(key, None)
            self._had_registry.discard(key)

    async def _close_unused(self, addresses: set[str]) -> None:
        """Close unused channels, including those with a certificate that has been replaced."""
        for address in [each for each in self._opened if each not in addresses or self._channels.is_outdated(each)]:
            self._opened.discard(address)
            await self._channels.forget(address)

    async def _ask(self, address: str, now_s: float) -> dict[Key, mesh_pb2.GetStatusResponse]:
        """Return the answers of all processes at the address that can be reached."""
        answers: dict[Key, mesh_pb2.GetStatusResponse] = {}
        self._opened.add(address)
        try:
            answer = await self._status(self._channels.get(address))
            await self._heard(address, answer, answers, now_s)
            for _ in range(MAX_TRIES * answer.num_processes if answer.num_processes > 1 else 0):
                if not self._routers.num_missing(address, now_s):
                    break
                async with _connection(address, self._tls) as channel:
                    await self._heard(address, await self._status(channel), answers, now_s)
        except grpc.aio.AioRpcError as error:
            self.problems[address] = _problem(address, error)
        except ValueError as error:
            self.problems[address] = f"router {address}: {error}"
        return answers

    async def _status(self, channel: grpc.aio.Channel) -> mesh_pb2.GetStatusResponse:
        stub: mesh_pb2_grpc.MeshAsyncStub = mesh_pb2_grpc.MeshStub(channel)
        return await stub.GetStatus(mesh_pb2.GetStatusRequest(), timeout=ASK_TIMEOUT_S, metadata=self._metadata)

    async def _heard(
        self, address: str, answer: mesh_pb2.GetStatusResponse, answers: dict[Key, mesh_pb2.GetStatusResponse], now_s: float
    ) -> None:
        """Record an answer. Raises ValueError for one without the model's traffic."""
        told = next((each for each in answer.traffic if each.model == self._model), None)
        if told is None:
            known = ", ".join(each.model for each in answer.traffic) or "none"
            raise ValueError(f"reports no traffic of model {self._model!r}; it reports {known}")
        key: Key = answer.epoch or answer.router_id
        counts = counts_of(told)
        self._drop(self._routers.heard(address, key, answer.num_processes, now_s))
        self._rounds.heard(key, counts, now_s)
        self._waiting[key] = told
        if answer.registry_connected:
            self._had_registry.add(key)
        answers[key] = answer


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(bare_host(host))
    except ValueError:
        return False
    return True


def _hosts(infos: Sequence[tuple[socket.AddressFamily, int, int, str, tuple[str | int | bytes, ...]]]) -> list[str]:
    """Return the addresses of one family: a host that has both counts once."""
    families = [info[0] for info in infos]
    family = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
    return [str(info[4][0]) for info in infos if info[0] is family]


@asynccontextmanager
async def _connection(address: str, tls: Tls | None) -> AsyncIterator[grpc.aio.Channel]:
    """Open a new connection, which reaches any of the processes there."""
    channel = connect(address, tls=tls)
    try:
        yield channel
    finally:
        await channel.close()


def _problem(address: str, error: grpc.aio.AioRpcError) -> str:
    code = error.code()
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return f"router {address} rejects the key: {error.details()}; give an --api-key of an admin"
    return f"router {address} does not answer: {code.name}, {(error.details() or 'without a reason')[:200]}"
