"""For transports over which the receiver fetches a part: the header says where it lies in the sender's pool."""

from collections.abc import Sequence

from kvtransfer.checksum import checksum
from kvtransfer.compatibility import bytes_per_layer_block, refuse
from kvtransfer.manifest import Part
from kvtransfer.memory import KVMemory, PoolShape, Rectangle
from kvtransfer.stream import Stream
from pdmesh.v1 import transfer_pb2


def shape_of_sender(hello: transfer_pb2.TransferHello, memory: KVMemory) -> PoolShape:
    """Of the pool that `hello` describes; `memory` is ours, of the same model."""
    return PoolShape(memory.num_layers, hello.pool_num_blocks, bytes_per_layer_block(hello.identity, hello.layout))


async def announce(stream: Stream, header: transfer_pb2.PartHeader, views: Sequence[memoryview], block_ids: Sequence[int]) -> int:
    """Say where the part lies, and sum its bytes while the receiver fetches them; returns their CRC-32C."""
    header.source_block_ids[:] = block_ids
    await stream.write_message(transfer_pb2.TransferMessage(part=header))
    return await stream.run(checksum, views)


def source_of(header: transfer_pb2.PartHeader, part: Part, shape: PoolShape) -> Rectangle:
    """Where the bytes of `part` lie in the sender's pool. Raises TransferRefused naming the field that leads out of it."""
    source_ids = list(header.source_block_ids)
    if len(source_ids) != part.num_blocks:
        raise refuse("part.source_block_ids", f"{len(source_ids)} ids for {part.num_blocks} blocks")
    if max(source_ids) >= shape.num_blocks:
        raise refuse("part.source_block_ids", f"{max(source_ids)} is outside the pool of {shape.num_blocks} blocks")
    return Rectangle(shape, range(header.layer_start, header.layer_start + len(part.layers)), source_ids)
