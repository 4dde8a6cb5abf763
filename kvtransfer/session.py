"""One connection at the receiver: hello, parts, then commit or abort. Every way out closes it and tells the delegate.

Who may write: `_write_part` asks the delegate on the event loop and, in the same turn of the loop, marks the session as writing;
from then on `quiesce` interrupts it and waits until its thread is out. So once the delegate has fenced a target and quiesce has
returned, no byte goes into its blocks.
"""

import asyncio
import logging
from dataclasses import dataclass

import grpc

from kvtransfer.compatibility import check_identity, check_layout, check_protocol, refuse
from kvtransfer.delegate import PushTarget, ReceiverDelegate
from kvtransfer.errors import FrameError, TransferRefused, code_number
from kvtransfer.memory import KVMemory
from kvtransfer.parts import Manifest, Part
from kvtransfer.stream import Stream
from kvtransfer.transports.base import Incoming
from protos.v1 import common_pb2, transfer_pb2
from runtime.errors import MeshError

HANDSHAKE_TIMEOUT_S = 2.0
LINGER_S = 1.0
PROGRESS_BYTES = 256 << 10  # within a part: a peer must send so much in a lease to keep it

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Host:
    """What all sessions of a receiver share."""

    memory: KVMemory
    delegate: ReceiverDelegate
    identity: common_pb2.Identity
    layout: common_pb2.KVLayout


class Session:
    """One sender's connection over the transport named `transport`."""

    def __init__(self, host: Host, incoming: Incoming, transport: str) -> None:
        self.target: PushTarget | None = None
        self.transport = transport
        self._host = host
        self._incoming = incoming
        self._delegate = host.delegate
        self._manifest: Manifest | None = None
        self._ended = False  # the delegate knows how it ended
        self._writer_out = asyncio.Event()
        self._writer_out.set()
        self._unreported_bytes = 0

    @property
    def stream(self) -> Stream:
        return self._incoming.stream

    def interrupt(self) -> None:
        """End the session as soon as its thread is out."""
        self.stream.interrupt()

    async def quiesce(self) -> None:
        """Interrupt a writer inside a part and wait until it is out. A session that is not writing goes on to its next part."""
        if not self._writer_out.is_set():
            self.interrupt()
            await self._writer_out.wait()

    async def hello(self) -> transfer_pb2.TransferHello | None:
        """Read and check the opening up to, but without, the delegate's word; None: refused or garbage, and closed."""
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                hello = await self._incoming.receive_hello()
            check_protocol(hello.protocol_version)
            check_identity(self._host.identity, hello.identity)
            check_layout(self._host.layout, hello.layout)
            return hello
        except MeshError as refusal:
            await self.refuse(refusal)
        except (OSError, FrameError) as error:
            self._log_broken(error)
        return None

    def open(self, hello: transfer_pb2.TransferHello) -> None:
        """Ask the delegate for the target. Raises MeshError."""
        target, memory = self._delegate.open_push(hello), self._host.memory
        self.target = target
        if not all(0 <= block_id < memory.num_blocks for block_id in target.block_ids):
            # a bug of our own service; it must not become a write
            raise TransferRefused(grpc.StatusCode.INTERNAL, f"{target.reservation_id} was granted blocks outside the pool")
        self._manifest = Manifest(memory.num_layers, target.first_block, len(target.block_ids), memory.bytes_per_layer_block)

    async def exchange(self) -> None:
        """From the reply to hello up to the end. Never raises but CancelledError."""
        try:
            await self._reply_hello(grpc.StatusCode.OK, "")
            while await self._handle(await self.stream.read_message()):
                pass
            await self.stream.linger(LINGER_S)
        except MeshError as refusal:
            self._fail(str(refusal))
            await self.refuse(refusal)
        except (OSError, FrameError) as error:
            self._log_broken(error)
            self._fail(_reason(error))

    def close(self) -> None:
        """Close everything and report an end that nobody has reported. The thread of the session is out by now."""
        self._fail("the receiver ended the session")
        self._incoming.close()
        self.stream.close()

    async def _handle(self, message: transfer_pb2.TransferMessage) -> bool:
        """Act on one frame; False when it was the last."""
        match message.WhichOneof("message"):
            case "part":
                await self._part(message.part)
                return True
            case "commit":
                await self._commit(message.commit)
            case "abort":
                self._abort(message.abort)
            case kind:
                raise FrameError(f"a sender does not send {kind} here")
        return False

    async def _part(self, header: transfer_pb2.PartHeader) -> None:
        target, manifest = self._opened()
        part = manifest.check(header)
        crc32c = await self._write_part(header, part, target)
        ok = crc32c == header.crc32c
        if ok:
            manifest.accept(part, num_bytes=header.num_bytes)
        else:
            logger.warning("part %d of %s arrived corrupt over %s", part.part_id, target.reservation_id, self.transport)
            manifest.reject(part)
        message = "" if ok else f"part.crc32c: the header says {header.crc32c:#010x}, what arrived has {crc32c:#010x}"
        reply = transfer_pb2.PartReply(part_id=header.part_id, ok=ok, message=message)
        await self.stream.write_message(transfer_pb2.TransferMessage(part_reply=reply))

    async def _write_part(self, header: transfer_pb2.PartHeader, part: Part, target: PushTarget) -> int:
        self._check_fence()
        self._writer_out.clear()  # no await between the question and this: quiesce sees us from here on
        try:
            block_ids = target.block_ids[part.block_start : part.block_end]
            return await self._incoming.receive_part(header, part, block_ids, self._count_bytes)
        finally:
            self._writer_out.set()

    def _count_bytes(self, num_bytes: int) -> None:
        self._unreported_bytes += num_bytes
        if self._unreported_bytes >= PROGRESS_BYTES:
            self._check_fence()

    def _check_fence(self) -> None:
        target, _ = self._opened()
        self._unreported_bytes = 0
        self.stream.check_interrupted()
        if not self._delegate.push_progress(target):
            raise TransferRefused(grpc.StatusCode.ABORTED, f"{target.attempt} was replaced or released", field="attempt")

    async def _commit(self, commit: transfer_pb2.TransferCommit) -> None:
        target, manifest = self._opened()
        self._check_fence()
        manifest.check_complete(commit, target.num_tokens)
        await self._delegate.commit_push(target, commit, num_bytes=manifest.num_bytes, transport=self.transport)
        self._ended = True
        reply = transfer_pb2.TransferReply(code=code_number(grpc.StatusCode.OK))
        await self.stream.write_message(transfer_pb2.TransferMessage(commit_reply=reply))

    def _abort(self, abort: transfer_pb2.TransferAbort) -> None:
        target, _ = self._opened()
        if not abort.finished:
            self._fail(f"the sender gave up: {abort.reason}")
            return
        self._ended = True
        self._delegate.push_finished(target)

    def _opened(self) -> tuple[PushTarget, Manifest]:
        if self.target is None or self._manifest is None:
            raise refuse("hello", "it must come first")
        return self.target, self._manifest

    def _fail(self, reason: str) -> None:
        if self.target is not None and not self._ended:
            self._ended = True
            self._delegate.push_failed(self.target, reason)

    async def refuse(self, refusal: MeshError) -> None:
        """Tell the sender why, as the reply to hello or later as the verdict of the commit, and wait until it has read it."""
        logger.warning("refused a push into %s over %s: %s", self._where(), self.transport, refusal)
        try:
            if self._manifest is None:
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

    def _log_broken(self, error: Exception) -> None:
        logger.warning("closed a %s connection for %s: %s", self.transport, self._where(), _reason(error))

    def _where(self) -> str:
        return self.target.reservation_id if self.target else "an unknown reservation"


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "the peer did not send or take anything in time"
    return str(error) or type(error).__name__
