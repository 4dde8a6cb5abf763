"""A push at the sender: one connection or several, each with a window of unanswered parts; then commit or abort on the first."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import TypeVar

import grpc

from kvtransfer.errors import FrameError, PeerClosed, PushFailed, TransportUnavailable, code_of, push_failed
from kvtransfer.memory import KVMemory, part_views
from kvtransfer.parts import Part
from kvtransfer.stream import Stream, expect, release
from kvtransfer.transports.base import Outgoing
from protos.v1 import transfer_pb2
from runtime import failpoints

MAX_UNANSWERED = 4  # parts under way on a connection: the receiver always has one to work on
LAST_WORD_S = 0.2  # for a refusal that may lie unread on a broken connection

T = TypeVar("T")


class SignOfLife:
    """Goes to a connection in place of a part."""


Parts = asyncio.Queue[Part | SignOfLife | None]


class OutgoingConnection:
    """Speaks the protocol over `outgoing`. PushFailed: the receiver refused. OSError, FrameError: the connection is broken."""

    def __init__(self, outgoing: Outgoing, memory: KVMemory, transport: str) -> None:
        self.transport = transport
        self.outgoing = outgoing
        self.num_bytes = 0  # verified by the receiver
        self.busy_s = 0.0  # while something was under way
        self._memory = memory
        self._unanswered: dict[int, Part] = {}
        self._sent_again: set[int] = set()
        self._busy_since = 0.0
        self._writing = asyncio.Lock()  # a part's bytes follow its header, whoever sends it
        self._answered = asyncio.Event()
        self._news = asyncio.Event()
        self._all_sent = False

    @property
    def stream(self) -> Stream:
        return self.outgoing.stream

    async def hello(self, hello: transfer_pb2.TransferHello) -> None:
        """Open it. Raises TransportUnavailable if the receiver cannot use this transport, or closed unanswered."""
        try:
            await self.outgoing.send_hello(hello)
            reply = (await expect(self.stream, "hello_reply")).hello_reply
        except ConnectionError as error:
            raise TransportUnavailable(f"{self.transport}: the receiver closed the connection at hello: {error}") from error
        if code_of(reply.code) is grpc.StatusCode.UNIMPLEMENTED:
            raise TransportUnavailable(f"{self.transport}: {reply.message}")
        _check_reply(reply)

    async def pump(self, parts: Parts, block_ids: Sequence[int]) -> None:
        """Send what comes out of `parts`, out of `block_ids` (the whole request's), until None; returns when all is verified."""
        await all_or_first_error(self._send_from(parts, block_ids), self._take_answers(block_ids))

    async def keep_alive(self) -> None:
        """Nothing to send yet, but the prefill goes on."""
        await self.stream.write_message(transfer_pb2.TransferMessage(alive=transfer_pb2.TransferAlive()))

    async def commit(self, num_parts: int, num_tokens: int, choices: Sequence[transfer_pb2.CommittedChoice]) -> None:
        """Close the manifest; returns when the receiver has started the sequence."""
        commit = transfer_pb2.TransferCommit(num_parts=num_parts, num_tokens=num_tokens, choices=choices)
        await self.stream.write_message(transfer_pb2.TransferMessage(commit=commit))
        _check_reply((await expect(self.stream, "commit_reply")).commit_reply)

    async def abort(self, *, finished: bool, reason: str) -> None:
        """End the attempt; returns when the receiver, having acted on it, closes the connection."""
        abort = transfer_pb2.TransferAbort(finished=finished, reason=reason)
        await self.stream.write_message(transfer_pb2.TransferMessage(abort=abort))
        with suppress(PeerClosed):
            _check_reply((await expect(self.stream, "commit_reply")).commit_reply)

    async def _send_from(self, parts: Parts, block_ids: Sequence[int]) -> None:
        while (part := await parts.get()) is not None:
            if isinstance(part, SignOfLife):
                async with self._writing:
                    await self.keep_alive()
                continue
            await failpoints.hit_async("push.part")
            await self._until_unanswered(MAX_UNANSWERED - 1)
            async with self._writing:
                await self._send(part, block_ids)
        await self._until_unanswered(0)
        self._all_sent = True
        self._news.set()

    async def _until_unanswered(self, num_parts: int) -> None:
        while len(self._unanswered) > num_parts:
            self._answered.clear()
            await self._answered.wait()

    async def _take_answers(self, block_ids: Sequence[int]) -> None:
        """A corrupt part is sent again, once."""
        while not self._all_sent:
            if not self._unanswered:
                self._news.clear()
                await self._news.wait()
                continue
            await self._take_answer(await self._next_reply(), block_ids)
            self._answered.set()

    async def _take_answer(self, reply: transfer_pb2.PartReply, block_ids: Sequence[int]) -> None:
        part = self._unanswered.pop(reply.part_id, None)
        if part is None:
            raise FrameError(f"the receiver answered part {reply.part_id}, which it was not sent")
        if not self._unanswered:
            self.busy_s += time.monotonic() - self._busy_since
        if reply.ok:
            self.num_bytes += part.num_bytes(self._memory.bytes_per_layer_block)
            return
        if part.part_id in self._sent_again:
            raise push_failed(grpc.StatusCode.DATA_LOSS, f"part {part.part_id} arrived corrupt twice: {reply.message}")
        self._sent_again.add(part.part_id)
        self._unanswered[part.part_id] = part  # it still is: nobody may take the push for complete meanwhile
        async with self._writing:
            await self._send(part, block_ids)

    async def _send(self, part: Part, block_ids: Sequence[int]) -> None:
        ids = block_ids[part.block_start : part.block_end]
        views = part_views(self._memory, part.layers, ids)
        if not self._unanswered:
            self._busy_since = time.monotonic()
        try:
            header = transfer_pb2.PartHeader(
                part_id=part.part_id,
                layer_start=part.layer_start,
                layer_end=part.layer_end,
                block_start=part.block_start,
                block_end=part.block_end,
                num_bytes=part.num_bytes(self._memory.bytes_per_layer_block),
            )
            self._unanswered[part.part_id] = part
            self._news.set()  # a refusal may come before the last byte is sent
            crc32c = await self.outgoing.send_part(header, views, ids)
            end = transfer_pb2.PartEnd(part_id=part.part_id, crc32c=crc32c)
            await self.stream.write_message(transfer_pb2.TransferMessage(part_end=end))
        finally:
            release(views)

    async def _next_reply(self) -> transfer_pb2.PartReply:
        message = await self.stream.read_message()
        match message.WhichOneof("message"):
            case "part_reply":
                return message.part_reply
            case "commit_reply":
                _check_reply(message.commit_reply)
            case "abort":
                raise push_failed(grpc.StatusCode.ABORTED, f"the receiver ended the attempt: {message.abort.reason}")
        raise FrameError(f"expected part_reply, got {message.WhichOneof('message')}")


async def all_or_first_error(*work: Coroutine[object, object, T]) -> list[T]:
    """All results; or an error, once the others are cancelled and have ended. When a connection breaks the others get a
    moment: the receiver may have said to one of them why, and that is worth more than a broken pipe."""
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


def _check_reply(reply: transfer_pb2.TransferReply) -> None:
    code = code_of(reply.code)
    if code is not grpc.StatusCode.OK:
        raise push_failed(code, reply.message)
