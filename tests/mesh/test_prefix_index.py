"""Two routers, two decode workers, one Redis: a router finds prefixes that it never sent anywhere."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdmesh.runtime.files import cache_root_of
from pdmesh.runtime.registry.redis_server import EmbeddedRedis
from pdmesh.text.block_hash import hash_prompt, short_name
from pdmesh.v1 import common_pb2, mesh_pb2, mesh_pb2_grpc
from router.config import RouterConfig
from router.main import Router
from tests.mesh import oracle
from tests.router.mesh import running_router
from tests.support.waiting import eventually
from tests.support.worker_mesh import Peer, load_tiny, running_worker

SYSTEM_PROMPTS = [oracle.prompt_of(number, 200) for number in (300, 301)]
NUM_BLOCKS = 200 // 16


@dataclass
class Meshed:
    """All in this process, with real gRPC and Redis between them."""

    workers: list[Peer]
    routers: list[tuple[Router, mesh_pb2_grpc.MeshAsyncStub]]

    async def ask(self, router: int, prompt: Sequence[int]) -> mesh_pb2.Completed:
        request = mesh_pb2.GenerateRequest(
            tokens=mesh_pb2.TokenIds(ids=prompt),
            sampling=common_pb2.SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True),
        )
        async for message in self.routers[router][1].Generate(request, timeout=30):
            if message.WhichOneof("event") == "completed":
                return message.completed
        raise AssertionError("the stream ended before the answer did")

    def holders(self, router: int, prompt: Sequence[int]) -> set[str]:
        """Workers that a router knows to hold all of a system prompt, by name."""
        info = self.workers[0].info
        root = cache_root_of(info.identity, info.layout.kv_dtype, tenant="", cache_salt="")
        names = [short_name(block) for block in hash_prompt(root, prompt, 16)]
        matched = self.routers[router][0].core.prefixes.told.match(names)
        by_key = {(peer.info.address, peer.info.epoch): peer.info.worker_id for peer in self.workers}
        return {by_key[key] for key, blocks in matched.items() if blocks == NUM_BLOCKS}


@pytest.fixture
async def meshed(tiny: Path) -> AsyncIterator[Meshed]:
    model = load_tiny(tiny)
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(EmbeddedRedis())
        names = ("d0", "d1")
        workers = [
            await stack.enter_async_context(running_worker(model, roles=("decode",), worker_id=name, redis=redis.url))
            for name in names
        ]
        addresses = tuple(peer.info.address for peer in workers)
        config = RouterConfig(
            port=0,
            models=(f"tiny={tiny}",),
            workers=addresses,
            redis=redis.url,
            drain_grace_s=0.3,
            linger_s=0.0,
            policy="prefix",  # the default also weighs measured step times, which differ beside other tests
        )
        routers = [await stack.enter_async_context(running_router(config)) for _ in range(2)]
        await eventually(lambda: all(sum(v.decode for v in router.core.fleet.views()) == 2 for router, _ in routers))
        yield Meshed(workers, routers)


async def test_the_second_router_finds_what_the_first_has_sent(meshed: Meshed) -> None:
    """Each system prompt is on one worker, and not both on the one that a router without an index would take."""
    owner, first, second = dict[int, str](), meshed.routers[0][0], meshed.routers[1][0]
    for number, (prompt, peer) in enumerate(zip(SYSTEM_PROMPTS, meshed.workers, strict=True)):
        others = [other for other in meshed.workers if other is not peer]
        for other in others:
            other.worker.gate.draining = True
        await eventually(lambda: len(first.core.fleet.views()) == 1)
        completed = await meshed.ask(0, [*prompt, 5, 6, 7])
        owner[number] = completed.timings.decode_worker
        assert owner[number] == peer.info.worker_id
        for other in others:
            other.worker.gate.draining = False
        await eventually(lambda: len(first.core.fleet.views()) == 2)
    await eventually(lambda: all(meshed.holders(1, prompt) == {owner[number]} for number, prompt in enumerate(SYSTEM_PROMPTS)))
    await eventually(lambda: len(second.core.fleet.views()) == 2)
    for number, prompt in enumerate(SYSTEM_PROMPTS):
        completed = await meshed.ask(1, [*prompt, 90 + number, 8, 9])
        assert completed.timings.decode_worker == owner[number]
        assert completed.usage.cached_tokens == NUM_BLOCKS * 16
