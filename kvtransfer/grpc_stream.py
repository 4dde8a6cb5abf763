"""The stream of a transfer in the messages of a gRPC call.

    sender:   views ─► outbox ─► call ═══ HTTP/2 window ═══► call ─► inbox ─► views   :receiver

`carry` moves messages between the mailboxes and the call; all other tasks wait at a mailbox, because gRPC ends a call whose read
or write is cancelled. A full inbox stops the reading, which fills HTTP/2's window and stops the peer's writing, which fills the
peer's outbox: each end holds a few megabytes, however much is sent.

A message is a `TransferChunk`, encoded and decoded by hand: protobuf would copy the data once more on either side.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from typing import Protocol

import grpc.aio

from kvtransfer.errors import FrameError, PeerClosed, TransferRefused
from kvtransfer.framing import extend, fill_pieces
from kvtransfer.stream import Cursor, Stream

MAX_IN_OUTBOX = 1  # besides the one that gRPC sends
MAX_IN_INBOX = 1  # besides the one that is being read
NOTHING_MORE = b""  # the last message of a sender, though the call goes on
_TAG = 0x0A  # field 1, length-delimited: TransferChunk.data
_MAX_PREFIX_BYTES = 6
_STRANGER = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


class Wire(Protocol):
    """Read and write the messages of a gRPC call, as bytes, at either of its ends."""

    async def read(self) -> object:
        """Return the next message; EOF after the last."""

    async def write(self, request: bytes, /) -> None:
        """Write a message; return when gRPC can take another."""


class Mailbox:
    """Pass at most `capacity` messages between two tasks. A task that waits gets the error that ended the mailbox."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._messages: deque[bytes | memoryview] = deque()
        self._changed = asyncio.Event()
        self._error: Exception | None = None

    async def put(self, message: bytes | memoryview) -> None:
        """Append a message, waiting for room."""
        await self._until(lambda: self._error is None and len(self._messages) < self._capacity)
        self._messages.append(message)
        self._changed.set()

    async def get(self) -> bytes | memoryview:
        """Return the next message, waiting for it."""
        await self._until(lambda: bool(self._messages))
        self._changed.set()
        return self._messages.popleft()

    def end(self, error: Exception) -> None:
        """Accept no more messages; those already in the mailbox may be taken. The first error counts."""
        self._error = self._error or error
        self._changed.set()

    def close(self, error: Exception) -> None:
        """End the mailbox at once, and drop its messages."""
        self._messages.clear()
        self.end(error)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self._error is not None:
                raise self._error.with_traceback(None)
            self._changed.clear()
            await self._changed.wait()


class MessageStream(Stream):
    """Implement a stream over `wire`, which works while a task runs `carry`."""

    def __init__(self, wire: Wire, executor: Executor, idle_timeout_s: float) -> None:
        super().__init__(executor, idle_timeout_s)
        self._wire = wire
        self._inbox = Mailbox(MAX_IN_INBOX)
        self._outbox = Mailbox(MAX_IN_OUTBOX)
        self._chunk = memoryview(b"")  # the rest of the last message
        self._closed = asyncio.Event()

    async def carry(self, grace_s: float = 0.0) -> None:
        """Move messages until close(), or until this task is cancelled because the call has ended. A message that is being
        written then may take `grace_s`: a server whose write was cancelled cannot end its call, and the peer would wait until its
        timeout."""
        reading, writing = asyncio.create_task(self._fill_inbox()), asyncio.create_task(self._empty_outbox())
        try:
            await self._closed.wait()
            await asyncio.wait([writing], timeout=grace_s)
        finally:
            for pump in (reading, writing):
                pump.cancel()
            await asyncio.gather(reading, writing, return_exceptions=True)
            self._inbox.end(PeerClosed("the call is over"))
            self._outbox.close(PeerClosed("the call is over"))

    async def write_bytes(self, data: bytes) -> None:
        async with asyncio.timeout(self.idle_timeout_s):
            await self._outbox.put(wrap([data]))

    async def send_views(self, views: Sequence[memoryview], on_bytes: Callable[[int], None]) -> int:
        cursor = Cursor(views)
        while before := cursor.remaining:
            async with asyncio.timeout(self.idle_timeout_s):
                await self._outbox.put(_next_message(cursor))  # the copy is so short that a thread would cost more
            on_bytes(before - cursor.remaining)
        return cursor.value

    async def receive_views(self, views: Sequence[memoryview], on_bytes: Callable[[int], None]) -> int:
        cursor, value = Cursor(views), 0
        while cursor.remaining:
            async with asyncio.timeout(self.idle_timeout_s):
                chunk = await self._take(cursor.remaining)
            value = await self.run(self._write_into, cursor, chunk, value)
            on_bytes(chunk.nbytes)
        return value

    async def linger(self, timeout_s: float) -> None:
        """Announce that nothing more is sent, then wait: a call that ends with unread messages may lose our last answer."""
        with suppress(OSError, FrameError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._outbox.put(NOTHING_MORE)
                while True:
                    await self._inbox.get()

    def interrupt(self) -> None:
        self.interrupted = True
        self._hang_up("the transfer was interrupted on this side")

    def close(self) -> None:
        self._hang_up("the stream is closed")
        self._closed.set()

    async def _read_exactly(self, num_bytes: int) -> bytes:
        pieces: list[memoryview] = []
        while num_bytes:
            pieces.append(await self._take(num_bytes))
            num_bytes -= pieces[-1].nbytes
        return b"".join(pieces)

    async def _take(self, num_bytes: int) -> memoryview:
        """Return the next bytes, at least one and at most `num_bytes`, without a copy."""
        while not self._chunk:
            self._chunk = memoryview(await self._inbox.get())
        taken, self._chunk = self._chunk[:num_bytes], self._chunk[num_bytes:]
        return taken

    async def _fill_inbox(self) -> None:
        error: Exception = PeerClosed("the peer closed the connection")
        try:
            while isinstance(message := await self._wire.read(), bytes) and message != NOTHING_MORE:
                await self._inbox.put(unwrap(message))
        except FrameError as garbage:
            error = garbage
        except Exception as failure:  # noqa: BLE001  # gRPC reports the end of a call by many exceptions
            error = _refusal(failure) or PeerClosed(f"the peer closed the connection: {_details(failure)}")
        finally:
            self._inbox.end(error)

    async def _empty_outbox(self) -> None:
        try:
            while True:
                message = await self._outbox.get()
                assert isinstance(message, bytes)
                await self._wire.write(message)
        except Exception as failure:  # noqa: BLE001  # see above
            self._outbox.close(PeerClosed(f"the peer closed the connection: {_details(failure)}"))
        finally:  # gRPC cancels this task when the call is cancelled
            self._outbox.close(PeerClosed("the peer closed the connection"))

    def _hang_up(self, reason: str) -> None:
        self._inbox.close(PeerClosed(reason))
        self._outbox.close(PeerClosed(reason))

    def _write_into(self, cursor: Cursor, chunk: memoryview, value: int) -> int:
        """Copy `chunk` to the position of `cursor`, in a thread; return the CRC-32C `value` extended by the copy."""
        while chunk:
            self.check_interrupted()
            with cursor.window() as pieces:
                num_bytes, value = fill_pieces(value, pieces, chunk)
            cursor.advance(num_bytes)
            chunk = chunk[num_bytes:]
        return value


def wrap(pieces: Sequence[bytes | memoryview]) -> bytes:
    """Return a TransferChunk with the bytes of `pieces`, which are copied once."""
    return b"".join([_prefix(sum(len(piece) for piece in pieces)), *pieces])


def unwrap(message: bytes) -> memoryview:
    """Return the data of a TransferChunk without a copy. Raises FrameError if it holds anything else."""
    size = 0
    for index, byte in enumerate(message[1:_MAX_PREFIX_BYTES]):
        size |= (byte & 0x7F) << 7 * index
        if byte < 0x80 and message[0] == _TAG and index + 2 + size == len(message):
            return memoryview(message)[index + 2 :]
        if byte < 0x80:
            break
    raise FrameError(f"a message of {len(message)} bytes is no TransferChunk")


def _prefix(num_bytes: int) -> bytes:
    """Return the tag and the length of TransferChunk.data."""
    encoded = bytearray([_TAG])
    while num_bytes >= 0x80:
        encoded.append(num_bytes & 0x7F | 0x80)
        num_bytes >>= 7
    encoded.append(num_bytes)
    return bytes(encoded)


def _next_message(cursor: Cursor) -> bytes:
    with cursor.window() as pieces:
        message, num_bytes = wrap(pieces), sum(piece.nbytes for piece in pieces)
    with memoryview(message)[len(message) - num_bytes :] as data:  # the copy, which is still in the processor's cache
        cursor.value = extend(cursor.value, data)
    cursor.advance(num_bytes)
    return message


def _refusal(failure: Exception) -> TransferRefused | None:
    """Return, from the status of the call, the refusal of a server that requires another certificate or another name in it."""
    if isinstance(failure, grpc.aio.AioRpcError) and failure.code() in _STRANGER:
        return TransferRefused(failure.code(), _details(failure))
    return None


def _details(failure: Exception) -> str:
    details = failure.details() if isinstance(failure, grpc.aio.AioRpcError) else str(failure)
    return details or type(failure).__name__
