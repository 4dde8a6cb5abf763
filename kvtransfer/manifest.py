"""How the KV of a request is cut into parts, and how the receiver knows that it has all of them.

A part is a rectangle: a group of layers × a range of blocks. Its bytes are, per layer, all keys, then all values.

    blocks  0 ··· first_block ··············· num_blocks
    layer 0 │ pinned │ part 0                       │       Blocks before first_block are on decode already.
          1 │ prefix │                              │       The last block may be filled in part: it travels whole.
          2 │        │ part 1                       │
"""

from collections.abc import Iterator
from dataclasses import dataclass

import grpc

from kvtransfer.compatibility import refuse
from kvtransfer.errors import TransferRefused
from pdmesh.v1 import transfer_pb2

TARGET_PART_BYTES = 64 << 20  # copied in 3 ms; of Python a part costs each end a quarter of one
MAX_PART_BYTES = 64 << 20
MAX_PULLED_BYTES = 1 << 30  # of a part that no host has to hold; a lease must not lapse over it
MAX_PART_BLOCKS = 1 << 16


@dataclass(frozen=True)
class Part:
    """A group of layers × a range of the request's blocks."""

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
        """They have a block of a layer in common."""
        layers = max(self.layer_start, other.layer_start) < min(self.layer_end, other.layer_end)
        return layers and max(self.block_start, other.block_start) < min(self.block_end, other.block_end)

    def num_bytes(self, bytes_per_layer_block: int) -> int:
        return len(self.layers) * 2 * self.num_blocks * bytes_per_layer_block


def cut(first_id: int, layers: range, blocks: range, bytes_per_layer_block: int, target_bytes: int) -> Iterator[Part]:
    """Parts of at most `target_bytes` (or one block of one layer) that cover layers × blocks; ids count from `first_id`."""
    block_bytes = 2 * bytes_per_layer_block
    num_blocks = _even(len(blocks), min(target_bytes // block_bytes, MAX_PART_BLOCKS))
    num_layers = _even(len(layers), target_bytes // (block_bytes * num_blocks))
    corners = [(layer, block) for layer in layers[::num_layers] for block in blocks[::num_blocks]]
    for part_id, (layer, block) in enumerate(corners, first_id):
        yield Part(part_id, layer, min(layer + num_layers, layers.stop), block, min(block + num_blocks, blocks.stop))


def _even(total: int, at_most: int) -> int:
    """The largest share when `total` is cut into as few nearly equal shares of at most max(1, at_most) as possible."""
    num_shares = -(-total // max(1, at_most))
    return -(-total // num_shares)


class Manifest:
    """What a receiver has of one push: every (layer, block ≥ first_block) is to be covered exactly once by a verified part."""

    def __init__(self, num_layers: int, first_block: int, num_blocks: int, bytes_per_layer_block: int) -> None:
        self.num_layers = num_layers
        self.first_block = first_block
        self.num_blocks = num_blocks
        self.bytes_per_layer_block = bytes_per_layer_block
        self.num_parts = 0
        self.num_bytes = 0
        self._covered = [bytearray(num_blocks) for _ in range(num_layers)]
        self._accepted: set[int] = set()
        self._under_way: dict[int, Part] = {}  # connections bring parts at the same time
        self._corrupt: set[int] = set()

    def check(self, header: transfer_pb2.PartHeader, max_bytes: int = MAX_PART_BYTES) -> Part:
        """The part that `header` announces. Raises TransferRefused naming the field that does not fit; nothing is written."""
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
        """Its bytes are about to be written."""
        self._under_way[part.part_id] = part

    def end(self, part: Part) -> None:
        """Its bytes are written, or will never be."""
        self._under_way.pop(part.part_id, None)

    def accept(self, part: Part, *, num_bytes: int) -> None:
        """`part` is written and verified."""
        self._accepted.add(part.part_id)
        self.num_parts += 1
        self.num_bytes += num_bytes
        for layer in part.layers:
            self._covered[layer][part.block_start : part.block_end] = b"\1" * part.num_blocks

    def reject(self, part: Part) -> None:
        """`part` arrived corrupt: it may be sent once more. Raises TransferRefused DATA_LOSS the second time."""
        if part.part_id in self._corrupt:
            message = f"part {part.part_id} arrived corrupt twice"
            raise TransferRefused(grpc.StatusCode.DATA_LOSS, message, field="part_end")
        self._corrupt.add(part.part_id)

    def check_complete(self, commit: transfer_pb2.TransferCommit, num_tokens: int) -> None:
        """Raises TransferRefused unless everything is here and `commit` is for as many tokens."""
        if commit.num_tokens != num_tokens:
            raise refuse("commit.num_tokens", f"{commit.num_tokens}, but the reservation is for {num_tokens}")
        if self._under_way:
            raise refuse("commit.num_parts", f"parts {sorted(self._under_way)} are still being written")
        for layer, covered in enumerate(self._covered):
            missing = covered.find(0, self.first_block)
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
