"""A push at the sender: one connection or several, each with a window of unanswered parts; then commit or abort on the first.

A task reads each connection from its hello to its end, so a rejection is noticed whenever it comes: while parts are sent, while
the prefill has nothing to send, before the commit. Timeouts count from the last byte that the receiver took, or its last answer.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import grpc

from kvtransfer.errors import FrameError, NoAnswer, PeerClosed, PushFailed, TransportUnavailable, code_of, push_failed
from kvtransfer.manifest import KVMemory, Part, part_views, refuse
from kvtransfer.sender.send_queue import (
    Ending,
    KVReadiness,
    NothingToDecode,
    OutboundPart,
    Pipeline,
    SendQueue,
    Told,
    choose_group,
)
from kvtransfer.staging import FilledPiece, StagedMemory
from kvtransfer.stream import LAST_WORD_S, Stream, all_or_first_error, ended, expect, release, wait_set
from kvtransfer.transports.base import DeviceReadSource, Outgoing
from pdmesh.runtime import failpoints
from pdmesh.v1 import common_pb2, transfer_pb2

# The input and the result of a push


@dataclass(frozen=True)
class PartMoved:
    """Describe a part that the receiver has verified: a group of layers of some blocks. Monotonic nanoseconds: `sent_ns` is when
    its first byte was about to be sent, for the first time; `verified_ns` is when the receiver's answer came."""

    layer_start: int
    layer_end: int
    num_blocks: int
    num_bytes: int
    transport: str
    sent_ns: int
    verified_ns: int

    def joined(self, other: "PartMoved") -> "PartMoved":
        """Return one entry for both parts, from the first byte to the last answer."""
        return PartMoved(
            min(self.layer_start, other.layer_start),
            max(self.layer_end, other.layer_end),
            max(self.num_blocks, other.num_blocks),
            self.num_bytes + other.num_bytes,
            self.transport,
            min(self.sent_ns, other.sent_ns),
            max(self.verified_ns, other.verified_ns),
        )


@dataclass(frozen=True)
class PushJob:
    """Describe the KV of one request for one reservation.

    source_block_ids are the ids in the sender's pool of the request's blocks, including the prefix that the decode worker has: of
    all, or of those that `feed` may announce by now, and then the list grows while the prefill goes on. num_tokens is how many
    tokens they hold; `feed` says which of them may be sent by now. While `num_steps()` grows the engine makes progress, so the
    lease is renewed though nothing is sent; also while a step may still run that takes `longest_step_s()`. `on_part` is called
    for each part that the receiver has verified.
    """

    reservation: common_pb2.Reservation
    source_block_ids: Sequence[int]
    num_tokens: int
    feed: KVReadiness
    num_steps: Callable[[], int] = lambda: 0
    on_part: Callable[[PartMoved], None] | None = None
    longest_step_s: Callable[[], float] = lambda: 0.0


@dataclass(frozen=True)
class PushResult:
    """Hold the result of a successful push: num_bytes of KV in num_parts over `transport`, of which `num_exposed_bytes` were sent
    after the prefill had ended. Monotonic nanoseconds: `started_ns` of the call, `ended_ns` when the receiver had acknowledged
    the end. `committed`: there was something to decode."""

    transport: str
    num_bytes: int
    num_exposed_bytes: int
    num_parts: int
    started_ns: int
    ended_ns: int
    committed: bool

    @property
    def elapsed_ns(self) -> int:
        return self.ended_ns - self.started_ns


HELLO_TIMEOUT_S = 2.0
MAX_UNANSWERED = 4  # unanswered parts of a connection: the receiver always has one to work on
FETCH_ALIVE_S = 0.5  # between two keepalives while a part is fetched from a device
BUFFERED_BYTES = 4 << 20  # how much socket buffers may hold when the sender has written its last byte
SLOWEST_BYTES_PER_S = 1 << 20  # a slower link is given up

T = TypeVar("T")


class PushConnection:
    """Speak the protocol of a push over `outgoing`. Raises PushFailed when the receiver rejects the push, OSError or FrameError
    when the connection is broken, TimeoutError when the receiver did nothing for reply_timeout_s."""

    def __init__(self, outgoing: Outgoing, memory: KVMemory, transport: str, reply_timeout_s: float) -> None:
        self.transport = transport
        self.outgoing = outgoing
        self.num_bytes = 0  # bytes that the receiver has verified
        self.busy_s = 0.0  # time with unanswered parts
        self.on_part: Callable[[PartMoved], None] | None = None  # called for each part that the receiver has verified
        self._sent_ns: dict[int, int] = {}  # by part id, while on_part is set
        self._memory = memory
        self._reply_timeout_s = reply_timeout_s
        self._unanswered: dict[int, OutboundPart] = {}
        self._corrupt: deque[OutboundPart] = deque()  # the unanswered parts that are sent again
        self._sent_again: set[int] = set()
        self._all_sent = False
        self._busy_since = self._last_progress = 0.0
        self._writing = asyncio.Lock()  # a part's bytes follow its header, also when several tasks send
        self._changed = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        self._is_ending = self._is_committed = False

    @property
    def stream(self) -> Stream:
        return self.outgoing.stream

    async def hello(self, hello: transfer_pb2.TransferHello) -> None:
        """Open the connection. Raises TransportUnavailable if the receiver cannot use this transport, closes it or does not
        answer."""
        try:
            async with asyncio.timeout(min(HELLO_TIMEOUT_S, self._reply_timeout_s)):
                await self.outgoing.send_hello(hello)
                reply = (await expect(self.stream, "hello_reply")).hello_reply
        except ConnectionError as error:
            raise TransportUnavailable(f"{self.transport}: the receiver closed the connection at hello: {error}") from error
        except TimeoutError as error:
            raise NoAnswer(f"{self.transport}: the receiver did not answer hello") from error
        if code_of(reply.code) is grpc.StatusCode.UNIMPLEMENTED:
            raise TransportUnavailable(f"{self.transport}: {reply.message}")
        _check_reply(reply)
        self._reader = asyncio.create_task(self._read())

    async def stop(self) -> None:
        """Stop reading; call it before the stream is closed."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])

    async def pump(self, queue: SendQueue) -> None:
        """Send the parts of `queue` until it ends; return when the receiver has verified all of them."""
        await all_or_first_error(self._send_from(queue), self._send_corrupt_again())

    async def while_open(self, work: Coroutine[object, object, T]) -> T:
        """Return the result of `work`, unless the receiver ends the push meanwhile."""
        task = asyncio.create_task(work)
        try:
            await asyncio.wait([task, self._reading], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self._error or FrameError("the receiver answered a commit that it was not sent")
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def keep_alive(self) -> None:
        """Send a keepalive while the prefill goes on and there is nothing to send; a part that is being sent serves as one."""
        if not self._writing.locked():
            async with self._writing:
                await self._say_alive()

    async def commit(
        self, num_parts: int, num_tokens: int, choices: Sequence[transfer_pb2.CommittedChoice], *, is_exact: bool
    ) -> None:
        """Close the manifest; return when the receiver has started the sequence."""
        commit = transfer_pb2.TransferCommit(num_parts=num_parts, num_tokens=num_tokens, choices=choices, rounded=not is_exact)
        self._is_ending = True
        await self._write(transfer_pb2.TransferMessage(commit=commit))
        await self._until(lambda: self._is_committed)

    async def abort(self, *, finished: bool, reason: str) -> None:
        """End the attempt; return when the receiver has acted on it and closes the connection."""
        abort = transfer_pb2.TransferAbort(finished=finished, reason=reason)
        self._is_ending = True
        await self._write(transfer_pb2.TransferMessage(abort=abort))
        await self._until(lambda: isinstance(self._error, PeerClosed))

    async def _send_from(self, queue: SendQueue) -> None:
        while (outbound := await queue.get()) is not None:
            try:
                await self._send_when_room(outbound)
            finally:
                await outbound.drop()
        await self._until(lambda: not self._unanswered)
        self._all_sent = True
        self._changed.set()

    async def _send_when_room(self, outbound: OutboundPart) -> None:
        """Send the part once the window has room for it."""
        await failpoints.hit_async("push.part")
        await self._until(lambda: len(self._unanswered) < MAX_UNANSWERED)
        if not self._unanswered:
            self._busy_since = time.monotonic()
        async with self._writing:
            await self._send(outbound)

    async def _send_corrupt_again(self) -> None:
        """Send corrupt parts a second time; `_take_answer` allows no third."""
        while not self._all_sent:
            await self._until(lambda: bool(self._corrupt) or self._all_sent)
            while self._corrupt:
                async with self._writing:
                    await self._send(self._corrupt.popleft())

    async def _send(self, outbound: OutboundPart) -> None:
        if isinstance(self.outgoing, DeviceReadSource):
            await self.outgoing.settle(outbound.part.layers, outbound.block_ids, outbound.at, self._say_alive)
            await self._send_views(outbound, [])
            return
        if isinstance(self._memory, StagedMemory):
            filled = await self._fetched(self._memory, outbound)
            try:
                await self._send_views(outbound, [filled.view])
            finally:
                self._memory.give_back(filled)
            return
        views = part_views(self._memory, outbound.part.layers, outbound.block_ids)
        try:
            await self._send_views(outbound, views)
        finally:
            release(views)

    async def _fetched(self, memory: StagedMemory, outbound: OutboundPart) -> FilledPiece:
        """Fetch the part, and send keepalives meanwhile: a step may be long, and other pushes may hold all pieces."""
        fetching = asyncio.create_task(outbound.fetched())
        try:
            while not (await asyncio.wait([fetching], timeout=FETCH_ALIVE_S))[0]:
                await self._say_alive()
            return fetching.result()
        except BaseException:
            fetching.cancel()
            try:
                await ended(fetching)  # the part's blocks are read until then
            finally:
                if not fetching.cancelled() and fetching.exception() is None:
                    memory.give_back(fetching.result())
            raise

    async def _send_views(self, outbound: OutboundPart, views: Sequence[memoryview]) -> None:
        part = outbound.part
        header = transfer_pb2.PartHeader(
            part_id=part.part_id,
            layer_start=part.layer_start,
            layer_end=part.layer_end,
            block_start=part.block_start,
            block_end=part.block_end,
            num_bytes=part.num_bytes(self._memory.bytes_per_layer_block),
        )
        self._unanswered[part.part_id] = outbound
        if self.on_part is not None:
            self._sent_ns.setdefault(part.part_id, time.monotonic_ns())
        self._progress()
        total = await self.outgoing.send_part(header, views, outbound.block_ids, lambda _count: self._progress())
        sums = {"word_sum": total} if isinstance(self.outgoing, DeviceReadSource) else {"crc32c": total}
        end = transfer_pb2.PartEnd(part_id=part.part_id, **sums)
        await self.stream.write_message(transfer_pb2.TransferMessage(part_end=end))
        self._progress()

    async def _say_alive(self) -> None:
        await self._write(transfer_pb2.TransferMessage(alive=transfer_pb2.TransferAlive()))

    async def _write(self, message: transfer_pb2.TransferMessage) -> None:
        """Send `message`. Where the connection is broken, raise the receiver's last answer, which says more than a broken
        pipe."""
        try:
            await self.stream.write_message(message)
        except ConnectionError:
            await asyncio.wait([self._reading], timeout=LAST_WORD_S)
            if isinstance(self._error, PushFailed):
                raise self._error from None
            raise
        self._progress()

    @property
    def _reading(self) -> asyncio.Task[None]:
        assert self._reader is not None, "hello comes first"
        return self._reader

    async def _read(self) -> None:
        """Read answers until the commit is answered or the connection ends."""
        try:
            while not self._is_committed:
                self._take(await self.stream.read_message(forever=True))
                self._progress()
        except (OSError, FrameError, PushFailed) as error:
            self._error = error
        finally:
            self._changed.set()

    def _take(self, message: transfer_pb2.TransferMessage) -> None:
        match message.WhichOneof("message"):
            case "part_reply":
                self._take_answer(message.part_reply)
            case "commit_reply":
                _check_reply(message.commit_reply)
                self._is_committed = True
            case "alive" if self._is_ending:
                return  # the receiver's event loop runs: its engine is slow
            case kind:
                raise FrameError(f"a receiver does not send {kind} here")

    def _take_answer(self, reply: transfer_pb2.PartReply) -> None:
        outbound = self._unanswered.get(reply.part_id)
        if outbound is None or outbound in self._corrupt:
            raise FrameError(f"the receiver answered part {reply.part_id}, which it was not sent")
        part = outbound.part
        if reply.ok:
            self.num_bytes += part.num_bytes(self._memory.bytes_per_layer_block)
            del self._unanswered[reply.part_id]
            self._tell_moved(part)
            if not self._unanswered:
                self.busy_s += time.monotonic() - self._busy_since
        elif part.part_id in self._sent_again:
            raise push_failed(grpc.StatusCode.DATA_LOSS, f"part {part.part_id} arrived corrupt twice: {reply.message}")
        else:
            self._sent_again.add(part.part_id)
            self._corrupt.append(outbound)

    def _tell_moved(self, part: Part) -> None:
        sent_ns = self._sent_ns.pop(part.part_id, None)
        if self.on_part is not None and sent_ns is not None:
            num_bytes = part.num_bytes(self._memory.bytes_per_layer_block)
            layers, now_ns = part.layers, time.monotonic_ns()
            self.on_part(PartMoved(layers.start, layers.stop, part.num_blocks, num_bytes, self.transport, sent_ns, now_ns))

    def _progress(self) -> None:
        self._last_progress = time.monotonic()
        self._changed.set()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for `condition`. Raises the error that ended the connection, and TimeoutError when the receiver owes an answer and
        nothing moves."""
        while not condition():
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await wait_set(self._changed, self._patience_s())

    def _patience_s(self) -> float | None:
        """Return the seconds for which the receiver may still do nothing; None while it owes no answer. Raises TimeoutError."""
        if not self._unanswered and not self._is_ending:
            return None
        size = self._memory.bytes_per_layer_block
        buffered = min(BUFFERED_BYTES, sum(each.part.num_bytes(size) for each in self._unanswered.values()))
        left = self._last_progress + self._reply_timeout_s + buffered / SLOWEST_BYTES_PER_S - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


def _check_reply(reply: transfer_pb2.TransferReply) -> None:
    code = code_of(reply.code)
    if code is not grpc.StatusCode.OK:
        raise push_failed(code, reply.message)


# One push over its connections: parts are sent as the prefill makes them final, then the commit


ALIVE_S = 1.0  # the longest time between two keepalives while nothing is sent
SIGNS_IN_A_LEASE = 5
PATIENCE_STEPS = 5  # a step may take this many times as long as predicted, on a machine that is busy


class Push:
    """Run one push over `connections`, which are open; the first carries the messages that concern the whole push. Raises the
    errors of PushConnection."""

    def __init__(self, connections: Sequence[PushConnection], pipeline: Pipeline, memory: KVMemory, lease_s: float) -> None:
        self.connections = connections
        self._memory = memory
        self._told: Told | None = None
        self._alive_s = min(ALIVE_S, lease_s / SIGNS_IN_A_LEASE)
        self._pipeline = pipeline
        self._num_steps_seen = -1
        self._moved_at = time.monotonic()  # when the engine was last seen to make progress
        self._num_exposed_bytes = 0

    @property
    def first(self) -> PushConnection:
        return self.connections[0]

    @property
    def transport(self) -> str:
        """Return the name of the transport."""
        return self.first.transport

    @property
    def num_bytes(self) -> int:
        """Return the bytes that the receiver has verified."""
        return sum(connection.num_bytes for connection in self.connections)

    @property
    def busy_s(self) -> float:
        """Return the busy time of the connection that was busy longest."""
        return max(connection.busy_s for connection in self.connections)

    async def send_parts(self, job: PushJob, bytes_per_s: float) -> int:
        """Send the KV that the decode worker lacks and wait until it is verified; return the bytes that were left when the
        prefill ended. `bytes_per_s` is the throughput to expect of the connection."""
        queue = SendQueue(len(self.connections))
        try:
            with self._listening(job.feed):
                pumps = (connection.pump(queue) for connection in self.connections)
                await all_or_first_error(self._feed(job, queue, bytes_per_s), *pumps)
        finally:
            await queue.drop()
        return self._num_exposed_bytes

    @contextmanager
    def _listening(self, feed: KVReadiness) -> Iterator[None]:
        """Record a mark whenever the prefill reports final KV."""
        if not isinstance(self._memory, StagedMemory):
            yield
            return
        self._told = Told(self._memory)
        self._told.note(feed.ready)
        feed.on_ready = self._told.note
        try:
            yield
        finally:
            feed.on_ready = None

    async def ending(self, job: PushJob) -> Ending:
        """Wait until the prefill has ended."""
        return await self.first.while_open(self._ending(job))

    async def _ending(self, job: PushJob) -> Ending:
        while job.feed.ending is None:
            if await self._is_quiet(job):
                await self.first.keep_alive()
        return job.feed.ending

    async def _feed(self, job: PushJob, queue: SendQueue, bytes_per_s: float) -> None:
        while not self._pipeline.is_complete and not isinstance(job.feed.ending, NothingToDecode):
            feed, is_idle = job.feed, True
            has_ended = feed.ending is not None
            for part in self._pipeline.take(feed.ready, partial(self._choose_group, feed, bytes_per_s)):
                is_idle = False
                self._num_exposed_bytes += has_ended * part.num_bytes(self._pipeline.bytes_per_layer_block)
                await queue.put(self._outbound(job, part))
            if is_idle and await self._is_quiet(job):
                await self.first.keep_alive()
        await queue.end()

    def _outbound(self, job: PushJob, part: Part) -> OutboundPart:
        ids = job.source_block_ids[part.block_start : part.block_end]
        if len(ids) != part.num_blocks or not all(0 <= block_id < self._memory.num_blocks for block_id in ids):
            raise refuse("source_block_ids", f"{list(ids)[:8]} of part {part.part_id} are not {part.num_blocks} ids in our pool")
        final = None if self._told is None else self._told.final(part)
        return OutboundPart(part, ids, final, is_shown=isinstance(self.first.outgoing, DeviceReadSource))

    def _choose_group(self, feed: KVReadiness, bytes_per_s: float, layer_bytes: int) -> int:
        feed.group = choose_group(self._memory.num_layers, bytes_per_s, layer_bytes)
        return feed.group

    async def _is_quiet(self, job: PushJob) -> bool:
        """Wait for progress of the prefill; return True if there was none for a while although the engine is not stuck: it makes
        steps, or the step that it is in may last so long."""
        has_moved, num_steps, now = await job.feed.changed(self._alive_s), job.num_steps(), time.monotonic()
        longest_s = job.longest_step_s()
        if has_moved or num_steps != self._num_steps_seen or longest_s == math.inf:  # paused: its time begins when it runs again
            self._moved_at = now
        if has_moved:
            return False
        is_stuck = num_steps == self._num_steps_seen and now - self._moved_at >= PATIENCE_STEPS * longest_s
        self._num_steps_seen = num_steps
        return not is_stuck
