"""SubscribeKvEvents: the blocks of the mesh as the KV events of one engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import grpc

from pdmesh.runtime.errors import MeshError
from pdmesh.text.block_hash import in_chains
from pdmesh.third_party.vllm import smg_common_pb2 as common_pb
from router.kv_events.follower import MeshUpdate
from router.kv_events.mesh_blocks import MeshBlock

PART_BLOCKS = 2048  # some 150 KiB of blocks with 16 tokens
Part: TypeAlias = list[Sequence[MeshBlock]]
"""Chains of blocks that follow each other in a prompt, at most PART_BLOCKS blocks in all."""
MEDIUM = "GPU"  # vLLM's name for the pool that an engine computes in, also on a CPU


def check(request: common_pb.SubscribeKvEventsRequest) -> None:
    """Raise MeshError (OUT_OF_RANGE) for a stream that would resume: nothing is kept between calls."""
    if request.start_sequence_number:
        problem = (
            f"{request.start_sequence_number}: nothing is kept to resume from; subscribe from 0, which begins with a snapshot"
        )
        raise MeshError(problem, code=grpc.StatusCode.OUT_OF_RANGE, field="start_sequence_number")


async def parts_of(update: MeshUpdate) -> list[Part]:
    """Return what an update stores, parents first. A large one is ordered in a thread: the router's loop serves others."""
    stored = update.changes.stored
    return await asyncio.to_thread(_ordered, stored) if len(stored) > PART_BLOCKS else _ordered(stored)


class EventStream:
    """Make the batches of one subscriber, numbered from 1 without a gap."""

    def __init__(self, is_plain: Callable[[bytes], bool]) -> None:
        """`is_plain(cache_root)`: the subscriber's requests without a salt share these blocks."""
        self._is_plain = is_plain
        self._sequence = 0
        self._num_events = 0

    def batches(self, update: MeshUpdate, parts: Sequence[Part], now_s: float) -> Iterator[common_pb.KvEventBatch]:
        """Yield an update: a snapshot, or changes. `parts`: what `parts_of` makes of it; `now_s`: seconds of Unix time."""
        if update.is_list:
            yield from self._snapshot(parts or [[]], len(update.changes.stored), now_s)
            return
        removed = update.changes.removed
        for start in range(0, len(removed), PART_BLOCKS):
            names = [_signed(name) for name in removed[start : start + PART_BLOCKS]]
            gone = common_pb.KvBlocksRemoved(
                block_hashes=names, tier=common_pb.KV_CACHE_TIER_DEVICE, medium=MEDIUM, locality=common_pb.KV_CACHE_LOCALITY_LOCAL
            )
            yield self._batch([common_pb.KvCacheEvent(event_id=self._next_event(), removed=gone)], now_s)
        for part in parts:
            events = [common_pb.KvCacheEvent(event_id=self._next_event(), stored=self._stored(chain)) for chain in part]
            yield self._batch(events, now_s)

    def _snapshot(self, parts: Sequence[Part], num_blocks: int, now_s: float) -> Iterator[common_pb.KvEventBatch]:
        for index, part in enumerate(parts):
            events = [] if index else [common_pb.KvCacheEvent(cleared=common_pb.KvCacheCleared())]
            events += [common_pb.KvCacheEvent(stored=self._stored(chain)) for chain in part]
            batch = self._batch(events, now_s)
            batch.snapshot.CopyFrom(common_pb.KvSnapshotChunk(index=index, count=len(parts), blocks=num_blocks))
            yield batch

    def _batch(self, events: Sequence[common_pb.KvCacheEvent], now_s: float) -> common_pb.KvEventBatch:
        self._sequence += 1
        return common_pb.KvEventBatch(sequence_number=self._sequence, timestamp=now_s, events=events, dp_rank=0)

    def _next_event(self) -> int:
        self._num_events += 1
        return self._num_events

    def _stored(self, chain: Sequence[MeshBlock]) -> common_pb.KvBlocksStored:
        first = chain[0]
        return common_pb.KvBlocksStored(
            blocks=[
                common_pb.KvBlock(block_hash=_signed(block.name), token_ids=block.token_ids, block_size=len(block.token_ids))
                for block in chain
            ],
            parent_block_hash=None if first.parent is None else _signed(first.parent),
            tier=common_pb.KV_CACHE_TIER_DEVICE,
            medium=MEDIUM,
            locality=common_pb.KV_CACHE_LOCALITY_LOCAL,
            lora_name=first.adapter or None,
            cache_salt=None if self._is_plain(first.cache_root) else first.cache_root.hex(),
        )


def _ordered(blocks: Sequence[MeshBlock]) -> list[Part]:
    return list(_parts(in_chains(blocks, lambda block: block.name, lambda block: block.parent)))


def _parts(chains: Iterable[Sequence[MeshBlock]]) -> Iterator[Part]:
    """Yield chains in parts of at most PART_BLOCKS blocks; long chains are cut."""
    part: Part = []
    room = PART_BLOCKS
    for chain in chains:
        for start in range(0, len(chain), PART_BLOCKS):
            piece = chain[start : start + PART_BLOCKS]
            if part and len(piece) > room:
                yield part
                part, room = [], PART_BLOCKS
            part.append(piece)
            room -= len(piece)
    if part:
        yield part


def _signed(name: int) -> int:
    """Return the 64 bits of a name as a signed number."""
    return name - (1 << 64) if name >> 63 else name
