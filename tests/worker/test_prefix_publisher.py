"""What a worker tells of its prefix cache: through Redis, and on request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from pdmesh.runtime.files import cache_root_of
from pdmesh.runtime.registry.block_stream import BlockStream
from pdmesh.runtime.registry.redis_server import EmbeddedRedis
from pdmesh.text.block_hash import hash_prompt, short_name
from pdmesh.v1 import worker_pb2
from pdmesh.worker.kv_events import prefix_publisher
from tests.support.mini_router import MiniRouter
from tests.support.worker_mesh import LOCAL, Model, Peer, running_worker, token_request

PROMPT = [10 + (7 * i) % 200 for i in range(60)]


@pytest.fixture
async def redis_server() -> AsyncIterator[EmbeddedRedis]:
    async with EmbeddedRedis() as server:
        yield server


async def listed(peer: Peer) -> tuple[int, set[int]]:
    """Sequence and names, from all parts."""
    parts = [part async for part in peer.control.ListBlocks(worker_pb2.ListBlocksRequest())]
    assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert {(part.epoch, part.sequence) for part in parts} == {(peer.info.epoch, parts[0].sequence)}
    return parts[0].sequence, {name for part in parts for name in part.blocks}


async def serve(peer: Peer, *prompts: list[int]) -> None:
    router = MiniRouter()
    await router.attach(peer)
    for number, prompt in enumerate(prompts):
        await router.submit(peer, f"r{number}", token_request(prompt, max_tokens=4), mode=LOCAL)
        await router.until_finished(f"r{number}")
    await router.detach()


def names_of(peer: Peer, prompt: list[int]) -> set[int]:
    root = cache_root_of(peer.info.identity, peer.info.layout.kv_dtype, tenant="", cache_salt="")
    return set(map(short_name, hash_prompt(root, prompt, peer.info.layout.block_size)))


async def test_lists_the_blocks_of_what_was_asked(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a registry, too, and in parts."""
    monkeypatch.setattr(prefix_publisher, "PART_NAMES", 2)
    async with running_worker(model) as peer:
        assert await listed(peer) == (0, set())
        await serve(peer, PROMPT)
        assert await listed(peer) == (0, names_of(peer, PROMPT))


async def test_the_stream_tells_what_the_list_says(model: Model, redis_server: EmbeddedRedis) -> None:
    prompts = [[number + token for token in PROMPT] for number in range(6)]
    stream = BlockStream(redis_server.url)
    async with running_worker(model, engine={"num_blocks": 12}, redis=redis_server.url) as peer:
        source = ("w", peer.info.epoch)
        await serve(peer, *prompts)
        told: set[int] = set()
        position = 0
        while True:
            sequence, names = await listed(peer)
            if sequence == position and told == names:
                break
            for entry in await stream.read({source: position}) or []:
                assert entry.change is not None
                assert entry.sequence == position + 1
                position = entry.sequence
                told = (told | set(entry.change.stored)) - set(entry.change.evicted)
        assert names_of(peer, prompts[-1]) <= told
        assert len(told) <= 12
    await stream.stop()


async def test_without_redis_the_worker_works_and_tells_everything_later(model: Model, redis_server: EmbeddedRedis) -> None:
    await redis_server.stop()
    async with running_worker(model, redis=redis_server.url) as peer:
        await serve(peer, PROMPT)
        async with EmbeddedRedis(redis_server.port) as again:
            stream = BlockStream(again.url)
            source, told = ("w", peer.info.epoch), set[int]()
            async with asyncio.timeout(20):
                while not told >= names_of(peer, PROMPT):
                    for entry in await stream.read({source: 0}) or []:
                        assert entry.change is not None
                        told.update(entry.change.stored)
            await stream.stop()
