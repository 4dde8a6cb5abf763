"""A stream carries frames and the bytes of parts between two ends; `SocketStream` is its form over a socket.

A thread never waits long for a peer: it works in turns of at most TURN_MS and returns as soon as the socket has nothing for
it, so a few threads serve many slow peers. A cancelled or interrupted transfer waits for its thread before it ends: a stream is
never closed, and a block never freed, while a thread still uses it.
"""

from __future__ import annotations

import asyncio
import select
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from kvtransfer import framing
from kvtransfer.errors import FrameError, PeerClosed, PushFailed
from kvtransfer.framing import extend_over
from kvtransfer.native.library import NativeCursor, native
from pdmesh.v1 import transfer_pb2

TURN_MS = 100
POLL_MS = 10
MAX_PIECES = 64  # of one sendmsg or recvmsg_into; IOV_MAX is 1024, and longer lists cost more than they save
MAX_PIECE_BYTES = 1 << 20  # of one system call, so that the bytes are still in the processor's cache when they are summed

T = TypeVar("T")


class Cursor:
    """Hold a position in a list of views."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._index = 0
        self._offset = 0
        self.remaining = sum(view.nbytes for view in views)
        self.value = 0  # CRC-32C of the bytes that were moved

    @contextmanager
    def window(self) -> Iterator[list[memoryview]]:
        """Yield the next pieces, at most MAX_PIECES and MAX_PIECE_BYTES; they are released afterwards, so that no traceback holds
        pool memory."""
        pieces = self._next_pieces()
        try:
            yield pieces
        finally:
            release(pieces)

    def _next_pieces(self) -> list[memoryview]:
        pieces: list[memoryview] = []
        size, offset = 0, self._offset
        for view in self._views[self._index : self._index + MAX_PIECES]:
            piece = view[offset : offset + MAX_PIECE_BYTES - size]
            pieces.append(piece)
            size, offset = size + piece.nbytes, 0
            if size >= MAX_PIECE_BYTES:
                break
        return pieces

    def advance(self, num_bytes: int) -> None:
        """Skip `num_bytes`, at most `remaining`."""
        self.remaining -= num_bytes
        num_bytes += self._offset
        while self._index < len(self._views) and num_bytes >= self._views[self._index].nbytes:
            num_bytes -= self._views[self._index].nbytes
            self._index += 1
        self._offset = num_bytes


class Stream(ABC):
    """Send and receive at one end of a connection. Not for concurrent use, except that one task may read and another write, and
    for interrupt().

    idle_timeout_s bounds each wait for the peer. Raises TimeoutError after it, PeerClosed or OSError when the connection is gone,
    FrameError for bytes that are no frame.
    """

    def __init__(self, executor: Executor, idle_timeout_s: float) -> None:
        self.idle_timeout_s = idle_timeout_s
        self.interrupted = False
        self._executor = executor

    async def read_message(self, *, forever: bool = False) -> transfer_pb2.TransferMessage:
        """Return the next frame. `forever`: without a timeout, because another task notices when the peer is gone, and
        interrupts."""
        async with asyncio.timeout(None if forever else self.idle_timeout_s):
            return await self.read_rest(b"")

    async def read_rest(self, beginning: bytes) -> transfer_pb2.TransferMessage:
        """Return the frame whose first bytes, at most a header, were read elsewhere. No timeout."""
        header = beginning + await self._read_exactly(framing.HEADER.size - len(beginning))
        return framing.decode(header, await self._read_exactly(framing.body_length(header)))

    async def write_message(self, message: transfer_pb2.TransferMessage) -> None:
        """Send one frame."""
        await self.write_bytes(framing.encode(message))

    async def open(self) -> None:  # noqa: B027  # most streams have nothing to do
        """Do what comes before the first frame, at both ends; idempotent."""

    async def run(self, work: Callable[..., T], *args: object) -> T:
        """Run `work(*args)` in a thread and return its result. When cancelled: interrupt, wait for the thread, then raise
        CancelledError."""
        future = asyncio.get_running_loop().run_in_executor(self._executor, lambda: work(*args))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            self.interrupt()
            while not future.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([future])
            future.exception()  # retrieved: it failed because of the interrupt
            raise

    def check_interrupted(self) -> None:
        """Raise PeerClosed after interrupt()."""
        if self.interrupted:
            raise PeerClosed("the transfer was interrupted on this side")

    async def wait_closed(self) -> None:  # noqa: B027  # most streams have nothing to wait for
        """Return when all that close() started has ended."""

    @abstractmethod
    async def write_bytes(self, data: bytes) -> None:
        """Send `data` as it is."""

    @abstractmethod
    async def send_views(self, views: Sequence[memoryview], on_bytes: Callable[[int], None]) -> int:
        """Send the bytes of `views` in order and return their CRC-32C. on_bytes(count) is called as they leave."""

    @abstractmethod
    async def receive_views(self, views: Sequence[memoryview], on_bytes: Callable[[int], None]) -> int:
        """Fill `views` in order and return the CRC-32C of what came. on_bytes(count) is called on the event loop and may raise to
        stop."""

    @abstractmethod
    async def linger(self, timeout_s: float) -> None:
        """Announce that nothing more is sent, then wait for the peer to close first, discarding what it sends: our last answer
        has to reach it."""

    @abstractmethod
    def interrupt(self) -> None:
        """Make every present and future wait on this stream fail at once. From the event loop only."""

    @abstractmethod
    def close(self) -> None:
        """Release what the stream holds; idempotent. No thread may be inside."""

    @abstractmethod
    async def _read_exactly(self, num_bytes: int) -> bytes: ...


class SocketStream(Stream):
    """Implement a stream over a socket; it owns `sock` until close()."""

    def __init__(self, sock: socket.socket, executor: Executor, idle_timeout_s: float) -> None:
        super().__init__(executor, idle_timeout_s)
        sock.setblocking(False)
        self.sock = sock

    async def write_bytes(self, data: bytes) -> None:
        async with asyncio.timeout(self.idle_timeout_s):
            await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def send_views(self, views: Sequence[memoryview], on_bytes: Callable[[int], None]) -> int:
        """Send the bytes of `views` in order, without copying them, and return their CRC-32C. on_bytes(count) is called as they
        leave."""
        cursor = self._cursor(views)
        while cursor.remaining:
            if num_bytes := await self.run(self._send_turn, cursor):
                on_bytes(num_bytes)
            else:
                await self.ready(write=True)
        return cursor.value

    async def receive_views(self, views: Sequence[memoryview], on_bytes: Callable[[int], None]) -> int:
        """Fill `views` in order and return the CRC-32C of what came. on_bytes(count) is called on the event loop and may raise to
        stop."""
        cursor = self._cursor(views)
        while cursor.remaining:
            num_bytes = await self.run(self._receive_turn, cursor)
            if num_bytes:
                on_bytes(num_bytes)
            elif cursor.remaining:
                await self.ready(write=False)
        return cursor.value

    async def ready(self, *, write: bool) -> None:
        """Wait until the socket can be written (or read). Raises TimeoutError after idle_timeout_s."""
        async with asyncio.timeout(self.idle_timeout_s):
            await self._wait(write=write)

    async def linger(self, timeout_s: float) -> None:
        """Wait for the peer to close first, discarding what it sends: closing with unread bytes would reset the connection and
        lose our last answer."""
        sink = bytearray(1 << 16)
        with suppress(OSError, TimeoutError):
            self._shutdown(socket.SHUT_WR)
            async with asyncio.timeout(timeout_s):
                while await self._receive_into(memoryview(sink)):
                    pass

    def interrupt(self) -> None:
        """Make every present and future wait on this socket fail at once. From the event loop only."""
        self.interrupted = True
        with suppress(OSError):
            self._shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket; idempotent."""
        self.sock.close()

    async def _read_exactly(self, num_bytes: int) -> bytes:
        buffer = bytearray(num_bytes)
        view, done = memoryview(buffer), 0
        while done < num_bytes:
            count = await self._receive_into(view[done:])
            if count == 0:
                raise PeerClosed(f"the peer closed the connection with {num_bytes - done} bytes of a frame missing")
            done += count
        return bytes(buffer)

    def _cursor(self, views: Sequence[memoryview]) -> Cursor | NativeCursor:
        library = native()
        return Cursor(views) if library is None else NativeCursor(library, views)

    def _send_turn(self, cursor: Cursor | NativeCursor) -> int:
        """Send and sum what the socket takes, in a thread; return the bytes sent."""
        if isinstance(cursor, NativeCursor):
            self.check_interrupted()
            return cursor.send(self.sock, TURN_MS)
        before, deadline = cursor.remaining, time.monotonic() + TURN_MS / 1000
        while cursor.remaining and time.monotonic() < deadline:
            self.check_interrupted()
            try:
                with cursor.window() as pieces:
                    count = self._send_some(pieces)
                    cursor.value = extend_over(cursor.value, pieces, count)
                cursor.advance(count)
            except BlockingIOError:
                if not self._poll(select.POLLOUT):
                    break
        return before - cursor.remaining

    def _receive_turn(self, cursor: Cursor | NativeCursor) -> int:
        """Receive and sum what the socket has, in a thread; return the bytes received."""
        if isinstance(cursor, NativeCursor):
            self.check_interrupted()
            return cursor.receive(self.sock, TURN_MS)
        before, deadline = cursor.remaining, time.monotonic() + TURN_MS / 1000
        while cursor.remaining and time.monotonic() < deadline:
            self.check_interrupted()
            try:
                with cursor.window() as pieces:
                    count = self._receive_some(pieces)
                    cursor.value = extend_over(cursor.value, pieces, count)
            except BlockingIOError:
                if not self._poll(select.POLLIN):
                    break
                continue
            if count == 0:
                raise PeerClosed(f"the peer closed the connection with {cursor.remaining} bytes of a part missing")
            cursor.advance(count)
        return before - cursor.remaining

    def _send_some(self, pieces: Sequence[memoryview]) -> int:
        """Send some of `pieces`; return the bytes that the socket took. Raises BlockingIOError when it takes none now."""
        return self.sock.sendmsg(pieces)

    def _receive_some(self, pieces: Sequence[memoryview]) -> int:
        """Receive into `pieces`; return the bytes; 0: the peer has closed. Raises BlockingIOError when there are none now."""
        return self.sock.recvmsg_into(pieces)[0]

    async def _receive_into(self, view: memoryview) -> int:
        """Wait for bytes, without a timeout, and return how many came into `view`; 0: the peer has closed."""
        return await asyncio.get_running_loop().sock_recv_into(self.sock, view)

    async def _wait(self, *, write: bool) -> None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        add, remove = (loop.add_writer, loop.remove_writer) if write else (loop.add_reader, loop.remove_reader)
        add(self.sock, _resolve, future)
        try:
            await future
        finally:
            remove(self.sock)

    def _shutdown(self, how: int) -> None:
        self.sock.shutdown(how)

    def _poll(self, event: int) -> bool:
        poller = select.poll()
        poller.register(self.sock, event)
        return bool(poller.poll(POLL_MS))


def release(views: Iterable[memoryview]) -> None:
    """Release `views`, so that their owner may free the memory."""
    for view in views:
        view.release()


async def expect(stream: Stream, kind: str) -> transfer_pb2.TransferMessage:
    """Return the next frame, which must hold `kind`. Raises FrameError for another kind."""
    message = await stream.read_message()
    if message.WhichOneof("message") != kind:
        raise FrameError(f"expected {kind}, got {message.WhichOneof('message')}")
    return message


async def wait_set(event: asyncio.Event, timeout_s: float | None) -> None:
    """Wait until `event` is set, at most `timeout_s`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


# Waiting for several tasks at once, so that none outlives the task that waits for it


LAST_WORD_S = 0.2  # for an answer that may be unread on a broken connection


async def all_or_first_error(*work: Coroutine[object, object, T]) -> list[T]:
    """Return all results, or raise an error, PushFailed before others, once all coroutines have ended. When a connection breaks,
    the others get LAST_WORD_S first: the receiver may have sent the reason on one of them, which says more than a broken pipe."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if others and any(isinstance(task.exception(), ConnectionError) for task in done):
            done |= (await asyncio.wait(others, timeout=LAST_WORD_S, return_when=asyncio.FIRST_EXCEPTION))[0]
        for task in sorted(done, key=lambda task: not isinstance(task.exception(), PushFailed)):
            task.result()
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def with_signs(work: Coroutine[object, object, None], say_alive: Callable[[], Awaitable[None]], every_s: float) -> None:
    """Run `work`, and call `say_alive` again and again until it has ended. A cancellation ends it first."""
    task = asyncio.create_task(work)
    try:
        while not (await asyncio.wait([task], timeout=every_s))[0]:
            await say_alive()
        task.result()
    finally:
        task.cancel()
        await ended(task)


async def settled(copy: Future[Any]) -> None:
    """Return when the copy has ended, and not before, however often the caller is cancelled. Raises the copy's error."""
    await all_settled([copy])


async def all_settled(copies: Sequence[Future[Any]]) -> None:
    """Return when all copies have ended; the first error is raised, a cancellation before any."""
    errors = await all_ended(copies)
    if errors:
        raise errors[0]


async def all_ended(works: Sequence[Future[Any]]) -> list[BaseException]:
    """Return the errors of `works`, once all have ended; a cancellation of the caller is raised only then."""
    waiting = [asyncio.wrap_future(work) for work in works]
    cancelled: asyncio.CancelledError | None = None
    while not all(each.done() for each in waiting):
        try:
            await asyncio.wait(waiting)
        except asyncio.CancelledError as cancellation:
            cancelled = cancellation
    errors = [error for each in waiting if (error := each.exception()) is not None]
    if cancelled is not None:
        raise cancelled
    return errors


async def ended(task: asyncio.Task[T]) -> None:
    """Return when the task has ended, and not before, however often the caller is cancelled. Its outcome is not raised."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as cancellation:
            cancelled = cancellation
    if not task.cancelled():
        task.exception()  # retrieved
    if cancelled is not None:
        raise cancelled


async def to_its_end(work: Coroutine[object, object, object]) -> None:
    """Await the end of `work`; a cancellation meanwhile is raised after it, not instead of it."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
