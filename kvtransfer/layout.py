"""The layout of a worker's KV, and which layouts convert into which. No imports: routers ask the same question as workers."""

from dataclasses import dataclass
from typing import Protocol

import grpc
from google.protobuf.message import Message

from kvtransfer.errors import Incompatible, TransferRefused
from kvtransfer.memory import KVMemory
from pdmesh.v1 import common_pb2

CONVERTIBLE_DTYPES = frozenset({"float32", "bfloat16", "float16", "int8", "float8_e4m3fn"})
MAX_BLOCK_SIZE = 1 << 16
PANEL = 16  # engine/kv_format.py's GROUP


class WireLayout(Protocol):
    """`common_pb2.KVLayout`, as far as it matters here."""

    @property
    def block_size(self) -> int: ...
    @property
    def kv_dtype(self) -> str: ...
    @property
    def tensor_parallel_size(self) -> int: ...
    @property
    def tensor_parallel_rank(self) -> int: ...
    @property
    def arrangement(self) -> str: ...


@dataclass(frozen=True)
class Layout:
    """How KV lies in one worker's pool: tokens of a block, element type, its share of the KV heads, order of the numbers."""

    block_size: int
    kv_dtype: str
    tensor_parallel_size: int = 1
    tensor_parallel_rank: int = 0
    arrangement: str = "plain"

    @classmethod
    def of(cls, wire: WireLayout) -> "Layout":
        return cls(wire.block_size, wire.kv_dtype, wire.tensor_parallel_size, wire.tensor_parallel_rank, wire.arrangement)

    def problem(self, num_kv_heads: int, head_dim: int) -> tuple[str, str] | None:
        """(field, what is wrong) for a layout that no worker can have."""
        if not 0 < self.block_size <= MAX_BLOCK_SIZE:
            return "block_size", f"{self.block_size} is not in [1, {MAX_BLOCK_SIZE}]"
        if self.tensor_parallel_size < 1 or num_kv_heads % self.tensor_parallel_size:
            return "tensor_parallel_size", f"{self.tensor_parallel_size} does not divide {num_kv_heads} KV heads"
        if not 0 <= self.tensor_parallel_rank < self.tensor_parallel_size:
            return "tensor_parallel_rank", f"{self.tensor_parallel_rank} is not in [0, {self.tensor_parallel_size})"
        if self.arrangement == "panels" and (self.block_size % PANEL or head_dim % PANEL):
            return "arrangement", f"panels have groups of {PANEL} tokens and dimensions, not {self.block_size} and {head_dim}"
        return None

    def difference(self, other: "Layout") -> str | None:
        """The field that keeps KV of this layout from becoming KV of the other; None: it can be converted, or is the same."""
        if self.arrangement != other.arrangement:
            return "arrangement"
        same = self.kv_dtype == other.kv_dtype
        return None if same or {self.kv_dtype, other.kv_dtype} <= CONVERTIBLE_DTYPES else "kv_dtype"

    def heads(self, num_kv_heads: int) -> range:
        """The KV heads that lie in this worker's pool."""
        count = num_kv_heads // self.tensor_parallel_size
        return range(self.tensor_parallel_rank * count, (self.tensor_parallel_rank + 1) * count)

    def ranks_with(self, heads: range, num_kv_heads: int) -> range:
        """The ranks of a worker of this layout's degree that hold any of these heads."""
        count = num_kv_heads // self.tensor_parallel_size
        return range(heads.start // count, (heads.stop - 1) // count + 1)


# Whether two workers may exchange KV: identity must be equal, layout convertible (design.md, section 5).


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
