"""All links of a mesh, each worker's two: they follow the processes behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from tests.chaos.link import Link
from tests.chaos.plan import LinkName
from tests.chaos.ports import free_ports, listening_ports

_WORKER_HOST = "127.0.0.1"
_FOLLOW_PERIOD_S = 0.02


class Links:
    """By worker: where its links listen (`host_of`), its own ports, and the links. `start`, later `close`, on one event loop."""

    def __init__(self, names: Iterable[str]) -> None:
        """Picks a loopback address and two ports for each of the workers `names`."""
        self._by_name: dict[str, dict[LinkName, Link]] = {}
        for number, name in enumerate(names, start=1):
            # A worker that listens at 127.0.0.1 and advertises this host is reached through the same ports of another address.
            host = f"127.7.0.{number}"
            ports = free_ports((_WORKER_HOST, host), len(LinkName))
            self._by_name[name] = {link: Link(f"{name} {link}", host, port) for link, port in zip(LinkName, ports, strict=True)}
        self._following: asyncio.Task[None] | None = None

    def get(self, name: str, link: LinkName) -> Link:
        """A link of the worker `name`."""
        return self._by_name[name][link]

    def flags(self, name: str) -> tuple[str, ...]:
        """What puts the worker `name` behind its links."""
        control, transfer = (self.get(name, link) for link in (LinkName.CONTROL, LinkName.TRANSFER))
        return ("--advertise", control.host, "--port", str(control.port), "--transfer-port", str(transfer.port))

    def start(self) -> None:
        """Begins to follow."""
        self._following = asyncio.create_task(self._follow_forever(), name="follow listeners")

    async def close(self) -> None:
        """Ends every link; idempotent."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])
            self._following = None
        await asyncio.gather(*(link.close() for link in self._all))

    @property
    def _all(self) -> list[Link]:
        return [link for links in self._by_name.values() for link in links.values()]

    async def _follow_forever(self) -> None:
        while True:
            listening = listening_ports()
            for link in self._all:
                await link.follow(listening)
            await asyncio.sleep(_FOLLOW_PERIOD_S)
