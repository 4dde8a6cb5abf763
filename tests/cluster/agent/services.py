"""Addresses of Services, as kube-proxy's userspace mode had them: this node takes each connection and hands it to a ready pod."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable

from tests.cluster.agent.api import Key, Object
from tests.cluster.namespaces import ip

_CHUNK = 1 << 16
_CONNECT_S = 5.0
Target = tuple[str, int]


class ServiceProxy:
    """`set` brings the Services; endpoints are asked for at each connection."""

    def __init__(self, endpoints: Callable[[], dict[Key, Object]]) -> None:
        self._endpoints = endpoints
        self._servers: dict[Target, asyncio.Server] = {}
        self._addresses: set[str] = set()

    async def set(self, services: dict[Key, Object]) -> None:
        """Listens for those that are new, no longer for those that are gone."""
        wanted = {
            (service["spec"]["clusterIP"], port["port"]): (key, port.get("name", ""))
            for key, service in services.items()
            if service["spec"].get("clusterIP") not in (None, "", "None")
            for port in service["spec"]["ports"]
            if port.get("protocol", "TCP") == "TCP"
        }
        for target in self._servers.keys() - wanted.keys():
            self._servers.pop(target).close()
        for target in wanted.keys() - self._servers.keys():
            self._servers[target] = await self._listen(target, *wanted[target])

    async def _listen(self, target: Target, service: Key, port: str) -> asyncio.Server:
        address, number = target
        if address not in self._addresses:
            await asyncio.to_thread(ip, f"addr replace {address}/32 dev lo")
            self._addresses.add(address)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._join(reader, writer, service, port)

        return await asyncio.start_server(serve, address, number)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, service: Key, port: str) -> None:
        targets = self._targets(service, port)
        with contextlib.suppress(OSError, TimeoutError):
            if targets:
                async with asyncio.timeout(_CONNECT_S):
                    inner_reader, inner_writer = await asyncio.open_connection(*random.choice(targets))
                await asyncio.gather(_pump(reader, inner_writer), _pump(inner_reader, writer))
        writer.close()

    def _targets(self, service: Key, port: str) -> list[Target]:
        subsets = self._endpoints().get(service, {}).get("subsets") or ()
        return [
            (entry["ip"], number["port"])
            for subset in subsets
            for entry in subset.get("addresses") or ()
            for number in subset.get("ports") or ()
            if number.get("name", "") == port
        ]


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        # One side's end is the other's: what runs through here are streams that end together.
        writer.close()
