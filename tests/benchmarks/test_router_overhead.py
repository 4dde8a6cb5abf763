"""The instrument of the router's overhead: a router takes its stub workers for real ones."""

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from benchmarks.router import client
from benchmarks.router.overhead import quantile, write_model
from benchmarks.router.profiled import Samples
from benchmarks.router.stub_worker import MAX_CONTEXT, TOKEN_ID, start_workers
from pdmesh.v1 import common_pb2, mesh_pb2
from router.config import RouterConfig
from tests.router.mesh import Answer, running_router
from tests.support.waiting import eventually

LOCAL, REMOTE = mesh_pb2.PREFILL_MODE_LOCAL, mesh_pb2.PREFILL_MODE_REMOTE


@pytest.mark.parametrize(("mode", "max_tokens"), [(LOCAL, 5), (REMOTE, 5), (REMOTE, 1), (LOCAL, 1)])
async def test_a_router_takes_the_stub_workers_for_real_ones(
    tmp_path: Path, mode: mesh_pb2.PrefillMode.ValueType, max_tokens: int
) -> None:
    write_model(tmp_path)
    async with start_workers(0.001, None) as addresses:
        config = RouterConfig(port=0, models=(f"stub={tmp_path}",), workers=tuple(addresses), linger_s=0.0)
        async with running_router(config) as (router, stub):
            await eventually(lambda: len(router.core.fleet.views()) == 2 and router.core.fleet.ready())
            request = mesh_pb2.GenerateRequest(
                tokens=mesh_pb2.TokenIds(ids=[66] * 40),
                sampling=common_pb2.SamplingParams(max_tokens=max_tokens),
                options=mesh_pb2.RequestOptions(mode=mode),
            )
            answer = Answer()
            async for message in stub.Generate(request, timeout=10):
                answer.take(message)
    answer.check_indexes()
    assert answer.tokens() == [TOKEN_ID] * max_tokens
    assert answer.timings.mode == mode


def test_quantile_is_by_rank() -> None:
    assert quantile([5.0, 1.0, 3.0], 0.5) == 3.0
    assert quantile(list(range(100)), 0.99) == 99
    assert MAX_CONTEXT > 40


def test_samples_count_own_time_and_callees() -> None:
    samples = Samples()
    samples.take(0, sys._getframe())
    samples.take(0, None)
    assert samples.total == 2
    assert "test_router_overhead.py:test_samples_count_own_time_and_callees" in samples.table()


async def test_a_closed_loop_asks_no_more_than_it_is_told() -> None:
    asked = itertools.count()

    async def answer() -> AsyncIterator[bytes]:
        next(asked)
        for _ in range(client.FIRST_TOKEN):
            await asyncio.sleep(0)
            yield b""

    assert (await client.closed(answer, 3, 60.0, most=5))["requests"] == 5  # type: ignore[arg-type]
    assert next(asked) == 5
