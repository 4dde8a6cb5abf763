"""A pool on a device that workers of the same host read, and that reads theirs.

    sum      behind a mark: sum ─► 8 bytes to the host. The blocks are final then, and can be announced
    pull     behind a mark: copy from the peer's pool into ours, summed as it is stored ─► 8 bytes to the host

No process writes into another's pool. What is read may change meanwhile: it is used only once its sum has been verified. Room is
needed for block ids only, so a part may be large: what each costs Python, most of a millisecond (docs/gpu.md), is more than
a GPU should take to copy hundreds of megabytes. Nothing is lent, and no peer can hold anything. Nothing here waits. One thread
calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from pdmesh.engine.kernels.triton.support import why_not_here
from pdmesh.engine.kv_cache.block_moves import NUM_SUMS, Blocks, SummedCopies
from pdmesh.engine.kv_cache.cuda_ipc import NotShared, OpenPool, PoolHandle, PoolSharing
from pdmesh.engine.kv_cache.streams import Lane, Mark, Streams

# Copies of blocks between pools that are summed on the way, as a device reads them out of another process's pool
#
#     sum = Σ mix(word[i] ^ (i + 1) * GOLDEN) mod 2^64       word: 8 bytes, i: its place in the part in wire order
#
# mix is splitmix64's finalizer (Steele et al., Fast Splittable Pseudorandom Number Generators, 2014), a bijection: a part in
# which one word is wrong never has the sum of the right one; one that is wrong otherwise, or has words in other places, has that
# sum with probability 2^-64. It detects accidents, not attacks. CRC-32C is not used because a GPU has no instruction for it, and
# to read a gigabyte back over PCIe for the host's would take 20 ms at 50 GB/s, where a device reads it in 0.3 ms at 3.3 TB/s;
# this takes some 30 integer operations for 8 bytes, which an H100 does at about that speed.


WORD_BYTES = 8
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class IndexedSums:
    """Sum by torch's operations: the reference, and the implementation without Triton. Takes room for the part several times
    over."""

    def sum(self, blocks: Blocks, sums: Tensor) -> None:
        blocks.check()
        sums[:1] += word_sum(_of(blocks)[:, :, blocks.block_ids.long()])

    def copy(self, source: Blocks, target: Blocks, sums: Tensor) -> None:
        source.check()
        target.check()
        target.check_fits(source)
        words = _of(source)[:, :, source.block_ids.long()]
        _of(target)[:, :, target.block_ids.long()] = words
        sums[:1] += word_sum(words)


def word_sum(words: Tensor) -> Tensor:
    """Return the sum of int64 words in their order, as one word."""
    places = torch.arange(1, words.numel() + 1, device=words.device)
    return _mixed(words.flatten() ^ places * _signed(_GOLDEN)).sum()


def unsigned(total: int) -> int:
    """Return a sum of partial sums as it is sent."""
    return total % 2**64


def summed_copies_for(device: torch.device) -> SummedCopies:
    """Return Triton's where it runs, else torch's."""
    if why_not_here(device.type):
        return IndexedSums()
    from pdmesh.engine.kernels.triton.blocks import TritonSums

    return TritonSums()


def _of(blocks: Blocks) -> Tensor:
    return blocks.pool[blocks.layers.start : blocks.layers.stop]


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shifted(x, 27)) * _signed(_MIX_2)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift to the right, filled with zeros: torch's own shift keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


PART_BYTES = 256 << 20
MAX_BLOCKS = 1 << 16  # blocks of a part


@dataclass(frozen=True)
class PeerPool:
    """Another worker's pool, of the same layers and blocks of the same size; it gives their number."""

    words: Tensor  # int64 [num_layers, 2, num_blocks, words of a block]
    opened: OpenPool

    def close(self) -> None:
        self.opened.close()


@dataclass(frozen=True)
class Rooms:
    """Memory on the device for parts in wire order. Writes into it (by NIXL) are ordered with no stream: no kernel may write
    there."""

    words: Tensor  # int64 [num_rooms, words of a room]

    @property
    def address(self) -> int:
        return self.words.data_ptr()

    def room(self, index: int) -> Tensor:
        return self.words[index]


class ShownPool:
    """Share a pool and read others. Satisfies what kvtransfer.staging needs."""

    def __init__(
        self,
        pool: Tensor,
        sharing: PoolSharing,
        streams: Streams,
        copies: SummedCopies | None = None,
        part_bytes: int = PART_BYTES,
    ) -> None:
        """pool: `KVPool.tensor`. Raises NotShared for one that cannot be shared or read by words."""
        block_bytes = pool[0, 0, 0].numel() * pool.element_size()
        if block_bytes % WORD_BYTES:
            raise NotShared("pool", f"blocks of {block_bytes} bytes are no whole words of 8")
        self.handle: PoolHandle = sharing.show(pool)
        self.part_bytes = part_bytes  # the best size of a part
        self._words = _by_words(pool)
        self._sharing = sharing
        self._copies = summed_copies_for(pool.device) if copies is None else copies
        max_blocks = min(MAX_BLOCKS, max(1, part_bytes // (2 * block_bytes)))
        self._sums, self._pulls = (_Slips(pool.device, streams, max_blocks) for _ in range(2))

    @property
    def device(self) -> torch.device:
        return self._words.device

    @property
    def address(self) -> int:
        """Return the address of the pool in this process."""
        return self._words.data_ptr()

    def enter(self) -> None:
        """Make its device the current one of this thread, for libraries that ask the driver."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def sum(self, layers: range, block_ids: Sequence[int], after: Mark) -> Future[int]:
        """Return the sum of these blocks of these layers as they are at `after`, in wire order. When it is done, they are
        final."""

        def work(slip: _Slip) -> None:
            self._copies.sum(Blocks(self._words, layers, slip.ids), slip.sums)

        return self._sums.run(work, after, block_ids)

    def pull(
        self, peer: PeerPool, source_ids: Sequence[int], layers: range, block_ids: Sequence[int], after: Mark
    ) -> Future[int]:
        """Copy blocks of the peer's pool into ours, behind `after`; return the sum of what was stored. Raises ValueError for ids
        outside a pool, and for too many."""
        for name, ids, words in (("source_ids", source_ids, peer.words), ("block_ids", block_ids, self._words)):
            if len(ids) != len(block_ids) or not 0 <= min(ids) <= max(ids) < words.shape[2]:
                raise ValueError(f"{name}: {len(ids)} of {min(ids)} to {max(ids)}; the pool has 0 to {words.shape[2] - 1}")

        def work(slip: _Slip) -> None:
            source = Blocks(peer.words, layers, slip.ids)
            self._copies.copy(source, Blocks(self._words, layers, slip.second_ids), slip.sums)

        return self._pulls.run(work, after, source_ids, block_ids)

    def rooms(self, num_rooms: int, num_bytes: int) -> Rooms:
        """Return rooms of `num_bytes`, a multiple of 8, each. Waits until no earlier user of the memory writes to it. Raises
        RuntimeError if there is not so much memory."""
        words = torch.zeros((num_rooms, num_bytes // WORD_BYTES), dtype=torch.int64, device=self.device)
        int(words[-1, -1])
        return Rooms(words)

    def store(self, room: Tensor, layers: range, block_ids: Sequence[int], after: Mark) -> Future[int]:
        """Copy a part out of `room` (int64 [words]) into our blocks, behind `after`; return the sum of what was stored. Raises
        ValueError for ids outside the pool, for too many and for more than a room holds."""
        if not 0 <= min(block_ids) <= max(block_ids) < self._words.shape[2]:
            raise ValueError(f"block_ids: {min(block_ids)} to {max(block_ids)}; the pool has 0 to {self._words.shape[2] - 1}")
        shape = (len(layers), 2, len(block_ids), self._words.shape[3])
        if (num_words := math.prod(shape)) > len(room):
            raise ValueError(f"part: {num_words} words do not go into a room of {len(room)}")
        part, there = room[:num_words].view(shape), self._words[layers.start : layers.stop]

        def work(slip: _Slip) -> None:
            whole = range(len(layers))
            self._copies.copy(Blocks(part, whole, slip.ids), Blocks(there, whole, slip.second_ids), slip.sums)

        return self._pulls.run(work, after, range(len(block_ids)), block_ids)

    def open(self, handle: PoolHandle, num_blocks: int) -> PeerPool:
        """Open the pool of a peer, in a thread. Raises NotShared."""
        shape = (*self._words.shape[:2], num_blocks, self._words.shape[3])
        opened = self._sharing.open(handle, WORD_BYTES * shape[0] * shape[1] * shape[2] * shape[3])
        try:
            return PeerPool(opened.bytes.view(torch.int64).view(shape), opened)
        except RuntimeError as error:  # it does not begin at a word boundary
            opened.close()
            raise NotShared("offset", f"{handle.offset} is no place for a pool: {error}") from error

    def warm(self, mark: Callable[[], Mark]) -> None:
        """Compile the kernels: a block is summed, and copied onto itself. Waits; call it before the pool is used."""
        own = PeerPool(self._words, _Own(self._words))
        self.sum(range(1), [0], mark()).result()
        self.pull(own, [0], range(1), [0], mark()).result()

    def close(self) -> None:
        """Wait for what is under way; idempotent."""
        for slips in (self._sums, self._pulls):
            slips.lane.close()


@dataclass(frozen=True)
class _Own:
    bytes: Tensor

    def close(self) -> None:
        """Do nothing: another object owns it."""


@dataclass(eq=False, frozen=True)
class _Slip:
    """Inputs and outputs of a work on the device: sums, ids of blocks twice. The same on the host and there."""

    words: Tensor  # [NUM_SUMS + max_blocks] int64
    num_blocks: int

    @property
    def sums(self) -> Tensor:
        return self.words[:NUM_SUMS]

    @property
    def ids(self) -> Tensor:
        return self.words[NUM_SUMS:].view(torch.int32)[: self.num_blocks]

    @property
    def second_ids(self) -> Tensor:
        return self.words[NUM_SUMS:].view(torch.int32)[self._second : self._second + self.num_blocks]

    @property
    def told(self) -> Tensor:
        return self.words[: NUM_SUMS + (self._second + self.num_blocks + 1) // 2]

    @property
    def _second(self) -> int:
        """Return an offset at a multiple of 16 bytes, whatever the number of blocks: otherwise Triton would compile the kernel
        again."""
        return self.num_blocks + -self.num_blocks % 4


class _Slips:
    """A lane, with memory for its works' inputs and outputs. The memory on the device serves them all, one after the other."""

    def __init__(self, device: torch.device, streams: Streams, max_blocks: int) -> None:
        self.lane: Lane = streams.lane()
        self._streams = streams
        self._max_blocks, self._num_words = max_blocks, NUM_SUMS + max_blocks + 2
        self._there = torch.zeros(self._num_words, dtype=torch.int64, device=device)
        self._free: list[Tensor] = []  # filled by the thread that finds a work done

    def run(self, work: Callable[[_Slip], None], after: Mark, ids: Sequence[int], second_ids: Sequence[int] = ()) -> Future[int]:
        """Run a work and return its sum. Raises ValueError for too many ids."""
        if len(ids) > self._max_blocks:
            raise ValueError(f"block_ids: {len(ids)} are more than {self._max_blocks}")
        here, there = _Slip(self._taken(), len(ids)), _Slip(self._there, len(ids))
        here.ids[:] = torch.tensor(ids, dtype=torch.int32)
        here.second_ids[: len(second_ids)] = torch.tensor(second_ids, dtype=torch.int32)
        here.sums.zero_()

        def launch() -> None:
            there.told.copy_(here.told, non_blocking=True)
            work(there)
            here.sums.copy_(there.sums, non_blocking=True)

        total: Future[int] = Future()
        total.set_running_or_notify_cancel()
        self.lane.run(launch, after).add_done_callback(lambda done: self._say(done, here, total))
        return total

    def _taken(self) -> Tensor:
        try:
            return self._free.pop()
        except IndexError:  # there is one for each work under way, which is one for a connection
            return self._streams.host_room(WORD_BYTES * self._num_words).view(torch.int64)

    def _say(self, done: Future[None], slip: _Slip, total: Future[int]) -> None:
        error, value = done.exception(), unsigned(int(slip.sums.sum()))
        self._free.append(slip.words)
        if error is None:
            total.set_result(value)
        else:
            total.set_exception(error)


def _by_words(pool: Tensor) -> Tensor:
    return pool.flatten(3).view(torch.int64)
