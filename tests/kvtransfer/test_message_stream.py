"""The end of a call: what gRPC is writing then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from kvtransfer.grpc_stream import MessageStream


class SlowWire:
    """A call whose peer says nothing, and whose writes take until `window` opens."""

    def __init__(self) -> None:
        self.window, self.is_writing = asyncio.Event(), asyncio.Event()
        self.num_written = self.num_given_up = 0

    async def read(self) -> object:
        await asyncio.Event().wait()
        raise AssertionError("nothing comes")

    async def write(self, request: bytes, /) -> None:
        self.is_writing.set()
        try:
            await self.window.wait()
        except asyncio.CancelledError:
            self.num_given_up += 1
            raise
        self.num_written += 1


@asynccontextmanager
async def writing(grace_s: float) -> AsyncIterator[tuple[SlowWire, MessageStream, asyncio.Task[None]]]:
    """A stream that writes one message, with another behind it."""
    wire = SlowWire()
    with ThreadPoolExecutor(1) as executor:
        stream = MessageStream(wire, executor, 5.0)
        carrying = asyncio.create_task(stream.carry(grace_s))
        await stream.write_bytes(b"first")
        await wire.is_writing.wait()
        await stream.write_bytes(b"second")
        yield wire, stream, carrying
        await carrying


async def test_a_message_that_is_being_written_is_written() -> None:
    async with writing(grace_s=60.0) as (wire, stream, carrying):
        stream.close()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not carrying.done()  # gRPC cannot end a call meanwhile
        wire.window.set()
    assert (wire.num_written, wire.num_given_up) == (1, 0)  # and what waits behind it is dropped


async def test_a_peer_that_takes_nothing_is_not_waited_for_for_ever() -> None:
    async with writing(grace_s=0.05) as (wire, stream, _):
        stream.close()
    assert (wire.num_written, wire.num_given_up) == (0, 1)


async def test_a_caller_does_not_wait() -> None:
    async with writing(grace_s=0.0) as (wire, stream, _):
        stream.close()
    assert (wire.num_written, wire.num_given_up) == (0, 1)
