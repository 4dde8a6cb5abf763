"""All links of a mesh, each worker's two: they follow the processes behind them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from tests.chaos.plan import LinkName

# TCP ports of this machine, as the kernel tells them (Linux).


_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTENING = "0A"
# 127.0.0.1, also as gRPC has it: mapped into IPv6.
_LOCALHOST = ("0100007F", "0000000000000000FFFF00000100007F")
# Below the range that connections take their own ports from: a worker that is down must find its port free when it comes back.
_FIRST, _LAST = 18_000, 32_000


def listening_ports() -> set[int]:
    """Those on which somebody listens at 127.0.0.1. Two small files of the kernel's, well under a millisecond."""
    return {port for table in _TABLES for port in _listening(table.read_text(encoding="ascii"))}


def _listening(table: str) -> set[int]:
    rows = (line.split(maxsplit=4)[1:4] for line in table.splitlines()[1:])
    return {int(local[-4:], 16) for local, _, state in rows if state == _LISTENING and local[:-5] in _LOCALHOST}


def free_ports(hosts: Sequence[str], count: int) -> list[int]:
    """`count` ports that nobody has at any of `hosts`. Raises RuntimeError when they cannot be found."""
    candidates = random.SystemRandom().sample(range(_FIRST, _LAST), 50 * count)
    found = [port for port in candidates if all(_is_free(host, port) for host in hosts)][:count]
    if len(found) < count:
        raise RuntimeError(f"no {count} ports are free between {_FIRST} and {_LAST}")
    return found


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


# A link of our own: a TCP proxy that resets, swallows, loses, delays and throttles what passes between two processes.
#
# Both ends believe that they talk to each other. It listens if and only if the process behind it does, so that who connects to a
# dead process is refused as by the dead process's own machine. Bytes that a black hole holds back arrive when it ends, as TCP's
# repeats would bring them; only connecting succeeds at once where on a real wire it would hang.


_CHUNK_BYTES = 64 << 10
_RETRANSMITS_S = (0.2, 0.4, 0.8)
"""What TCP waits before it sends again, from Linux's least on; more is unlikely where what came behind is acknowledged."""
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with RST


class Link:
    """In front of 127.0.0.1:`port`, at the same port of `host`. On one event loop; `close` ends it."""

    def __init__(self, name: str, host: str, port: int) -> None:
        self.name = name
        self.host = host
        self.port = port
        self.num_accepted = 0
        self._server: asyncio.Server | None = None
        self._relays: set[_Relay] = set()
        self._open = asyncio.Event()  # not set: a black hole
        self._open.set()
        self._delay_s = 0.0
        self._bytes_per_s: float | None = None
        self._lost_share = 0.0

    @property
    def num_connections(self) -> int:
        """Connections that are open now."""
        return len(self._relays)

    async def follow(self, listening: Collection[int]) -> None:
        """Listens from now on if, and only if, the process behind does: its port is one of `listening`."""
        if self.port in listening and self._server is None:
            self._server = await asyncio.start_server(self._accepted, self.host, self.port)
        elif self.port not in listening and self._server is not None:
            self._server.close()
            self._server = None

    def reset(self) -> int:
        """Ends every connection with RST to both ends; returns how many there were."""
        relays = list(self._relays)
        for relay in relays:
            relay.reset()
        return len(relays)

    def drop(self) -> int:
        """Has the connections that there are carry nothing more, as a firewall that has forgotten them; returns how many."""
        for relay in self._relays:
            relay.is_dropped = True
        return len(self._relays)

    def black_hole(self) -> None:
        """Nothing passes any more, not even the end of a connection."""
        self._open.clear()

    def slow(self, *, delay_s: float, bytes_per_s: float) -> None:
        """Each piece, 64 KiB at most, comes `delay_s` late; no direction of a connection carries more than `bytes_per_s`."""
        self._delay_s, self._bytes_per_s = delay_s, bytes_per_s

    def lose(self, share: float) -> None:
        """Of all pieces a share is lost, and of what is sent again, too: TCP waits before each repeat, each time longer."""
        self._lost_share = share

    def mend(self) -> None:
        """Passes everything at once again."""
        self._delay_s, self._bytes_per_s, self._lost_share = 0.0, None, 0.0
        self._open.set()

    async def close(self) -> None:
        """Ends the listener and every connection; idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.mend()
        self.reset()
        while self._relays:
            await asyncio.wait([relay.task for relay in self._relays])

    async def let_pass(self, num_bytes: int) -> None:
        """Returns when a piece of `num_bytes` may go on."""
        delay_s = self._delay_s + (num_bytes / self._bytes_per_s if self._bytes_per_s else 0.0)
        if delay_s:
            await asyncio.sleep(delay_s)
        for pause_s in _RETRANSMITS_S:
            if random.random() >= self._lost_share:
                break
            await asyncio.sleep(pause_s)
        await self._open.wait()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_accepted += 1
        task = asyncio.current_task()
        assert task is not None
        relay = _Relay(self, reader, writer, task)
        self._relays.add(relay)
        try:
            await relay.run()
        finally:
            self._relays.discard(relay)


class _Relay:
    """One connection, from its two sides."""

    def __init__(
        self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, task: asyncio.Task[object]
    ) -> None:
        self.task = task
        self._link = link
        self._near = (reader, writer)
        self._writers = [writer]
        self._was_reset = False
        self.is_dropped = False

    async def run(self) -> None:
        """Until both directions have ended, or either is broken."""
        try:
            await self._link.let_pass(0)
            far = await asyncio.open_connection("127.0.0.1", self._link.port)
        except OSError:
            self.reset()
            return
        self._writers.append(far[1])
        if self._was_reset:
            self.reset()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(self._near[0], far[1]))
                group.create_task(self._pump(far[0], self._near[1]))
        except* OSError:
            self.reset()
        finally:
            for writer in self._writers:
                writer.close()

    def reset(self) -> None:
        """RST to both ends."""
        self._was_reset = True
        for writer in self._writers:
            sock = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction; the end of it is passed on as well, after what came before."""
        while data := await reader.read(_CHUNK_BYTES):
            await self._link.let_pass(len(data))
            if not self.is_dropped:
                writer.write(data)
                await writer.drain()
        await self._link.let_pass(0)
        if writer.can_write_eof() and not writer.is_closing():
            with contextlib.suppress(OSError):
                writer.write_eof()


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
