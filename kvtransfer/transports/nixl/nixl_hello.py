"""What a hello over nixl says of the sender's pool."""

from kvtransfer.compatibility import refuse
from kvtransfer.memory import KVMemory, PoolShape
from kvtransfer.transports.pulled import shape_of_sender
from pdmesh.v1 import transfer_pb2

MAX_METADATA_BYTES = 64 << 10
_ADDRESS_END = 1 << 64


def check_pool(hello: transfer_pb2.TransferHello, memory: KVMemory) -> PoolShape:
    """Its shape; `memory` is ours, of the same model. Raises TransferRefused naming the field that describes no pool."""
    shape = shape_of_sender(hello, memory)
    if not 0 < len(hello.nixl_metadata) <= MAX_METADATA_BYTES:
        raise refuse("hello.nixl_metadata", f"{len(hello.nixl_metadata)} bytes are not 1 to {MAX_METADATA_BYTES}")
    if shape.num_bytes == 0:
        raise refuse("hello.pool_num_blocks", "0; a pool has at least one block")
    if not 0 < hello.pool_address <= _ADDRESS_END - shape.num_bytes:
        raise refuse("hello.pool_address", f"no pool of {shape.num_bytes} bytes lies at {hello.pool_address:#x}")
    return shape
