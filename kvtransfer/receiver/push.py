"""A push at the receiver: what it may fill, what has come of it, and how it ends. The delegate is told of its end once.

Its connections are `incoming_connection.py`'s, which says who may write, and when.
"""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import grpc

from kvtransfer.compatibility import refuse
from kvtransfer.conversion import Conversion, FP8Scales, Staging, kv_format
from kvtransfer.errors import TransferRefused
from kvtransfer.layout import Layout
from kvtransfer.manifest import Manifest, Part
from kvtransfer.memory import KVMemory
from kvtransfer.receiver.delegate import ReceiverDelegate
from kvtransfer.staging import StagedMemory
from kvtransfer.stream import Stream
from pdmesh.v1 import common_pb2, transfer_pb2

if TYPE_CHECKING:
    from kvtransfer.receiver.incoming_connection import IncomingConnection
    from pdmesh.engine.kv_cache.streams import Mark


@dataclass(frozen=True)
class Host:
    """What all sessions of a receiver share."""

    memory: KVMemory
    delegate: ReceiverDelegate
    identity: common_pb2.Identity
    layout: common_pb2.KVLayout
    fp8_scales: FP8Scales = ()  # of the checkpoint, which is ours and every sender's; see Conversion
    num_corrupt: Counter[str] = field(default_factory=Counter)  # parts whose checksum was wrong, by transport


class Session:
    """One push: what it may fill, what has come, and the connections that bring it.

    Each rank of a tensor-parallel sender brings its share of the heads, over connections of its own, with a manifest of its own.
    """

    def __init__(self, host: Host, hello: transfer_pb2.TransferHello, transport: str, idle_timeout_s: float) -> None:
        """Asks the delegate for the target. Raises MeshError."""
        self.host = host
        self.idle_timeout_s = idle_timeout_s
        self.target = host.delegate.open_push(hello)
        self.hello = hello
        self.transport = transport
        self.connections: set[IncomingConnection] = set()
        self.ended = False  # the delegate knows how it ended
        self.silence: asyncio.Timeout | None = None  # that ends the first connection, unless any of them makes progress
        self._delegate = host.delegate
        memory = host.memory
        if not all(0 <= block_id < memory.num_blocks for block_id in self.target.block_ids):
            # a bug of our own service; it must not become a write
            self.fail("it was granted blocks outside the pool")
            raise TransferRefused(grpc.StatusCode.INTERNAL, f"{self.target.reservation_id} was granted blocks outside the pool")
        # Behind every step that may still write to blocks given away under it (engine/ahead.py).
        self._begin = memory.marks.now() if isinstance(memory, StagedMemory) else None
        self.converting = asyncio.Lock()  # blocks are read, changed and written back by one at a time
        self._first_token = self.target.first_block * host.layout.block_size
        self._manifests: dict[int, Manifest] = {}

    def manifest(self, layout: Layout) -> Manifest:
        """Of the sender's rank that has this layout, in blocks of the sender."""
        rank = layout.tensor_parallel_rank
        if rank not in self._manifests:
            first_block, num_blocks = self._first_token // layout.block_size, -(-self.target.num_tokens // layout.block_size)
            num_bytes = kv_format(self.host.identity, layout).num_bytes
            self._manifests[rank] = Manifest(self.host.memory.num_layers, first_block, num_blocks, num_bytes)
        return self._manifests[rank]

    def conversion(self, layout: Layout) -> Conversion | None:
        """What it takes to make ours of the sender's KV; None where it lies as ours does."""
        ours, num_heads = Layout.of(self.host.layout), self.host.identity.num_kv_heads
        source, target = kv_format(self.host.identity, layout), kv_format(self.host.identity, ours)
        heads = layout.heads(num_heads), ours.heads(num_heads)
        if (source, heads[0]) == (target, heads[1]):
            return None
        return Conversion(source, heads[0], target, heads[1], self.host.fp8_scales)

    async def convert(self, conversion: Conversion | None, staging: Staging, part: Part, stream: Stream) -> None:
        """Write a verified part into the pool in our form; None: it has it."""
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
        """Behind which a device may write. Of a staged pool."""
        assert self._begin is not None, "it has been marked when the push was accepted"
        return self._begin

    def check_join(self, hello: transfer_pb2.TransferHello) -> None:
        """May this connection be one of ours? Raises TransferRefused. It says the same as the first one, and knows the secret."""
        if not hmac.compare_digest(hello.token, self.hello.token):
            raise TransferRefused(grpc.StatusCode.PERMISSION_DENIED, "it is not the one of this push", field="token")
        ours = (self.hello.reservation_id, self.hello.epoch, self.hello.attempt)
        same_form = replace(Layout.of(hello.layout), tensor_parallel_rank=0) == replace(
            Layout.of(self.hello.layout), tensor_parallel_rank=0
        )
        if (hello.reservation_id, hello.epoch, hello.attempt) != ours or not same_form or self.ended:
            raise TransferRefused(grpc.StatusCode.ABORTED, "the push has another target, or has ended", field="push_id")

    def check_fence(self) -> None:
        """Raises TransferRefused when nothing more may be written; renews the lease."""
        if self.silence is not None and not self.silence.expired():
            self.silence.reschedule(asyncio.get_running_loop().time() + self.idle_timeout_s)
        if not self._delegate.push_progress(self.target):
            raise TransferRefused(grpc.StatusCode.ABORTED, f"{self.target.attempt} was replaced or released", field="attempt")

    async def commit(self, commit: transfer_pb2.TransferCommit) -> None:
        """Raises MeshError."""
        self.check_fence()
        manifests = [self.manifest(layout) for layout in self._layouts_needed()]
        num_parts = sum(manifest.num_parts for manifest in manifests)
        if commit.num_parts != num_parts:
            raise refuse("commit.num_parts", f"{commit.num_parts}, but {num_parts} have arrived")
        for manifest in manifests:
            manifest.check_complete(commit, self.target.num_tokens)
        num_bytes = sum(manifest.num_bytes for manifest in manifests)
        await self._delegate.commit_push(self.target, commit, num_bytes=num_bytes, transport=self.transport)
        self.ended = True

    def _layouts_needed(self) -> list[Layout]:
        """Of all ranks of the sender that have heads of ours."""
        layout, num_heads = Layout.of(self.hello.layout), self.host.identity.num_kv_heads
        ranks = layout.ranks_with(Layout.of(self.host.layout).heads(num_heads), num_heads)
        return [replace(layout, tensor_parallel_rank=rank) for rank in ranks]

    def abort(self, abort: transfer_pb2.TransferAbort) -> None:
        """The sender's end without a commit."""
        if not abort.finished:
            self.fail(f"the sender gave up: {abort.reason}")
            return
        self.ended = True
        self._delegate.push_finished(self.target)

    def fail(self, reason: str) -> None:
        """Once, and for all connections."""
        if self.ended:
            return
        self.ended = True
        self._delegate.push_failed(self.target, reason)
        self.interrupt()

    def interrupt(self) -> None:
        """End every connection as soon as its thread is out."""
        for connection in self.connections:
            connection.interrupt()

    async def quiesce(self) -> None:
        """Return when no connection is inside a part; one that is not writing goes on to its next part."""
        await asyncio.gather(*(connection.quiesce() for connection in self.connections))
