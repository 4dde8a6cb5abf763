"""A link of our own: a TCP proxy that resets, swallows, delays and throttles what passes between two processes.

Both ends believe that they talk to each other. It listens if and only if the process behind it does, so that who connects to a
dead process is refused as by the dead process's own machine. Bytes that a black hole holds back arrive when it ends, as TCP's
repeats would bring them; only connecting succeeds at once where on a real wire it would hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Collection

_CHUNK_BYTES = 64 << 10
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

    def black_hole(self) -> None:
        """Nothing passes any more, not even the end of a connection."""
        self._open.clear()

    def slow(self, *, delay_s: float, bytes_per_s: float) -> None:
        """Each piece, 64 KiB at most, comes `delay_s` late; no direction of a connection carries more than `bytes_per_s`."""
        self._delay_s, self._bytes_per_s = delay_s, bytes_per_s

    def mend(self) -> None:
        """Passes everything at once again."""
        self._delay_s, self._bytes_per_s = 0.0, None
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
            writer.write(data)
            await writer.drain()
        await self._link.let_pass(0)
        if writer.can_write_eof() and not writer.is_closing():
            with contextlib.suppress(OSError):
                writer.write_eof()
