"""The KV of a draft model: its place, and the tokens of a sequence whose KV is valid.

A draft model has a pool of its own with as many blocks as the target's, and a sequence has the same block ids in both. So there
is one allocator, and the draft's blocks are not accounted for. Instead every slot has a label: a hash of all tokens from a
sequence's first up to the slot's own. Where the labels of a sequence's slots are those of its tokens, its draft KV is valid,
whichever sequence wrote it; everything else is ignored.

    sequence     The  cat  sat  on | the  mat                 block ids 7, 2
    label of     h1   h2   h3   h4 | h5   h6                  h3 = hash(h2, "sat")
    slots of 7   h1   h2   h3   h4                            valid, perhaps written by another sequence with this prefix
    slots of 2                       h5   x6   x7   -         a draft token took the place of "mat": compute from there

So a cached prefix serves both models, blocks may go to other sequences and come back (preemption), the labels show that a copied
block is invalid (copy-on-write copies the target's pool only), and accepted draft tokens are not computed again.

A self-draft writes into the target's own pool, where the KV of all computed tokens is valid.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from pdmesh.engine.kernels.cpu.model import kv_head_size
from pdmesh.engine.kv_cache.block_manager import BlockManager
from pdmesh.engine.kv_cache.block_pool import num_blocks_for
from pdmesh.engine.kv_cache.pool import KVPool, KVShape
from pdmesh.engine.loader.loader import LoadedModel
from pdmesh.engine.memory import MIB, DoesNotFit, free_memory
from pdmesh.engine.runner.batch import StepBatch
from pdmesh.engine.scheduler.sequence import Sequence

# The batch of a draft model's forward pass: for each sequence some consecutive tokens, most often one


@dataclass(frozen=True)
class Chunk:
    """Hold tokens from position `first` on; the KV before them is in the pool, and their slots are in the sequence's blocks."""

    sequence: Sequence
    first: int
    token_ids: tuple[int, ...]
    num_rows: int  # how many of the last tokens need logits

    @property
    def end(self) -> int:
        return self.first + len(self.token_ids)

    def slots(self, block_size: int) -> list[int]:
        block_ids = self.sequence.block_ids
        return [block_ids[p // block_size] * block_size + p % block_size for p in range(self.first, self.end)]


def batch_of(chunks: Sequence_[Chunk], block_size: int) -> StepBatch:
    """Return the flat batch of chunks, in their order, in host memory."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    rows: list[int] = []
    query_starts = [0]
    for chunk in chunks:
        token_ids += chunk.token_ids
        positions += range(chunk.first, chunk.end)
        slots += chunk.slots(block_size)
        query_starts.append(len(token_ids))
        rows += range(len(token_ids) - chunk.num_rows, len(token_ids))
    return StepBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        query_starts=query_starts,
        context_lens=[chunk.end for chunk in chunks],
        block_tables=[chunk.sequence.block_ids[: num_blocks_for(chunk.end, block_size)] for chunk in chunks],
        logits_rows=torch.tensor(rows, dtype=torch.int64),
    )


class DraftKV(Protocol):
    """Give access to the pool of a draft model."""

    @property
    def tensor(self) -> Tensor: ...

    @property
    def num_bytes(self) -> int:
        """Return the memory that the pool takes besides the target's."""
        ...

    def num_valid(self, sequence: Sequence) -> int:
        """Return how many of the sequence's first tokens have their KV here."""
        ...

    def wrote(self, chunk: Chunk) -> None:
        """Record that the KV of the chunk's tokens is in the pool, like that of the tokens before them."""
        ...


def draft_shape(loaded: LoadedModel, num_blocks: int, block_size: int) -> KVShape:
    """Return the shape of a draft model's pool beside one of so many blocks."""
    config, dtype = loaded.config, loaded.kv_dtype
    head_size = kv_head_size(config.pool_dim, dtype)
    return KVShape(config.num_layers, num_blocks, block_size, config.pool_heads, head_size, dtype)


class ParallelKV:
    """Own a pool for a draft model, beside a target's pool of a given shape."""

    def __init__(self, loaded: LoadedModel, target: KVShape, device: str = "cpu") -> None:
        """Allocate the pool. Raises DoesNotFit, with the numbers."""
        shape = draft_shape(loaded, target.num_blocks, target.block_size)
        _check_fits(shape, device)
        self._pool = KVPool(shape, device, shared=False)
        self._block_size = shape.block_size
        self._labels = np.zeros((shape.num_blocks, shape.block_size), np.int64)
        self._flat_labels = self._labels.reshape(-1)
        self._known: WeakKeyDictionary[Sequence, array[int]] = WeakKeyDictionary()  # the expected labels of its tokens

    @property
    def tensor(self) -> Tensor:
        return self._pool.tensor

    @property
    def num_bytes(self) -> int:
        return self._pool.shape.num_bytes

    def close(self) -> None:
        """Free the memory; idempotent."""
        self._pool.close()

    def num_valid(self, sequence: Sequence) -> int:
        known = self._known_labels(sequence)
        count = min(len(known), len(sequence.block_ids) * self._block_size)
        if not count:
            return 0
        labels = self._labels[sequence.block_ids[: num_blocks_for(count, self._block_size)]].reshape(-1)[:count]
        is_same = labels == np.frombuffer(known, np.int64, count)
        return count if is_same.all() else int(is_same.argmin())

    def wrote(self, chunk: Chunk) -> None:
        sequence, before = chunk.sequence, chunk.first - 1
        label = _root(sequence)
        if chunk.first:
            label = int(self._labels[sequence.block_ids[before // self._block_size], before % self._block_size])
        self._flat_labels[chunk.slots(self._block_size)] = _labels_behind(label, chunk.token_ids)
        self._pool.reach(max(sequence.block_ids[: num_blocks_for(chunk.end, self._block_size)]))

    def _known_labels(self, sequence: Sequence) -> array[int]:
        known = self._known.get(sequence)
        if known is None:
            known = self._known[sequence] = array("q")
        if len(known) < sequence.num_tokens:
            last = known[-1] if known else _root(sequence)
            known.extend(_labels_behind(last, sequence.tokens(len(known), sequence.num_tokens)))
        return known


class TargetKV:
    """Use the target's own pool, for a draft model that is its first layers."""

    num_bytes = 0

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def num_valid(self, sequence: Sequence) -> int:
        return sequence.num_computed

    def wrote(self, chunk: Chunk) -> None:
        """Do nothing: the draft was written after the computed tokens, where verification writes the same and more."""


def _root(sequence: Sequence) -> int:
    """Return the label in front of the first token. Tenants share nothing."""
    return hash(sequence.group.request.block_root)


def _labels_behind(label: int, token_ids: tuple[int, ...]) -> list[int]:
    labels = []
    for token_id in token_ids:
        label = hash((label, token_id))
        labels.append(label)
    return labels


def _check_fits(shape: KVShape, device: str) -> None:
    free = free_memory(device)
    if shape.num_bytes > free:
        raise DoesNotFit(
            f"draft_model: its KV pool needs {shape.num_bytes / MIB:,.0f} MiB ({shape.num_blocks} blocks, as the target's), "
            f"{device} has {free / MIB:,.0f} MiB free; lower num_blocks or kv_memory_mb, or take a smaller draft model"
        )


# Slots for draft tokens


# room(sequence, num_tokens, num_kept): the slots of the sequence's first `num_tokens` tokens are there, and those that are not
# computed yet are writable for it. False: they are not, and nothing changed; then nothing is drafted. `num_kept`: blocks that
# stay free if one is taken.
Room = Callable[[Sequence, int, int], bool]


def room_in(allocator: BlockManager, num_running: Callable[[], int] = lambda: 0) -> Room:
    """Return a Room that leaves each of the running sequences, if their number is given, another block as well: a draft never
    causes a preemption, now or in the step that verifies it.

    The scheduler copies a block that others share, in the step that computes the sequence's next token.
    """

    def make_room(sequence: Sequence, num_tokens: int, num_kept: int) -> bool:
        with allocator.lock:  # drafts are made outside of it
            num_new = max(0, allocator.num_blocks_for(num_tokens) - len(sequence.block_ids))
            num_shared = allocator.num_missing(sequence, num_tokens - sequence.num_computed) - num_new
            if num_shared or (num_new and num_new + max(num_kept, num_running()) > allocator.pool.num_free):
                return False
            return allocator.grow(sequence, num_tokens)

    return make_room
