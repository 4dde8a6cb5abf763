"""Workers of two ranks: one drains with them, and does not outlive one; another degree is no other identity."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from pdmesh.engine.loader.loader import load_model
from pdmesh.runtime.rpc.channel import connect
from pdmesh.v1 import decode_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.support.mini_router import MiniRouter
from tests.support.waiting import alive, eventually
from tests.support.worker_mesh import LOCAL, Model, Peer, reference, running_worker, token_request
from tests.worker.test_process import PROMPT, _Remote, flags, process, ready

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="not tried elsewhere yet")
REQUEST = token_request(PROMPT, max_tokens=120)


@dataclass
class Running:
    """A worker of two ranks in the middle of an answer."""

    child: asyncio.subprocess.Process
    router: MiniRouter
    rank: int


@asynccontextmanager
async def in_the_middle(model: Model) -> AsyncIterator[Running]:
    args = flags(model.folder, "--tensor-parallel", "2", "--backend", "torch", "--max-num-batched-tokens", "16")
    async with process("pdmesh.worker", *args) as child:
        channel = connect(str((await ready(child))["address"]))
        control: worker_pb2_grpc.WorkerControlAsyncStub = worker_pb2_grpc.WorkerControlStub(channel)
        stub: decode_pb2_grpc.DecodeServiceAsyncStub = decode_pb2_grpc.DecodeServiceStub(channel)
        peer = _Remote(stub, await control.GetInfo(worker_pb2.GetInfoRequest()))
        router = MiniRouter()
        await router.attach(peer)  # type: ignore[arg-type]
        await router.submit(peer, "r1", REQUEST, mode=LOCAL)  # type: ignore[arg-type]
        await eventually(lambda: len(router.of("r1").output()) > 3)
        [rank] = _children(child.pid)
        yield Running(child, router, rank)
        await router.detach()
        await channel.close()
        await eventually(lambda: not alive(rank))


def _children(pid: int) -> list[int]:
    return [int(each) for task in Path(f"/proc/{pid}/task").glob("*/children") for each in task.read_text().split()]


async def test_it_drains_with_its_ranks(model: Model) -> None:
    """As a terminal's Ctrl-C, or a stop of the whole process group: every rank hears the signal, and the answer is finished."""
    async with in_the_middle(model) as running:
        for pid in (running.rank, running.child.pid):
            os.kill(pid, signal.SIGTERM)
        await running.router.until_finished("r1")
        assert running.router.of("r1").output() == reference(model, REQUEST)[0]
        async with asyncio.timeout(30):
            assert await running.child.wait() == 0


async def test_it_does_not_outlive_a_rank(model: Model) -> None:
    async with in_the_middle(model) as running:
        os.kill(running.rank, signal.SIGKILL)
        async with asyncio.timeout(30):
            _, stderr = await running.child.communicate()
        assert running.child.returncode == 1
        assert f"tensor_parallel: rank 1 (process {running.rank}) ended with signal 9" in stderr.decode()


@asynccontextmanager
async def of_degrees(model: Model, prefill: int, decode: int) -> AsyncIterator[tuple[Peer, Peer]]:
    """Two workers in this process. Both models are loaded first: sockets between ranks are open as long as the model is there."""
    settings: list[dict[str, Any]] = [
        {"backend": "torch", "num_threads": 1, "tensor_parallel": degree} for degree in (prefill, decode)
    ]
    num_threads = torch.get_num_threads()
    p, d = (Model(model.folder, load_model(model.engine_config(**each))) for each in settings)
    try:
        async with (
            running_worker(p, engine=settings[0], roles=("prefill",), worker_id="p") as prefiller,
            running_worker(d, engine=settings[1], roles=("decode",), worker_id="d") as decoder,
        ):
            yield prefiller, decoder
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1)])
async def test_degrees_share_prefixes(model: Model, prefill: int, decode: int) -> None:
    """The numeric mode names no degree: what one has computed another goes on with, in cached prefixes as in hand-offs."""
    async with of_degrees(model, prefill, decode) as (prefiller, decoder):
        assert prefiller.info.identity == decoder.info.identity
        assert prefiller.info.layout == decoder.info.layout
        router = MiniRouter()
        await router.attach(decoder)
        await router.submit(decoder, "warm", token_request(PROMPT[:32]), mode=LOCAL)
        await router.until_finished("warm")
        pushed = []
        for name, num_cached in (("r1", 32), ("r2", 48)):  # computed by decode; and, the second time, by the other degree
            request = token_request([*PROMPT, *range(100, 140)] if name == "r1" else [*PROMPT, *range(50, 60)])
            reservation = await router.submit(decoder, name, request)
            assert reservation.num_cached_tokens == num_cached
            _, outcome = await router.prefill(prefiller, decoder, name, request, reservation)
            await router.until_finished(name)
            assert router.of(name).output() == reference(model, request)[0]
            pushed.append(outcome.kv_bytes)
        assert pushed[0] > pushed[1] > 0
        alone = token_request([*PROMPT, *range(200, 205)])
        await router.submit(decoder, "alone", alone, mode=LOCAL)
        await router.until_finished("alone")
        assert router.of("alone").output() == reference(model, alone)[0]
        started = router.of("alone").started
        assert started is not None and started.num_cached_tokens == 48
        await router.detach()
