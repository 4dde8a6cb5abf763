"""One connection at the sender: hello, parts with a window of unanswered ones, then commit or abort."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import grpc

from kvtransfer.checksum import checksum
from kvtransfer.errors import FrameError, PeerClosed, TransportUnavailable, code_of, push_failed
from kvtransfer.memory import KVMemory, part_views
from kvtransfer.parts import Part, PartPlan
from kvtransfer.stream import Stream, expect, release
from kvtransfer.transports.base import Outgoing
from protos.v1 import transfer_pb2
from runtime import failpoints

MAX_UNANSWERED = 4  # parts under way: the receiver always has one to work on
LAST_WORD_S = 0.2  # for a refusal that may lie unread on a broken connection


class OutgoingSession:
    """Speaks the protocol over `outgoing`. PushFailed: the receiver refused. OSError, FrameError: the connection is broken."""

    def __init__(self, outgoing: Outgoing, memory: KVMemory, transport: str) -> None:
        self.transport = transport
        self.outgoing = outgoing
        self._memory = memory
        self._unanswered: dict[int, Part] = {}
        self._sent_again: set[int] = set()

    @property
    def stream(self) -> Stream:
        return self.outgoing.stream

    async def hello(self, hello: transfer_pb2.TransferHello) -> None:
        """Open the session. Raises TransportUnavailable if the receiver cannot use this transport, or closed unanswered."""
        try:
            await self.outgoing.send_hello(hello)
            reply = (await expect(self.stream, "hello_reply")).hello_reply
        except ConnectionError as error:
            raise TransportUnavailable(f"{self.transport}: the receiver closed the connection at hello") from error
        if code_of(reply.code) is grpc.StatusCode.UNIMPLEMENTED:
            raise TransportUnavailable(f"{self.transport}: {reply.message}")
        _check_reply(reply)

    async def send_parts(self, plan: PartPlan, block_ids: Sequence[int]) -> int:
        """Send all parts out of `block_ids` (the whole request's) and wait until each is verified. Returns their bytes."""
        num_bytes = 0
        try:
            for part in plan.parts:
                await failpoints.hit_async("push.part")
                await self._settle(MAX_UNANSWERED - 1, block_ids)
                num_bytes += await self._send(part, block_ids)
            await self._settle(0, block_ids)
        except ConnectionError:
            await self._raise_last_word()
            raise
        return num_bytes

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

    async def _send(self, part: Part, block_ids: Sequence[int]) -> int:
        ids = block_ids[part.block_start : part.block_end]
        views = part_views(self._memory, part.layers, ids)
        try:
            header = transfer_pb2.PartHeader(
                part_id=part.part_id,
                layer_start=part.layer_start,
                layer_end=part.layer_end,
                block_start=part.block_start,
                block_end=part.block_end,
                num_bytes=part.num_bytes(self._memory.bytes_per_layer_block),
                crc32c=await self.stream.run(checksum, views),
            )
            self._unanswered[part.part_id] = part
            await self.outgoing.send_part(header, views, ids)
            return header.num_bytes
        finally:
            release(views)

    async def _settle(self, max_unanswered: int, block_ids: Sequence[int]) -> None:
        """Take answers until at most so many are missing; a corrupt part is sent again, once."""
        while len(self._unanswered) > max_unanswered:
            reply = await self._next_reply()
            part = self._unanswered.pop(reply.part_id, None)
            if part is None:
                raise FrameError(f"the receiver answered part {reply.part_id}, which it was not sent")
            if reply.ok:
                continue
            if part.part_id in self._sent_again:
                raise push_failed(grpc.StatusCode.DATA_LOSS, f"part {part.part_id} arrived corrupt twice: {reply.message}")
            self._sent_again.add(part.part_id)
            await self._send(part, block_ids)

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

    async def _raise_last_word(self) -> None:
        """The receiver may have said why before it closed: that is worth more than a broken pipe."""
        with suppress(OSError, FrameError):
            async with asyncio.timeout(LAST_WORD_S):
                while True:
                    await self._next_reply()


def _check_reply(reply: transfer_pb2.TransferReply) -> None:
    code = code_of(reply.code)
    if code is not grpc.StatusCode.OK:
        raise push_failed(code, reply.message)
