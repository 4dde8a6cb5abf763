"""The KV of a request in parts: the memory that holds it, which workers may exchange it, and the receiver's manifest of parts.

A part is a rectangle: a group of layers × a range of blocks. Its bytes are, per layer, all keys, then all values (or, where
they are joined, both of each block).

    blocks  0 ··· first_block ··············· num_blocks
    layer 0 │ pinned │ part 0                       │       Blocks before first_block are on the decode worker already.
          1 │ prefix │                              │       The last block may be partly filled: it is sent whole.
          2 │        │ part 1                       │
"""

import hmac
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import grpc
import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from kvtransfer.errors import Incompatible, TransferRefused
from kvtransfer.layout import Layout, num_planes
from kvtransfer.native.library import Runs
from pdmesh.v1 import common_pb2, transfer_pb2

# KV memory that a transfer reads or writes. The engine's KVPool satisfies the protocol structurally.
#
# Where a block lies:
#
#     byte offset = ((layer * 2 + plane) * num_blocks + block_id) * bytes_per_layer_block      plane: 0 keys, 1 values
#     byte offset = (layer * num_blocks + block_id) * 2 * bytes_per_layer_block                where they are joined (layout.py)


class PoolMemory(Protocol):
    """Give access to the bytes of one pool of KV blocks in CPU memory, contiguous: [num_layers, 2, num_blocks,
    bytes_per_layer_block] bytes, or [num_layers, 1, num_blocks, 2 * bytes_per_layer_block] where keys and values are joined."""

    @property
    def num_layers(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_planes(self) -> int:
        """Return 2, keys and values; 1: joined."""

    @property
    def bytes_per_layer_block(self) -> int:
        """Return the bytes of one block's keys (or values) in one layer."""

    def memory(self) -> memoryview:
        """Return the whole pool, writable, as bytes."""


class KVMemory(PoolMemory, Protocol):
    """Add what transfers need of a pool."""

    @property
    def fd(self) -> int | None:
        """Return the sealed memfd behind the pool; None where the pool cannot be shared."""

    def block_view(self, layer: int, plane: int, block_id: int) -> memoryview:
        """Return the bytes of one block's keys (plane 0) or values (plane 1), writable; both, where they are joined (plane 0)."""


@dataclass(frozen=True)
class PoolShape:
    """Describe the shape of a pool; enough to find a block in a peer's mapped memory."""

    num_layers: int
    num_blocks: int
    bytes_per_layer_block: int
    num_planes: int = 2

    @property
    def num_bytes(self) -> int:
        return self.num_layers * 2 * self.num_blocks * self.bytes_per_layer_block

    @property
    def plane_bytes(self) -> int:
        """Return the bytes of one block in one plane of a layer."""
        return 2 * self.bytes_per_layer_block // self.num_planes

    def offset(self, layer: int, plane: int, block_id: int) -> int:
        return ((layer * self.num_planes + plane) * self.num_blocks + block_id) * self.plane_bytes


def shape_of(memory: KVMemory) -> PoolShape:
    """Return the shape of `memory`."""
    return PoolShape(memory.num_layers, memory.num_blocks, memory.bytes_per_layer_block, memory.num_planes)


@dataclass(frozen=True)
class Run:
    """Describe consecutive blocks: `num_blocks` of them, from index `first` of a list of ids on."""

    first: int
    num_blocks: int


def runs(*tables: Sequence[int]) -> Iterator[Run]:
    """Cut block tables of one length into the longest runs in which the ids of every table are consecutive."""
    ids = np.array(tables, np.int64)
    cuts = np.flatnonzero((np.diff(ids) != 1).any(axis=0)) + 1
    for start, end in pairwise([0, *cuts.tolist(), ids.shape[1]] if ids.size else []):
        yield Run(start, end - start)


@dataclass(frozen=True)
class Rectangle:
    """Describe blocks of a range of layers of a pool."""

    shape: PoolShape
    layers: range
    block_ids: Sequence[int]

    def offsets(self, indices: Sequence[int]) -> NDArray[np.int64]:
        """Return the offsets of block_ids[i] for i in `indices`, plane by plane, layer by layer."""
        count = self.shape.num_planes
        planes = np.arange(count * self.layers.start, count * self.layers.stop, dtype=np.int64)[:, None]
        blocks = np.array([self.block_ids[index] for index in indices], np.int64)
        return ((planes * self.shape.num_blocks + blocks) * self.shape.plane_bytes).reshape(-1)


def copies(target: Rectangle, source: Rectangle) -> Runs:
    """Return the copies between two pools of the same planes, in wire order: [n, 3] of offset in target, offset in source,
    bytes."""
    pieces = list(runs(target.block_ids, source.block_ids))
    firsts = [run.first for run in pieces]
    sizes = np.array([run.num_blocks for run in pieces], np.int64) * target.shape.plane_bytes
    num_planes = target.shape.num_planes * len(target.layers)
    return np.stack([target.offsets(firsts), source.offsets(firsts), np.tile(sizes, num_planes)], axis=1)


def part_views(memory: KVMemory, layers: range, block_ids: Sequence[int]) -> list[memoryview]:
    """Return the bytes of a part in wire order (per layer: keys of all blocks, then values, or both of each block), with adjacent
    views joined."""
    whole, shape = memory.memory(), shape_of(memory)
    size = shape.plane_bytes
    pieces = list(runs(block_ids))
    return [
        whole[start : start + run.num_blocks * size]
        for layer in layers
        for plane in range(shape.num_planes)
        for run in pieces
        for start in (shape.offset(layer, plane, block_ids[run.first]),)
    ]


# Whether two workers may exchange KV: identity must be equal, layout convertible (docs/kv_transfer.md)


PROTOCOL_VERSION = 3
INT8_SCALE_BYTES = 4  # bytes of a token's head
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}


def check_identity(ours: common_pb2.Identity, theirs: common_pb2.Identity) -> None:
    """Raise Incompatible naming the first field of Identity that differs."""
    _check_equal("identity", ours, theirs)


def check_layout(identity: common_pb2.Identity, ours: common_pb2.KVLayout, theirs: common_pb2.KVLayout) -> None:
    """Raise Incompatible naming the field of KVLayout that cannot be converted, or that no worker can have."""
    mine, other = Layout.of(ours), Layout.of(theirs)
    problem = other.problem(identity.num_kv_heads, identity.head_dim)
    if problem is not None:
        raise TransferRefused(grpc.StatusCode.FAILED_PRECONDITION, problem[1], field=f"layout.{problem[0]}")
    field = other.difference(mine)
    if field is not None:
        raise Incompatible(f"layout.{field}", getattr(mine, field), getattr(other, field))


def check_same_layout(ours: common_pb2.KVLayout, theirs: common_pb2.KVLayout) -> None:
    """Check layouts for a transport that converts nothing. Raises TransferRefused UNIMPLEMENTED, so that the sender takes another
    transport."""
    for field in ours.DESCRIPTOR.fields:
        mine, other = getattr(ours, field.name), getattr(theirs, field.name)
        if mine != other:
            message = f"ours is {mine!r}, theirs is {other!r}, and this transport converts nothing"
            raise TransferRefused(grpc.StatusCode.UNIMPLEMENTED, message, field=f"layout.{field.name}")


def check_protocol(theirs: int) -> None:
    """Raise Incompatible if the peer's hello has another version of this protocol."""
    if theirs != PROTOCOL_VERSION:
        raise Incompatible("protocol_version", PROTOCOL_VERSION, theirs)


def bytes_per_layer_block(identity: common_pb2.Identity, layout: common_pb2.KVLayout) -> int:
    """Return the bytes of one block's keys (or values) in one layer, on one tensor-parallel shard."""
    dtype_bytes = DTYPE_BYTES.get(layout.kv_dtype)
    if dtype_bytes is None:
        raise ValueError(f"layout.kv_dtype must be one of {', '.join(DTYPE_BYTES)}, got {layout.kv_dtype!r}")
    num_kv_heads = identity.num_kv_heads // max(1, layout.tensor_parallel_size)
    scale_bytes = INT8_SCALE_BYTES if layout.kv_dtype == "int8" else 0
    return layout.block_size * num_kv_heads * (identity.head_dim * dtype_bytes + scale_bytes)


def check_memory(memory: KVMemory, identity: common_pb2.Identity, layout: common_pb2.KVLayout) -> None:
    """Raise ValueError if our own pool does not have the shape that identity and layout promise to peers."""
    expected = (identity.num_layers, num_planes(layout.arrangement), bytes_per_layer_block(identity, layout))
    actual = (memory.num_layers, memory.num_planes, memory.bytes_per_layer_block)
    if actual != expected:
        raise ValueError(f"the pool has (layers, planes, bytes per block and layer) {actual}, identity and layout say {expected}")


def refuse(field: str, message: str) -> TransferRefused:
    """Return an INVALID_ARGUMENT refusal for a field that the receiver can accept in no state."""
    return TransferRefused(grpc.StatusCode.INVALID_ARGUMENT, message, field=field)


# The push token, the right to push into a reservation: the owner of the reservations checks epoch, token and attempt in
# `open_push`


def new_token() -> bytes:
    """Return a fresh secret of 32 bytes for one reservation."""
    return secrets.token_bytes(32)


def unknown_reservation(reservation_id: str) -> TransferRefused:
    """Return the refusal for a reservation that is not (or no longer) held."""
    return _refused(grpc.StatusCode.NOT_FOUND, "reservation_id", f"{reservation_id!r} is not held here")


def check_epoch(hello: transfer_pb2.TransferHello, epoch: int) -> None:
    """Raise FAILED_PRECONDITION for a reservation of an earlier start of this worker; call it before any lookup by
    reservation_id."""
    if hello.epoch != epoch:
        raise _refused(grpc.StatusCode.FAILED_PRECONDITION, "epoch", f"{hello.epoch:#x} is not this worker's: it has restarted")


def check_push_token(hello: transfer_pb2.TransferHello, *, epoch: int, token: bytes, attempt: int) -> None:
    """Raise TransferRefused unless `hello` names this epoch, token and attempt.

    FAILED_PRECONDITION: foreign epoch, or an attempt that was never granted; PERMISSION_DENIED: wrong token; ABORTED: an attempt
    that a newer one has replaced. The token is checked before the attempt: without it a peer learns nothing about the
    reservation.
    """
    check_epoch(hello, epoch)
    if not hmac.compare_digest(hello.token, token):
        raise _refused(grpc.StatusCode.PERMISSION_DENIED, "token", "it is not the one that came with the reservation")
    if hello.attempt < attempt:
        raise _refused(grpc.StatusCode.ABORTED, "attempt", f"{hello.attempt} was replaced by attempt {attempt}")
    if hello.attempt > attempt:
        raise _refused(grpc.StatusCode.FAILED_PRECONDITION, "attempt", f"{hello.attempt} was never granted, {attempt} was")


def _refused(code: grpc.StatusCode, field: str, message: str) -> TransferRefused:
    return TransferRefused(code, message, field=field)


def _check_equal(name: str, ours: Message, theirs: Message) -> None:
    for field in ours.DESCRIPTOR.fields:
        mine, other = getattr(ours, field.name), getattr(theirs, field.name)
        if mine != other:
            raise Incompatible(f"{name}.{field.name}", mine, other)


TARGET_PART_BYTES = 64 << 20  # copied in 3 ms; Python costs each end 0.25 ms for each part
MAX_PART_BYTES = 64 << 20
MAX_PULLED_BYTES = 1 << 30  # the largest part that a device reads: a lease must not lapse meanwhile
MAX_PART_BLOCKS = 1 << 16


@dataclass(frozen=True)
class Part:
    """Describe a part: a group of layers × a range of the request's blocks."""

    part_id: int
    layer_start: int
    layer_end: int
    block_start: int
    block_end: int

    @property
    def layers(self) -> range:
        return range(self.layer_start, self.layer_end)

    @property
    def num_blocks(self) -> int:
        return self.block_end - self.block_start

    def overlaps(self, other: "Part") -> bool:
        """Return whether both parts contain the same block of a layer."""
        layers = max(self.layer_start, other.layer_start) < min(self.layer_end, other.layer_end)
        return layers and max(self.block_start, other.block_start) < min(self.block_end, other.block_end)

    def num_bytes(self, bytes_per_layer_block: int) -> int:
        return len(self.layers) * 2 * self.num_blocks * bytes_per_layer_block


def cut(first_id: int, layers: range, blocks: range, bytes_per_layer_block: int, target_bytes: int) -> Iterator[Part]:
    """Yield parts of at most `target_bytes` (or one block of one layer) that cover layers × blocks; ids count from `first_id`."""
    block_bytes = 2 * bytes_per_layer_block
    num_blocks = _even(len(blocks), min(target_bytes // block_bytes, MAX_PART_BLOCKS))
    num_layers = _even(len(layers), target_bytes // (block_bytes * num_blocks))
    corners = [(layer, block) for layer in layers[::num_layers] for block in blocks[::num_blocks]]
    for part_id, (layer, block) in enumerate(corners, first_id):
        yield Part(part_id, layer, min(layer + num_layers, layers.stop), block, min(block + num_blocks, blocks.stop))


def _even(total: int, at_most: int) -> int:
    """Return the largest share when `total` is cut into as few nearly equal shares of at most max(1, at_most) as possible."""
    num_shares = -(-total // max(1, at_most))
    return -(-total // num_shares)


class Manifest:
    """Track what has arrived of one push: exactly one verified part must cover every (layer, block ≥ first_block)."""

    def __init__(self, num_layers: int, first_block: int, num_blocks: int, bytes_per_layer_block: int) -> None:
        self.num_layers = num_layers
        self.first_block = first_block
        self.num_blocks = num_blocks
        self.bytes_per_layer_block = bytes_per_layer_block
        self.num_parts = 0
        self.num_bytes = 0
        self._covered = [bytearray(num_blocks) for _ in range(num_layers)]
        self._accepted: set[int] = set()
        self._under_way: dict[int, Part] = {}  # several connections receive parts at the same time
        self._corrupt: set[int] = set()

    def check(self, header: transfer_pb2.PartHeader, max_bytes: int = MAX_PART_BYTES) -> Part:
        """Return the part that `header` announces. Raises TransferRefused naming the field that does not fit; nothing is
        written."""
        part = Part(header.part_id, header.layer_start, header.layer_end, header.block_start, header.block_end)
        if not 0 <= part.layer_start < part.layer_end <= self.num_layers:
            raise refuse("part.layer_end", f"layers [{part.layer_start}, {part.layer_end}) are not within [0, {self.num_layers})")
        if not self.first_block <= part.block_start < part.block_end <= self.num_blocks:
            raise refuse(
                "part.block_end",
                f"blocks [{part.block_start}, {part.block_end}) are not within [{self.first_block}, {self.num_blocks})",
            )
        expected = part.num_bytes(self.bytes_per_layer_block)
        if header.num_bytes != expected or expected > max_bytes:
            raise refuse("part.num_bytes", f"{header.num_bytes}; its ranges make {expected}, the bound is {max_bytes}")
        self._check_new(part)
        return part

    def begin(self, part: Part) -> None:
        """Record that the bytes of `part` are about to be written."""
        self._under_way[part.part_id] = part

    def end(self, part: Part) -> None:
        """Record that the bytes of `part` are written, or never will be."""
        self._under_way.pop(part.part_id, None)

    def accept(self, part: Part, *, num_bytes: int) -> None:
        """Record that `part` is written and verified."""
        self._accepted.add(part.part_id)
        self.num_parts += 1
        self.num_bytes += num_bytes
        for layer in part.layers:
            self._covered[layer][part.block_start : part.block_end] = b"\1" * part.num_blocks

    def reject(self, part: Part) -> None:
        """Record that `part` arrived corrupt: it may be sent once more. Raises TransferRefused DATA_LOSS the second time."""
        if part.part_id in self._corrupt:
            message = f"part {part.part_id} arrived corrupt twice"
            raise TransferRefused(grpc.StatusCode.DATA_LOSS, message, field="part_end")
        self._corrupt.add(part.part_id)

    def check_complete(self, commit: transfer_pb2.TransferCommit, num_tokens: int, num_blocks: int | None = None) -> None:
        """Raise TransferRefused unless everything has arrived, or the first `num_blocks`, and `commit` is for as many tokens."""
        if commit.num_tokens != num_tokens:
            raise refuse("commit.num_tokens", f"{commit.num_tokens}, but the reservation is for {num_tokens}")
        if self._under_way:
            raise refuse("commit.num_parts", f"parts {sorted(self._under_way)} are still being written")
        for layer, covered in enumerate(self._covered):
            missing = covered.find(0, self.first_block, num_blocks)
            if missing >= 0:
                raise TransferRefused(
                    grpc.StatusCode.FAILED_PRECONDITION, f"layer {layer}, block {missing} was never sent", field="manifest"
                )

    def _check_new(self, part: Part) -> None:
        if part.part_id in self._accepted:
            raise refuse("part.part_id", f"{part.part_id} has been accepted before")
        for layer in part.layers:
            if 1 in self._covered[layer][part.block_start : part.block_end]:
                raise refuse("part.block_start", f"part {part.part_id} overlaps an accepted one in layer {layer}")
        for other in self._under_way.values():
            if other.part_id == part.part_id or other.overlaps(part):
                raise refuse("part.block_start", f"part {part.part_id} overlaps part {other.part_id}, which is being written")
