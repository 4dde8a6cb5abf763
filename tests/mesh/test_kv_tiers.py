"""KV on tiers: what a worker computed before it was restarted, or before its pool lost it, comes back from host memory or disk."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.tiers.settings import TierConfig
from kvtransfer.tiers.tiers import KVTiers
from pdmesh.v1 import common_pb2, mesh_pb2
from router.config import RouterConfig
from router.telemetry.timings import RequestTimings
from tests.mesh import oracle
from tests.router.mesh import Answer, Mesh, running_router
from tests.support.waiting import eventually
from tests.support.worker_mesh import Model, Peer, load_tiny, running_worker

BLOCK = 16
REMOTE, LOCAL = mesh_pb2.PREFILL_MODE_REMOTE, mesh_pb2.PREFILL_MODE_LOCAL


@pytest.fixture(scope="module")
def model(tiny: Path) -> Model:
    return load_tiny(tiny)


class Pair:
    """A prefill worker and a decode worker, and a router in front of both."""

    def __init__(self, mesh: Mesh, prefill: Peer, decode: Peer) -> None:
        self.mesh, self.prefill, self.decode = mesh, prefill, decode

    async def answer(
        self, prompt: Sequence[int], mode: mesh_pb2.PrefillMode.ValueType = REMOTE, salt: str = "", **sampling: Any
    ) -> Answer:
        wanted = common_pb2.SamplingParams(**{"max_tokens": 40, "temperature": 0.0, "ignore_eos": True, **sampling})
        options = mesh_pb2.RequestOptions(mode=mode, cache_salt=salt)
        request = mesh_pb2.GenerateRequest(tokens=mesh_pb2.TokenIds(ids=prompt), sampling=wanted, options=options)
        return await self.mesh.generate(request)


@asynccontextmanager
async def running_pair(model: Model, tiny: Path, tiers: TierConfig, **overrides: Any) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        prefill, decode = [
            await stack.enter_async_context(
                running_worker(model, roles=(role,), worker_id=role, kv_pull="off", tiers=tiers, transports=("tcp",), **overrides)
            )
            for role in ("prefill", "decode")
        ]
        workers = (prefill.info.address, decode.info.address)
        config = RouterConfig(
            port=0, models=(f"tiny={tiny}",), workers=workers, drain_grace_s=0.3, linger_s=0.0, hedge_share=0.0
        )
        router, stub = await stack.enter_async_context(running_router(config))
        await eventually(router.core.fleet.ready)
        yield Pair(Mesh(router, stub, {}), prefill, decode)


def tiers_of(peer: Peer) -> KVTiers:
    found = peer.worker.tiers
    assert found is not None
    return found


async def written(peer: Peer, num_blocks: int) -> None:
    """Wait until the last tier has so many blocks."""
    await eventually(lambda: tiers_of(peer).tiers[-1].num_blocks >= num_blocks)


def on_disk(tmp_path: Path, **settings: Any) -> TierConfig:
    return TierConfig(kv_disk=str(tmp_path / "kv"), kv_restore="always", **settings)


@pytest.mark.parametrize("mode", [REMOTE, LOCAL])
async def test_a_restarted_worker_finds_its_blocks_again(
    model: Model, tiny: Path, tmp_path: Path, mode: mesh_pb2.PrefillMode.ValueType, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[common_pb2.PrefillTimings]()
    prefilled = RequestTimings.prefilled

    def watched(self: RequestTimings, timings: common_pb2.PrefillTimings) -> None:
        seen.append(timings)
        prefilled(self, timings)

    monkeypatch.setattr(RequestTimings, "prefilled", watched)
    prompt = oracle.prompt_of(1, 100)
    async with running_pair(model, tiny, on_disk(tmp_path)) as pair:
        computes = pair.prefill if mode is REMOTE else pair.decode
        first = await pair.answer(prompt, mode)
        assert tiers_of(computes).counts.num_tokens == 0
        await written(computes, 100 // BLOCK)
    async with running_pair(model, tiny, on_disk(tmp_path)) as pair:
        computes = pair.prefill if mode is REMOTE else pair.decode
        before = computes.engine.stats().num_prefilled_tokens
        second = await pair.answer(prompt, mode)
        assert second.tokens() == first.tokens()
        assert computes.engine.stats().num_prefilled_tokens - before == 100 - 100 // BLOCK * BLOCK
        assert tiers_of(computes).counts.num_tokens == 100 // BLOCK * BLOCK
        assert seen[-1].num_restored_tokens == 100 // BLOCK * BLOCK and seen[-1].restore_ns > 0
        assert seen[-1].num_computed_tokens == 100 - 100 // BLOCK * BLOCK
