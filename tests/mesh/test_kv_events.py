"""A gateway subscribes to the KV events of a mesh: what it rebuilds is what all workers hold together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import pytest

from pdmesh.runtime.errors import ResourceExhausted
from pdmesh.runtime.rpc.channel import connect
from pdmesh.text.block_hash import SHORT_NAME_BYTES
from pdmesh.third_party.vllm import smg_common_pb2 as common_pb
from pdmesh.third_party.vllm import vllm_engine_pb2 as pb
from pdmesh.third_party.vllm.vllm_engine_pb2_grpc import VllmEngineStub
from pdmesh.v1 import worker_pb2
from pdmesh.worker.kv_events.settings import KVEventSettings
from router.config import RouterConfig
from router.kv_events import follower
from router.main import Router
from tests.mesh import oracle
from tests.router.api_keys import add_key, bearer
from tests.router.mesh import running_router
from tests.support.waiting import eventually
from tests.support.worker_mesh import Model, Peer, load_tiny, running_worker

if TYPE_CHECKING:
    from pdmesh.third_party.vllm.vllm_engine_pb2_grpc import VllmEngineAsyncStub

ON = KVEventSettings(kv_events=True)
PROMPTS = [oracle.prompt_of(number, 120) for number in range(500, 508)]


@dataclass
class Gateway:
    """Rebuilds the mesh's cache as SMG does: by sequence number, a snapshot replaces all."""

    stub: VllmEngineAsyncStub
    metadata: tuple[tuple[str, str], ...] = ()
    blocks: dict[int, tuple[int, ...]] = field(default_factory=dict)
    salts: set[str] = field(default_factory=set)
    sequence: int = 0
    num_snapshots: int = 0

    def take(self, batch: common_pb.KvEventBatch) -> None:
        assert batch.sequence_number == self.sequence + 1
        self.sequence = batch.sequence_number
        for event in batch.events:
            assert (event.event_id == 0) == batch.HasField("snapshot")
            if event.HasField("cleared"):
                self.blocks, self.num_snapshots = {}, self.num_snapshots + 1
            for name in event.removed.block_hashes:
                del self.blocks[name]
            assert not event.stored.HasField("parent_block_hash") or event.stored.parent_block_hash in self.blocks
            self.salts |= {event.stored.cache_salt} if event.stored.cache_salt else set()
            for block in event.stored.blocks:
                assert block.block_hash not in self.blocks
                assert len(block.token_ids) == block.block_size
                self.blocks[block.block_hash] = tuple(block.token_ids)

    async def follow(self) -> None:
        async for batch in self.stub.SubscribeKvEvents(common_pb.SubscribeKvEventsRequest(), metadata=self.metadata):
            self.take(batch)

    def knows(self, names: set[int]) -> bool:
        return {name % (1 << 8 * SHORT_NAME_BYTES) for name in self.blocks} == names


@asynccontextmanager
async def following(gateway: Gateway) -> AsyncIterator[None]:
    task = asyncio.create_task(gateway.follow())
    try:
        await eventually(lambda: gateway.num_snapshots or task.done())
        yield
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@dataclass
class Mesh:
    model: Model
    folder: Path
    workers: list[Peer]
    router: Router
    stub: VllmEngineAsyncStub

    async def ask(self, prompt: Sequence[int], metadata: tuple[tuple[str, str], ...] = ()) -> None:
        params = pb.SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        request = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=prompt), sampling_params=params)
        async for _ in self.stub.Generate(request, timeout=60, metadata=metadata):
            pass

    async def held(self) -> set[int]:
        """What ListBlocks of all workers says."""
        lists = [peer.control.ListBlocks(worker_pb2.ListBlocksRequest()) for peer in self.workers]
        return {name for call in lists for part in [each async for each in call] for name in part.blocks}


@asynccontextmanager
async def mesh_of(folder: Path, *settings: KVEventSettings, api_keys: str = "") -> AsyncIterator[Mesh]:
    model = load_tiny(folder)
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(
                running_worker(model, worker_id=f"w{number}", engine={"num_blocks": 24}, kv_event_settings=on)
            )
            for number, on in enumerate(settings)
        ]
        addresses = tuple(peer.info.address for peer in workers)
        config = RouterConfig(port=0, models=(f"tiny={folder}",), workers=addresses, drain_grace_s=0.3, linger_s=0.0)
        router, _ = await stack.enter_async_context(running_router(replace(config, api_keys=api_keys)))
        await eventually(lambda: sum(view.decode for view in router.core.fleet.views()) == len(workers))
        channel = await stack.enter_async_context(connect(f"127.0.0.1:{router.server.port}"))
        stub: VllmEngineAsyncStub = VllmEngineStub(channel)
        yield Mesh(model, folder, workers, router, stub)


async def test_a_gateway_knows_what_all_workers_hold(tiny: Path) -> None:
    """Those that came before it, and what is evicted; a worker that goes takes its own with it."""
    async with mesh_of(tiny, ON, ON) as mesh:
        await mesh.ask(PROMPTS[0])
        gateway = Gateway(mesh.stub)
        async with following(gateway):
            assert gateway.knows(await mesh.held())
            assert tuple(PROMPTS[0][:16]) in gateway.blocks.values()
            await asyncio.gather(*map(mesh.ask, PROMPTS))
            held = await mesh.held()
            await eventually(lambda: gateway.knows(held))
            assert gateway.num_snapshots == 1
            assert not gateway.salts
            lost = mesh.workers.pop()
            lost.worker.gate.draining = True
            await lost.worker.stop()
            rest = await mesh.held()
            await eventually(lambda: gateway.knows(rest), timeout_s=60)


async def test_a_subscriber_that_falls_behind_begins_again(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "MAX_WAITING_BLOCKS", 2)
    async with mesh_of(tiny, ON) as mesh:
        gateway = Gateway(mesh.stub)
        async with following(gateway):
            await mesh.ask(PROMPTS[0])
            held = await mesh.held()
            await eventually(lambda: gateway.knows(held))
            assert gateway.num_snapshots > 1


async def test_subscribers_are_refused_with_what_to_do(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with mesh_of(tiny, KVEventSettings()) as mesh:
        await refused(mesh, common_pb.SubscribeKvEventsRequest(), grpc.StatusCode.UNIMPLEMENTED, "--kv-events")
        resumed = common_pb.SubscribeKvEventsRequest(start_sequence_number=7)
        await refused(mesh, resumed, grpc.StatusCode.OUT_OF_RANGE, "subscribe from 0")
        monkeypatch.setattr(follower, "MAX_READERS", 0)
        await refused(mesh, common_pb.SubscribeKvEventsRequest(), grpc.StatusCode.RESOURCE_EXHAUSTED, "subscribers")


async def refused(
    mesh: Mesh,
    request: common_pb.SubscribeKvEventsRequest,
    code: grpc.StatusCode,
    words: str,
    metadata: tuple[tuple[str, str], ...] = (),
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await mesh.stub.SubscribeKvEvents(request, metadata=metadata).read()
    assert caught.value.code() == code
    assert words in (caught.value.details() or "")


async def test_only_an_admin_key_may_read_and_other_tenants_have_a_salt(tiny: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    add_key(keys, "gate", tenant="a", admin=True)
    add_key(keys, "a", tenant="a")
    add_key(keys, "b", tenant="b")
    async with mesh_of(tiny, ON, api_keys=str(keys)) as mesh:
        asked = common_pb.SubscribeKvEventsRequest()
        await refused(mesh, asked, grpc.StatusCode.UNAUTHENTICATED, "API key")
        await refused(mesh, asked, grpc.StatusCode.PERMISSION_DENIED, "admin", bearer("a"))
        gateway = Gateway(mesh.stub, bearer("gate"))
        async with following(gateway):
            await mesh.ask(PROMPTS[0], bearer("a"))
            held = await mesh.held()
            await eventually(lambda: gateway.knows(held))
            assert not gateway.salts
            await mesh.ask(PROMPTS[0], bearer("b"))
            held = await mesh.held()
            await eventually(lambda: gateway.knows(held))
            assert len(gateway.salts) == 1


async def test_too_many_blocks_end_the_stream(tiny: Path) -> None:
    async with mesh_of(tiny, ON) as mesh:
        await mesh.ask(PROMPTS[0])
        blocks = follower.BlockFollower(mesh.router.core.fleet, "tiny", 2)
        with pytest.raises(ResourceExhausted, match="--prefix-index-blocks"):
            async for _ in blocks.read():
                pass
        assert not blocks._followed
