"""A proxy on loopback that does to a byte stream what networks and their middle boxes do, at places that a test chooses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

CHUNK_BYTES = 2048


class Harm(Enum):
    """What happens to the chunk that holds a byte."""

    FLIP = "flip"  # one bit of it
    CUT = "cut"  # the connection is closed before it
    RESET = "reset"  # the connection is reset before it
    HOLE = "hole"  # it and all that follows vanish; the connection stays open
    DROP = "drop"  # it vanishes, what follows comes
    REPEAT = "repeat"  # it comes twice
    SWAP = "swap"  # it comes after its successor
    DELAY = "delay"  # it comes late


@dataclass(frozen=True)
class Strike:
    """Harm at byte `at` of connection `connection` (counted from the last `plan`), to the receiver or back."""

    harm: Harm
    at: int
    connection: int = 0
    is_backward: bool = False


class HostileNetwork:
    """Forwards connections to `port` on loopback. Connections of one `plan` share its strikes."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._strikes: Sequence[Strike] = ()
        self._num_connections = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        """Returns the address to connect to instead."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def plan(self, strikes: Sequence[Strike]) -> None:
        """For connections from here on."""
        self._strikes, self._num_connections = strikes, 0

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        number, self._num_connections = self._num_connections, self._num_connections + 1
        strikes = [strike for strike in self._strikes if strike.connection == number]
        try:
            back_reader, back_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        ways = (
            _forward(reader, back_writer, [strike for strike in strikes if not strike.is_backward]),
            _forward(back_reader, writer, [strike for strike in strikes if strike.is_backward]),
        )
        try:
            await asyncio.gather(*ways)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            for each in (writer, back_writer):
                each.transport.abort()


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, strikes: Sequence[Strike]) -> None:
    done, kept = 0, b""
    while chunk := await reader.read(CHUNK_BYTES):
        harm = next((s for s in strikes if done <= s.at < done + len(chunk)), None)
        offset = harm.at - done if harm else 0
        done += len(chunk)
        match harm.harm if harm else None:
            case Harm.FLIP:
                chunk = chunk[:offset] + bytes([chunk[offset] ^ 4]) + chunk[offset + 1 :]
            case Harm.CUT:
                writer.write(chunk[:offset])
                break
            case Harm.RESET:
                raise ConnectionResetError
            case Harm.HOLE:
                while await reader.read(CHUNK_BYTES):
                    pass
                return
            case Harm.DROP:
                continue
            case Harm.REPEAT:
                chunk += chunk
            case Harm.SWAP:
                kept = chunk
                continue
            case Harm.DELAY:
                await asyncio.sleep(0.05)
        writer.write(chunk + kept)
        kept = b""
        await writer.drain()
    writer.write(kept)
    with suppress(OSError):
        writer.write_eof()
