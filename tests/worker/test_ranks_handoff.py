"""Workers whose ranks have a pool each, of their own heads, hand KV over in both directions; the tokens are those of one engine.

Ranks are real processes, with gloo between them. Memory of the host stands for their devices' memory: no process sees another's.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import torch

from kvtransfer.staging import StagedMemory
from pdmesh.engine.engine import Engine
from pdmesh.engine.kv_cache.staging import StagingSizes
from pdmesh.engine.kv_cache.streams import InOrder
from pdmesh.engine.loader.loader import load_model
from pdmesh.v1 import common_pb2, decode_pb2, prefill_pb2
from pdmesh.worker.kv_memory import stage, staged_memory
from tests.support.mini_router import MiniRouter
from tests.support.waiting import eventually
from tests.support.worker_mesh import LOCAL, Model, Peer, only_transport, reference, running_worker, token_request

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="not tried elsewhere yet")
WAYS = [("p1", "d2", "shm"), ("p2", "d1", "tcp"), ("p2", "d2", "tcp")]
Way = Callable[[Engine], StagedMemory | None]
PROMPT = [10 + (7 * i) % 200 for i in range(53)]


@pytest.fixture(autouse=True)
def pools_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdmesh.engine.parallel.load.ranks_share_pool", lambda config: False)


def in_small_pieces(engine: Engine) -> StagedMemory | None:
    """Two each way, of two blocks of a layer; a pool with all heads is not staged."""
    if engine.ranks_with_pools is None:
        return None
    small = StagingSizes(num_pieces=2, piece_bytes=8 * engine.kv.bytes_per_layer_block)
    return stage(engine, InOrder(), small, small)


@asynccontextmanager
async def workers(model: Model, way: Way, **degrees: int) -> AsyncIterator[dict[str, Peer]]:
    """By name, each with as many ranks. All models are loaded first: ranks' sockets are open as long as the model is there."""
    num_threads = torch.get_num_threads()
    settings: dict[str, dict[str, Any]] = {
        name: {"backend": "torch", "num_threads": 1, "tensor_parallel": degree} for name, degree in degrees.items()
    }
    models = {name: Model(model.folder, load_model(model.engine_config(**each))) for name, each in settings.items()}
    try:
        async with AsyncExitStack() as stack:
            yield {
                name: await stack.enter_async_context(running_worker(models[name], engine=each, stage=way, worker_id=name))
                for name, each in settings.items()
            }
    finally:
        torch.set_num_threads(num_threads)


async def test_any_degree_hands_to_any_other(model: Model) -> None:
    """Prompts of their own, so that all of each is pushed; one that begins as another, so that a part of it is; and one LOCAL."""
    prompts = [[first, *PROMPT] for first in (1, 2, 3)]
    async with workers(model, staged_memory, p1=1, p2=2, d1=1, d2=2) as peers:
        assert {peer.info.layout.tensor_parallel_size for peer in peers.values()} == {1}
        pushed = [
            await handed_off(model, peers[prefill], peers[decode], token_request(prompt), transport)
            for (prefill, decode, transport), prompt in zip(WAYS, prompts, strict=True)
        ]
        assert len(set(pushed)) == 1 and pushed[0] > 0
        again = token_request([*prompts[2][:40], *range(100, 117)], temperature=0.9, n=2)
        assert 0 < await handed_off(model, peers["p2"], peers["d2"], again, "grpc") < pushed[0]
        router, local = MiniRouter(), token_request(prompts[2])
        await router.attach(peers["p2"])
        await router.submit(peers["p2"], "local", local, mode=LOCAL)
        await router.until_finished("local")
        assert router.of("local").output() == reference(model, local)[0]
        await router.detach()


async def handed_off(model: Model, prefiller: Peer, decoder: Peer, request: common_pb2.TokenRequest, transport: str) -> int:
    """The bytes of it."""
    router, name = MiniRouter(), f"{transport}-{request.sampling.n}-{request.prompt_token_ids[0]}"
    await router.attach(decoder)
    reservation = only_transport(await router.submit(decoder, name, request), transport)
    _, outcome = await router.prefill(prefiller, decoder, name, request, reservation)
    assert (outcome.status, outcome.transport) == (prefill_pb2.HANDOFF_STATUS_COMMITTED, transport), outcome
    await router.until_finished(name, request.sampling.n)
    assert [router.of(name).output(choice) for choice in range(request.sampling.n)] == reference(model, request)
    await router.detach()
    return outcome.kv_bytes


async def test_cancelled_while_a_rank_is_in_a_copy_and_killed_in_the_next(model: Model) -> None:
    """Blocks go back when every rank is through. A rank that dies ends the worker, which says which."""
    async with workers(model, in_small_pieces, p1=1, d2=2) as peers:
        router, decoder = MiniRouter(), peers["d2"]
        ranks = decoder.engine.ranks_with_pools
        assert ranks is not None
        [pid] = ranks.ranks.pids
        await router.attach(decoder)
        async with paused_in_a_scatter(router, peers, "cancelled", pid):
            cancel = asyncio.ensure_future(decoder.decode.Cancel(decode_pb2.CancelRequest(request_id="cancelled")))
            await asyncio.sleep(0.2)
            assert not decoder.is_whole()
            os.kill(pid, signal.SIGCONT)
            await cancel
            await decoder.until_whole()
        assert await handed_off(model, peers["p1"], decoder, token_request(PROMPT[1:]), "tcp") > 0
        async with paused_in_a_scatter(router, peers, "killed", pid):
            os.kill(pid, signal.SIGKILL)
            await eventually(lambda: decoder.failures)
            await decoder.decode.Cancel(decode_pb2.CancelRequest(request_id="killed"))
        await router.detach()
        assert [str(each) for each in decoder.failures] == [f"tensor_parallel: rank 1 (process {pid}) ended with signal 9"]
        decoder.failures.clear()


@asynccontextmanager
async def paused_in_a_scatter(router: MiniRouter, peers: dict[str, Peer], name: str, pid: int) -> AsyncIterator[None]:
    """The push of a request into d2 whose rank `pid` stands still; in the end it has not been committed."""
    request = token_request([len(name), *PROMPT])
    reservation = only_transport(await router.submit(peers["d2"], name, request), "tcp")
    os.kill(pid, signal.SIGSTOP)
    push = asyncio.create_task(router.prefill(peers["p1"], peers["d2"], name, request, reservation))
    staged = peers["d2"].worker.engine.memory
    assert isinstance(staged, StagedMemory)
    await eventually(lambda: staged._arrivals.staging.num_free == 0)
    yield
    _, outcome = await push
    assert outcome.status != prefill_pb2.HANDOFF_STATUS_COMMITTED
    await eventually(lambda: staged._arrivals.staging.num_free == 2)
