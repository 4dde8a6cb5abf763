"""An inbound push at the receiver: the delegate that accepts it, its push token, its state, and its connections. The delegate is
told once how the push ended.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import grpc

from kvtransfer.conversion import Conversion, FP8Scales, Staging, kv_format
from kvtransfer.errors import FrameError, TransferRefused, code_number
from kvtransfer.layout import Layout, num_planes
from kvtransfer.manifest import (
    MAX_PART_BYTES,
    MAX_PULLED_BYTES,
    KVMemory,
    Manifest,
    Part,
    check_identity,
    check_layout,
    check_protocol,
    check_same_layout,
    refuse,
)
from kvtransfer.staging import StagedMemory
from kvtransfer.stream import Stream, expect, with_signs
from kvtransfer.transports.base import DeviceReadTarget, Incoming
from pdmesh.runtime.errors import MeshError
from pdmesh.v1 import common_pb2, transfer_pb2

if TYPE_CHECKING:
    from pdmesh.engine.kv_cache.streams import Mark


# Calls of the receiver to the service that owns the reservations, all of them on the event loop


@dataclass(frozen=True)
class PushTarget:
    """Describe the target of an accepted push.

    block_ids are the pool ids of all blocks of the request, in order; those before index `first_block` are pinned prefix and are
    neither sent nor written. num_tokens is the number of tokens whose KV must be in place at commit, prefix included; at most so
    many where it may_be_shorter, whole blocks.
    """

    reservation_id: str
    attempt: int
    block_ids: tuple[int, ...]
    first_block: int
    num_tokens: int
    may_be_shorter: bool = False


class ReceiverDelegate(Protocol):
    """Decide about inbound pushes: hand-offs in decode_service, blocks that were asked for in prefill_service."""

    def open_push(self, hello: transfer_pb2.TransferHello) -> PushTarget:
        """Accept a sender whose identity, layout and memory were found compatible, or raise TransferRefused.

        It must check reservation, epoch, attempt and token (`check_push_token` does).
        """

    def push_progress(self, target: PushTarget) -> bool:
        """Renew the lease; False: the target is fenced (a newer attempt, or released) and nothing more is written."""

    async def commit_push(
        self, target: PushTarget, commit: transfer_pb2.TransferCommit, *, num_bytes: int, transport: str
    ) -> None:
        """Start the sequence: the manifest is complete and verified. Raises TransferRefused."""

    def push_failed(self, target: PushTarget, reason: str) -> None:
        """Release the reservation or retry: the accepted push ended without commit or finish. Also called for fenced targets."""

    def push_finished(self, target: PushTarget) -> None:
        """Release the reservation: every choice ended with its first token."""


@dataclass(frozen=True)
class Host:
    """Hold what all pushes of a receiver share."""

    memory: KVMemory
    delegate: ReceiverDelegate
    identity: common_pb2.Identity
    layout: common_pb2.KVLayout
    fp8_scales: FP8Scales = ()  # scales of the checkpoint that all workers have; see Conversion
    num_corrupt: Counter[str] = field(default_factory=Counter)  # parts whose checksum was wrong, by transport


class InboundPush:
    """Hold the state of one push: its target, the parts that have arrived, and its connections.

    Each rank of a tensor-parallel sender sends its share of the heads, over connections of its own, with a manifest of its own.
    """

    def __init__(self, host: Host, hello: transfer_pb2.TransferHello, transport: str, idle_timeout_s: float) -> None:
        """Ask the delegate for the target. Raises MeshError."""
        self.host = host
        self.idle_timeout_s = idle_timeout_s
        self.target = host.delegate.open_push(hello)
        self.hello = hello
        self.transport = transport
        self.connections: set[InboundConnection] = set()
        self.ended = False  # whether the delegate was told how the push ended
        self.silence: asyncio.Timeout | None = None  # ends the first connection unless any connection makes progress
        self._delegate = host.delegate
        memory = host.memory
        if not all(0 <= block_id < memory.num_blocks for block_id in self.target.block_ids):
            # This is a bug of our own service; it must not lead to a write.
            self.fail("it was granted blocks outside the pool")
            raise TransferRefused(grpc.StatusCode.INTERNAL, f"{self.target.reservation_id} was granted blocks outside the pool")
        # The mark follows every step that may still write to blocks freed during that step (pdmesh/engine/runner/overlap.py).
        self._begin = memory.marks.now() if isinstance(memory, StagedMemory) else None
        self.converting = asyncio.Lock()  # one conversion at a time reads blocks, changes them and writes them back
        self._first_token = self.target.first_block * host.layout.block_size
        self._manifests: dict[int, Manifest] = {}

    def manifest(self, layout: Layout) -> Manifest:
        """Return the manifest of the sender's rank with this layout; it counts blocks of the sender."""
        rank = layout.tensor_parallel_rank
        if rank not in self._manifests:
            first_block, num_blocks = self._first_token // layout.block_size, -(-self.target.num_tokens // layout.block_size)
            num_bytes = kv_format(self.host.identity, layout).num_bytes
            self._manifests[rank] = Manifest(self.host.memory.num_layers, first_block, num_blocks, num_bytes)
        return self._manifests[rank]

    def conversion(self, layout: Layout) -> Conversion | None:
        """Return the conversion of the sender's KV into our layout; None where the layouts are equal."""
        ours, num_heads = Layout.of(self.host.layout), self.host.identity.num_kv_heads
        source, target = kv_format(self.host.identity, layout), kv_format(self.host.identity, ours)
        heads = layout.heads(num_heads), ours.heads(num_heads)
        if (source, heads[0]) == (target, heads[1]):
            return None
        return Conversion(source, heads[0], target, heads[1], self.host.fp8_scales)

    async def convert(self, conversion: Conversion | None, staging: Staging, part: Part, stream: Stream) -> None:
        """Write a verified part into the pool in our layout; without a conversion only where the pool is staged."""
        memory, block_ids = self.host.memory, self.target.block_ids
        async with self.converting:
            self.check_fence()
            if isinstance(memory, StagedMemory):
                await memory.place(staging, part, conversion, block_ids, self._first_token, self.begin, stream)
                return
            assert conversion is not None, "without one a part is written where it belongs as it arrives"
            await stream.run(conversion.write, staging, part, memory, block_ids, self._first_token, stream.check_interrupted)

    @property
    def begin(self) -> Mark:
        """Return the mark after which a device may write; only for a staged pool."""
        assert self._begin is not None, "it has been marked when the push was accepted"
        return self._begin

    def check_join(self, hello: transfer_pb2.TransferHello) -> None:
        """Check that this connection belongs to the push: it must repeat the first hello and its token. Raises
        TransferRefused."""
        if not hmac.compare_digest(hello.token, self.hello.token):
            raise TransferRefused(grpc.StatusCode.PERMISSION_DENIED, "it is not the one of this push", field="token")
        ours = (self.hello.reservation_id, self.hello.epoch, self.hello.attempt)
        same_form = replace(Layout.of(hello.layout), tensor_parallel_rank=0) == replace(
            Layout.of(self.hello.layout), tensor_parallel_rank=0
        )
        if (hello.reservation_id, hello.epoch, hello.attempt) != ours or not same_form or self.ended:
            raise TransferRefused(grpc.StatusCode.ABORTED, "the push has another target, or has ended", field="push_id")

    def check_fence(self) -> None:
        """Raise TransferRefused when nothing more may be written; renew the lease."""
        if self.silence is not None and not self.silence.expired():
            self.silence.reschedule(asyncio.get_running_loop().time() + self.idle_timeout_s)
        if not self._delegate.push_progress(self.target):
            raise TransferRefused(grpc.StatusCode.ABORTED, f"{self.target.attempt} was replaced or released", field="attempt")

    async def commit(self, commit: transfer_pb2.TransferCommit) -> None:
        """Check the manifests and start the sequence. Raises MeshError."""
        self.check_fence()
        manifests = [self.manifest(layout) for layout in self._layouts_needed()]
        num_parts = sum(manifest.num_parts for manifest in manifests)
        if commit.num_parts != num_parts:
            raise refuse("commit.num_parts", f"{commit.num_parts}, but {num_parts} have arrived")
        num_tokens, block_size = self._tokens_expected(commit), self.hello.layout.block_size
        for manifest in manifests:
            manifest.check_complete(commit, num_tokens, -(-num_tokens // block_size))
        num_bytes = sum(manifest.num_bytes for manifest in manifests)
        await self._delegate.commit_push(self.target, commit, num_bytes=num_bytes, transport=self.transport)
        self.ended = True

    def _tokens_expected(self, commit: transfer_pb2.TransferCommit) -> int:
        """Return the number of tokens that a right commit is for."""
        target, block_size = self.target, self.host.layout.block_size
        is_beginning = self._first_token < commit.num_tokens < target.num_tokens and not commit.num_tokens % block_size
        return commit.num_tokens if target.may_be_shorter and is_beginning else target.num_tokens

    def _layouts_needed(self) -> list[Layout]:
        """Return the layouts of all ranks of the sender that hold any of our heads."""
        layout, num_heads = Layout.of(self.hello.layout), self.host.identity.num_kv_heads
        ranks = layout.ranks_with(Layout.of(self.host.layout).heads(num_heads), num_heads)
        return [replace(layout, tensor_parallel_rank=rank) for rank in ranks]

    def abort(self, abort: transfer_pb2.TransferAbort) -> None:
        """End the push without a commit, as the sender asked."""
        if not abort.finished:
            self.fail(f"the sender gave up: {abort.reason}")
            return
        self.ended = True
        self._delegate.push_finished(self.target)

    def fail(self, reason: str) -> None:
        """Report the failure to the delegate, once for all connections."""
        if self.ended:
            return
        self.ended = True
        self._delegate.push_failed(self.target, reason)
        self.interrupt()

    def interrupt(self) -> None:
        """End every connection as soon as its thread has left the part."""
        for connection in self.connections:
            connection.interrupt()

    async def quiesce(self) -> None:
        """Return when no connection is inside a part. A connection that is not writing goes on to its next part."""
        await asyncio.gather(*(connection.quiesce() for connection in self.connections))


# A connection of a push at the receiver: hello, parts, then commit or abort. Every exit closes it and ends its push.
#
# A connection may write when `_write_part` has asked the delegate on the event loop and, in the same turn of the loop, has marked
# the connection as writing; from then on `quiesce` interrupts it and waits until its thread has left. So once the delegate has
# fenced a target and quiesce has returned, no byte is written into its blocks.


HANDSHAKE_TIMEOUT_S = 2.0
LINGER_S = 1.0
ALIVE_S = 0.5  # between two signs of life while the engine makes the sender wait
PROGRESS_BYTES = 256 << 10  # within a part: a peer must send this much to renew its lease

logger = logging.getLogger(__name__)


class InboundConnection:
    """Serve one connection of a sender over the transport named `transport`."""

    def __init__(self, host: Host, incoming: Incoming, transport: str) -> None:
        self.transport = transport
        self.session: InboundPush | None = None
        self._host = host
        self._incoming = incoming
        self._is_first = True
        self._layout = Layout.of(host.layout)  # the sender's, from hello on
        self._conversion: Conversion | None = None
        self._is_answered = False  # whether hello was answered
        self._writer_out = asyncio.Event()
        self._writer_out.set()
        self._unreported_bytes = 0

    @property
    def stream(self) -> Stream:
        return self._incoming.stream

    def interrupt(self) -> None:
        """End the connection as soon as its thread has left the part."""
        self.stream.interrupt()

    async def quiesce(self) -> None:
        """Interrupt a writer inside a part and wait until it has left."""
        if not self._writer_out.is_set():
            self.interrupt()
            await self._writer_out.wait()

    async def hello(self) -> transfer_pb2.TransferHello | None:
        """Read and check the hello, except for the delegate's decision; return None when the hello is rejected or malformed."""
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                hello = await self._incoming.receive_hello()
            check_protocol(hello.protocol_version)
            check_identity(self._host.identity, hello.identity)
            check_layout(self._host.identity, self._host.layout, hello.layout)
            if isinstance(self._incoming, DeviceReadTarget):
                check_same_layout(self._host.layout, hello.layout)
            await self._incoming.prepare(hello)
            return hello
        except MeshError as refusal:
            await self.refuse(refusal)
        except (OSError, FrameError) as error:
            self._log_broken(error)
        return None

    def attach(self, push: InboundPush, hello: transfer_pb2.TransferHello) -> None:
        """Attach the connection to `push`."""
        self.session, self._is_first = push, hello.connection == 0
        self._layout = Layout.of(hello.layout)
        self._conversion = push.conversion(self._layout)
        push.connections.add(self)

    async def exchange(self) -> None:
        """Serve the connection from the reply to hello to the end. Raises nothing but CancelledError."""
        push = self._push
        try:
            await self._reply_hello(grpc.StatusCode.OK, "")
            while await self._handle(await self._next_message(push)):
                pass
            await self.stream.linger(LINGER_S)
        except MeshError as refusal:
            push.connections.discard(self)  # `fail` must not interrupt it: the sender reads the reason on it
            push.fail(str(refusal))
            await self.refuse(refusal)
        except (OSError, FrameError) as error:
            if not push.ended:
                self._log_broken(error)
            push.fail(_reason(error))

    def close(self) -> None:
        """Close everything and report the end of the push, unless it is reported. The thread of the connection has ended by
        now."""
        if self.session is not None:
            self.session.connections.discard(self)
            self.session.fail("the receiver ended the session")
            if self._is_first:
                self.session.interrupt()
        self._incoming.close()
        self.stream.close()

    @property
    def _push(self) -> InboundPush:
        if self.session is None:
            raise refuse("hello", "it must come first")
        return self.session

    async def _next_message(self, push: InboundPush) -> transfer_pb2.TransferMessage:
        """Return the next frame. Raises TimeoutError on the first connection of a silent push, which ends the push; other
        connections wait for parts as long as the push lives."""
        if not self._is_first:
            return await self.stream.read_message(forever=True)
        try:
            async with asyncio.timeout(push.idle_timeout_s) as push.silence:
                return await self.stream.read_message(forever=True)
        finally:
            push.silence = None

    async def _handle(self, message: transfer_pb2.TransferMessage) -> bool:
        """Handle one frame; return False when it was the last."""
        match message.WhichOneof("message"):
            case "part":
                await self._part(message.part)
                return True
            case "alive":
                self._check_fence()
                return True
            case "commit" if self._is_first:
                await with_signs(self._push.commit(message.commit), self._say_alive, ALIVE_S)
                reply = transfer_pb2.TransferReply(code=code_number(grpc.StatusCode.OK))
                await self.stream.write_message(transfer_pb2.TransferMessage(commit_reply=reply))
            case "abort" if self._is_first:
                self._push.abort(message.abort)
            case kind:
                raise FrameError(f"a sender does not send {kind} here")
        return False

    async def _say_alive(self) -> None:
        """Tell the sender, if it listens, that the event loop runs: the engine may have to end a step before it commits."""
        if self._push.hello.reads_alive:
            with suppress(OSError):  # the commit goes on without its sender
                await self.stream.write_message(transfer_pb2.TransferMessage(alive=transfer_pb2.TransferAlive()))

    async def _part(self, header: transfer_pb2.PartHeader) -> None:
        manifest = self._push.manifest(self._layout)
        pulls = isinstance(self._incoming, DeviceReadTarget)
        part = manifest.check(header, MAX_PULLED_BYTES if pulls else MAX_PART_BYTES)
        manifest.begin(part)
        try:
            total, expected = await self._write_part(header, part, self._push)
        finally:
            manifest.end(part)
        ok = total == expected
        if ok:
            manifest.accept(part, num_bytes=header.num_bytes)
        else:
            logger.warning("part %d of %s arrived corrupt over %s", part.part_id, self._where(), self.transport)
            self._host.num_corrupt[self.transport] += 1
            manifest.reject(part)
        message = "" if ok else f"part_end: it says {expected:#010x}, what arrived has {total:#010x}"
        reply = transfer_pb2.PartReply(part_id=header.part_id, ok=ok, message=message)
        await self.stream.write_message(transfer_pb2.TransferMessage(part_reply=reply))

    async def _write_part(self, header: transfer_pb2.PartHeader, part: Part, push: InboundPush) -> tuple[int, int]:
        """Return the checksum of the bytes that arrived, and the sender's."""
        self._check_fence()
        self._writer_out.clear()  # no await since the check above: quiesce waits for this writer from here on
        try:
            if isinstance(self._incoming, DeviceReadTarget):
                return await self._pull_part(header, part, push, self._incoming)
            if self._conversion is not None or isinstance(self._host.memory, StagedMemory):
                return await self._stage_part(header, part, push, self._conversion)
            block_ids = push.target.block_ids[part.block_start : part.block_end]
            crc32c = await self._incoming.receive_part(header, part, self._host.memory, block_ids, self._count_bytes)
            return crc32c, (await self._part_end(header)).crc32c
        finally:
            self._writer_out.set()

    async def _stage_part(
        self, header: transfer_pb2.PartHeader, part: Part, push: InboundPush, conversion: Conversion | None
    ) -> tuple[int, int]:
        num_bytes = kv_format(self._host.identity, self._layout).num_bytes
        staging = Staging(part, num_bytes, num_planes(self._layout.arrangement))
        crc32c = await self._incoming.receive_part(header, staging.part, staging, staging.block_ids, self._count_bytes)
        expected = (await self._part_end(header)).crc32c
        if crc32c == expected:
            await push.convert(conversion, staging, part, self.stream)
        return crc32c, expected

    async def _pull_part(
        self, header: transfer_pb2.PartHeader, part: Part, push: InboundPush, incoming: DeviceReadTarget
    ) -> tuple[int, int]:
        """Have the device read the part; until the device has finished, this connection counts as writing."""
        block_ids = push.target.block_ids[part.block_start : part.block_end]
        total = await incoming.pull_part(header, part, block_ids, push.begin)
        return total, (await self._part_end(header)).word_sum

    async def _part_end(self, header: transfer_pb2.PartHeader) -> transfer_pb2.PartEnd:
        end = (await expect(self.stream, "part_end")).part_end
        if end.part_id != header.part_id:
            raise FrameError(f"part_end.part_id: part {header.part_id} ended as {end.part_id}")
        return end

    def _count_bytes(self, num_bytes: int) -> None:
        self._unreported_bytes += num_bytes
        if self._unreported_bytes >= PROGRESS_BYTES:
            self._check_fence()

    def _check_fence(self) -> None:
        self._unreported_bytes = 0
        self.stream.check_interrupted()
        self._push.check_fence()

    async def refuse(self, refusal: MeshError) -> None:
        """Send the refusal to the sender, as the reply to hello or later as the answer to the commit, and wait until the sender
        has read it."""
        logger.warning("refused a push into %s over %s: %s", self._where(), self.transport, refusal)
        try:
            if not self._is_answered:
                await self._reply_hello(refusal.code, refusal.message)
            else:
                reply = transfer_pb2.TransferReply(code=code_number(refusal.code), message=refusal.message)
                await self.stream.write_message(transfer_pb2.TransferMessage(commit_reply=reply))
            await self.stream.linger(LINGER_S)
        except OSError as error:
            logger.info("the refused sender did not wait for the answer: %s", _reason(error))

    async def _reply_hello(self, code: grpc.StatusCode, message: str) -> None:
        reply = transfer_pb2.TransferReply(code=code_number(code), message=message)
        await self.stream.write_message(transfer_pb2.TransferMessage(hello_reply=reply))
        self._is_answered = True

    def _log_broken(self, error: Exception) -> None:
        logger.warning("closed a %s connection for %s: %s", self.transport, self._where(), _reason(error))

    def _where(self) -> str:
        return self.session.target.reservation_id if self.session else "an unknown reservation"


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "the peer did not send or take anything in time"
    return str(error) or type(error).__name__
