"""Two routers, the same stub workers and a real Redis: they count what the other sent, and go on without Redis."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pdmesh.runtime.registry.redis_server import EmbeddedRedis
from pdmesh.v1 import worker_pb2
from router.fleet.worker import Dispatched
from router.main import Router
from tests.router.mesh import config_for, request, running_router
from tests.router.stub_workers import DECODE, StubWorker
from tests.support.waiting import eventually


class _Unchanging(StubWorker):
    """Reports nothing of what it has: its routers learn of each other's requests from each other, or not at all."""

    def load(self) -> worker_pb2.LoadReport:
        load = super().load()
        load.num_running, load.num_free_blocks = 0, load.num_total_blocks
        return load


@asynccontextmanager
async def _pair(folder: Path, redis: EmbeddedRedis, num_workers: int, **settings: object) -> AsyncIterator[Any]:
    """Routers a and b with their stubs, and the workers. Reports are rare: the routers have only each other's word."""
    slow = {"report_period_ms": 2000, "heartbeat_ms": 2000, "stream_timeout_s": 10.0, **settings}
    async with AsyncExitStack() as stack:
        workers = [_Unchanging(f"d{number}", (DECODE,), pause_at=1) for number in range(num_workers)]
        for worker in workers:
            stack.push_async_callback((await worker.start()).kill)
        routers = []
        for name in "ab":
            config = config_for(folder, workers, redis=redis.url, router_id=name, **slow)
            routers.append(await stack.enter_async_context(running_router(config)))
        for router, _ in routers:
            await eventually(partial(_is_set_up, router, num_workers))
        yield (*routers, workers)


def _is_set_up(router: Router, num_workers: int) -> bool:
    assert router.shared is not None
    return sum(view.decode for view in router.core.fleet.views()) == num_workers and router.shared.peers.num_others == 1


async def _send(stub: Any, num: int, first_seed: int) -> list[Any]:
    """Running requests, each with another prompt: no prefix is to draw them together."""
    calls = [stub.Generate(request(range(64 + first_seed + i, 120 + first_seed + i), seed=first_seed + i)) for i in range(num)]
    for call in calls:
        await call.read()
    return calls


def _load(workers: list[StubWorker]) -> list[int]:
    counts = Counter({worker.name: len(worker.submits) for worker in workers})
    return sorted(counts.values())


def _seen(router: Router) -> int:
    return sum(view.dispatched_seqs for view in router.core.fleet.views())


async def test_a_router_goes_where_the_other_did_not(model_folder: Path) -> None:
    async with EmbeddedRedis() as redis, _pair(model_folder, redis, 6) as ((_, to_a), (b, to_b), workers):
        running = await _send(to_a, 3, 0)  # a call that nobody holds is cancelled
        await eventually(lambda: sum(len(worker.submits) for worker in workers) == 3)
        await eventually(lambda: _seen(b) == 3)
        running += await _send(to_b, 3, 10)
        await eventually(lambda: sum(len(worker.submits) for worker in workers) == 6)
        assert _load(workers) == [1] * len(running)


async def test_bursts_at_the_same_moment_do_not_pile_up(model_folder: Path) -> None:
    async with EmbeddedRedis() as redis, _pair(model_folder, redis, 2) as ((_, to_a), (_, to_b), workers):
        running = await asyncio.gather(_send(to_a, 8, 0), _send(to_b, 8, 20))
        await eventually(lambda: sum(len(worker.submits) for worker in workers) == 16)
        assert max(_load(workers)) <= 10 and len(running) == 2


async def test_what_is_in_flight_is_known_while_others_end_all_the_time(model_folder: Path) -> None:
    """What has ended counts against what was sent: messages that say so are read like all others."""
    never = {"report_period_ms": 10_000, "heartbeat_ms": 10_000, "stream_timeout_s": 30.0}
    async with EmbeddedRedis() as redis, _pair(model_folder, redis, 2, **never) as ((a, to_a), (b, _), _):
        running = await _send(to_a, 3, 0)  # a call that nobody holds is cancelled
        await eventually(lambda: _seen(b) == 3)
        for _ in range(6):
            for worker in a.core.fleet.workers.values():
                ended = Dispatched(1, 4, decodes=1, context=60, arrived_at=asyncio.get_running_loop().time())
                worker.dispatched(ended)
                worker.released(ended, asyncio.get_running_loop().time())
            told = b.shared.num_received
            await eventually(lambda told=told: b.shared.num_received > told)  # type: ignore[misc]
        await eventually(lambda: _seen(b) == 3)
        assert (a.shared.num_unreadable, b.shared.num_unreadable) == (0, 0)
        assert a.shared.peers.num_others == b.shared.peers.num_others == 1
        assert len(running) == 3


async def test_without_redis_each_goes_by_its_own_counts(model_folder: Path) -> None:
    async with EmbeddedRedis() as redis, _pair(model_folder, redis, 2) as ((a, to_a), (b, to_b), workers):
        assert a.shared.share("t") == pytest.approx(0.5)
        await redis.stop()
        await asyncio.gather(_send(to_a, 2, 0), _send(to_b, 2, 10))
        await eventually(lambda: sum(len(worker.submits) for worker in workers) == 4)
        await eventually(lambda: not b.shared._has_foreign)
        assert a.shared.share("t") == pytest.approx(0.5)  # the last one holds


async def test_one_that_stops_leaves_its_part_to_the_other(model_folder: Path) -> None:
    async with EmbeddedRedis() as redis, _pair(model_folder, redis, 1) as ((a, _), (b, _), _):
        await eventually(lambda: a.shared.share("t") == pytest.approx(0.5))
        await b.shared.stop()
        await eventually(lambda: a.shared.share("t") == 1.0, timeout_s=30)
        a.shared.received(b"nonsense")
        assert a.shared.num_unreadable == 1


async def test_a_router_tells_again_after_whatever_went_wrong(model_folder: Path) -> None:
    async with EmbeddedRedis() as redis, _pair(model_folder, redis, 1) as ((a, _), (b, _), _):
        demand, problems = a.shared._demand, [RecursionError(), RuntimeError("odd"), ZeroDivisionError()]

        def failing(now: float) -> Any:
            if problems:
                raise problems.pop()
            return {**demand(now), "asks": 7.0}

        a.shared._demand = failing
        await eventually(lambda: any("asks" in message.demand for message in b.shared.peers._messages.values()))
