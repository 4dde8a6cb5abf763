"""WatchBlocks: the feed of KV events on the wire, for routers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import chain as joined

from pdmesh.runtime.errors import FailedPrecondition
from pdmesh.text.block_hash import short_name, short_names
from pdmesh.v1 import worker_pb2
from pdmesh.worker.kv_events.feed import BlockFeed, Chain, Update

PART_TOKENS = 1 << 15  # some 100 KiB
PART_NAMES = 1 << 15


async def watch_blocks(feed: BlockFeed | None, epoch: int) -> AsyncIterator[worker_pb2.BlockEvents]:
    """Yield the full list of blocks, then changes. Raises FailedPrecondition without a feed, ResourceExhausted, Unavailable."""
    if feed is None:
        raise FailedPrecondition("kv_events", "this worker keeps no token ids of its blocks; start it with --kv-events")
    with feed.reader() as backlog:
        async for update in feed.read(backlog):
            for message in messages_of(update, epoch):
                yield message


def messages_of(update: Update, epoch: int) -> Iterator[worker_pb2.BlockEvents]:
    """Yield the messages of an update, each of a bounded size. A list has one at least."""
    for start in range(0, len(update.removed), PART_NAMES):
        removed = map(short_name, update.removed[start : start + PART_NAMES])
        yield worker_pb2.BlockEvents(epoch=epoch, removed=removed)
    parts = list(parts_of(update.chains))
    if update.is_list and not parts:
        parts = [[]]
    for number, part in enumerate(parts, start=1):
        stored = map(_stored, part)
        is_last = update.is_list and number == len(parts)
        yield worker_pb2.BlockEvents(epoch=epoch, is_list=update.is_list, is_last=is_last, stored=stored)


def parts_of(chains: Sequence[Chain]) -> Iterator[list[Chain]]:
    """Yield the chains in parts of at most PART_TOKENS tokens, or one block; long chains are cut."""
    part: list[Chain] = []
    room = PART_TOKENS
    for piece in joined.from_iterable(map(_pieces, chains)):
        num_tokens = sum(len(block.token_ids) for block in piece)
        if part and num_tokens > room:
            yield part
            part, room = [], PART_TOKENS
        part.append(piece)
        room -= num_tokens
    if part:
        yield part


def _pieces(chain: Chain) -> Iterator[Chain]:
    most = max(1, PART_TOKENS // max(1, len(chain[0].token_ids)))
    for start in range(0, len(chain), most):
        yield chain[start : start + most]


def _stored(chain: Chain) -> worker_pb2.StoredBlocks:
    first = chain[0]
    return worker_pb2.StoredBlocks(
        parent=None if first.parent is None else short_name(first.parent),
        blocks=short_names([block.block_hash for block in chain]),
        token_ids=joined.from_iterable(block.token_ids for block in chain),
        cache_root=first.cache_root,
        adapter=first.adapter,
    )
