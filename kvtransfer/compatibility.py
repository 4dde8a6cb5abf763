"""Whether two workers may exchange KV: identity must be equal, layout convertible (design.md, section 5)."""

import grpc
from google.protobuf.message import Message

from kvtransfer.errors import Incompatible, TransferRefused
from kvtransfer.layout import Layout
from kvtransfer.memory import KVMemory
from pdmesh.v1 import common_pb2

PROTOCOL_VERSION = 3
INT8_SCALE_BYTES = 4  # of a token and head
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}


def check_identity(ours: common_pb2.Identity, theirs: common_pb2.Identity) -> None:
    """Raises Incompatible naming the first field of Identity that differs."""
    _check_equal("identity", ours, theirs)


def check_layout(identity: common_pb2.Identity, ours: common_pb2.KVLayout, theirs: common_pb2.KVLayout) -> None:
    """Raises Incompatible naming the field of KVLayout that cannot be converted, or that no worker can have."""
    mine, other = Layout.of(ours), Layout.of(theirs)
    problem = other.problem(identity.num_kv_heads, identity.head_dim)
    if problem is not None:
        raise TransferRefused(grpc.StatusCode.FAILED_PRECONDITION, problem[1], field=f"layout.{problem[0]}")
    field = other.difference(mine)
    if field is not None:
        raise Incompatible(f"layout.{field}", getattr(mine, field), getattr(other, field))


def check_same_layout(ours: common_pb2.KVLayout, theirs: common_pb2.KVLayout) -> None:
    """For what converts nothing. Raises TransferRefused UNIMPLEMENTED, so that the sender takes another transport."""
    for field in ours.DESCRIPTOR.fields:
        mine, other = getattr(ours, field.name), getattr(theirs, field.name)
        if mine != other:
            message = f"ours is {mine!r}, theirs is {other!r}, and this transport converts nothing"
            raise TransferRefused(grpc.StatusCode.UNIMPLEMENTED, message, field=f"layout.{field.name}")


def check_protocol(theirs: int) -> None:
    """Raises Incompatible if the peer's hello is of another version of this protocol."""
    if theirs != PROTOCOL_VERSION:
        raise Incompatible("protocol_version", PROTOCOL_VERSION, theirs)


def bytes_per_layer_block(identity: common_pb2.Identity, layout: common_pb2.KVLayout) -> int:
    """Bytes of one block's keys (or values) in one layer, on one tensor-parallel shard."""
    dtype_bytes = DTYPE_BYTES.get(layout.kv_dtype)
    if dtype_bytes is None:
        raise ValueError(f"layout.kv_dtype must be one of {', '.join(DTYPE_BYTES)}, got {layout.kv_dtype!r}")
    num_kv_heads = identity.num_kv_heads // max(1, layout.tensor_parallel_size)
    scale_bytes = INT8_SCALE_BYTES if layout.kv_dtype == "int8" else 0
    return layout.block_size * num_kv_heads * (identity.head_dim * dtype_bytes + scale_bytes)


def check_memory(memory: KVMemory, identity: common_pb2.Identity, layout: common_pb2.KVLayout) -> None:
    """Raises ValueError if our own pool does not have the shape that identity and layout promise to peers."""
    expected = (identity.num_layers, bytes_per_layer_block(identity, layout))
    actual = (memory.num_layers, memory.bytes_per_layer_block)
    if actual != expected:
        raise ValueError(f"the pool has (layers, bytes per block and layer) {actual}, identity and layout say {expected}")


def refuse(field: str, message: str) -> TransferRefused:
    """INVALID_ARGUMENT for a field that no state of the receiver could accept."""
    return TransferRefused(grpc.StatusCode.INVALID_ARGUMENT, message, field=field)


def _check_equal(name: str, ours: Message, theirs: Message) -> None:
    for field in ours.DESCRIPTOR.fields:
        mine, other = getattr(ours, field.name), getattr(theirs, field.name)
        if mine != other:
            raise Incompatible(f"{name}.{field.name}", mine, other)
