"""A worker of two ranks as a process: it drains with them, and does not outlive one."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from protos.v1 import decode_pb2_grpc, worker_pb2, worker_pb2_grpc
from runtime.channel import connect
from tests.support.mini_router import MiniRouter
from tests.support.waiting import alive, eventually
from tests.support.worker_mesh import LOCAL, Model, reference, token_request
from tests.worker.test_process import PROMPT, _Remote, flags, process, ready

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="on the CPU ranks share memory as Linux has it")
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
    async with process("worker", *args) as child:
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
