"""The ends of a connection over which the bytes of a part follow its header, straight from and into pool memory."""

import asyncio
from collections.abc import Callable, Sequence

from kvtransfer.errors import PeerClosed, TransportUnavailable
from kvtransfer.manifest import Part
from kvtransfer.memory import KVMemory, part_views
from kvtransfer.stream import Stream, expect, release
from pdmesh.v1 import transfer_pb2

HANDSHAKE_TIMEOUT_S = 2.0


class InlineOutgoing:
    """The sender's end."""

    def __init__(self, stream: Stream, name: str) -> None:
        """`name` of transport and address, for messages."""
        self.stream = stream
        self._name = name

    async def send_hello(self, hello: transfer_pb2.TransferHello) -> None:
        """Raises TransportUnavailable when the connection is not opened."""
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await self.stream.open()
        except (PeerClosed, TimeoutError) as error:
            raise TransportUnavailable(f"{self._name}: {str(error) or 'no TLS handshake in time'}") from error
        await self.stream.write_message(transfer_pb2.TransferMessage(hello=hello))

    async def send_part(
        self,
        header: transfer_pb2.PartHeader,
        views: Sequence[memoryview],
        block_ids: Sequence[int],
        on_bytes: Callable[[int], None],
    ) -> int:
        await self.stream.write_message(transfer_pb2.TransferMessage(part=header))
        return await self.stream.send_views(views, on_bytes)


class InlineIncoming:
    """The receiver's end."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    async def receive_hello(self) -> transfer_pb2.TransferHello:
        await self.stream.open()
        return (await expect(self.stream, "hello")).hello

    async def prepare(self, hello: transfer_pb2.TransferHello) -> None:
        """Bytes come by themselves."""

    async def receive_part(
        self,
        header: transfer_pb2.PartHeader,
        part: Part,
        memory: KVMemory,
        block_ids: Sequence[int],
        on_bytes: Callable[[int], None],
    ) -> int:
        views = part_views(memory, part.layers, block_ids)
        try:
            return await self.stream.receive_views(views, on_bytes)
        finally:
            release(views)

    def close(self) -> None:
        """Nothing is held but the stream."""
