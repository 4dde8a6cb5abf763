"""What a mesh of real processes lives through without any client seeing it: a drain, a stall, no Redis, a router less."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import pytest_asyncio

from pdmesh.client.client import AsyncClient, Completed, Delta
from pdmesh.client.types import Timings
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from pdmesh.sampling_params import SamplingParams
from tests.mesh import oracle
from tests.mesh.checks import Footprint, assert_whole, is_running
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = 60
SHORT, LONG, LONGER = 24, 250, 1900


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def mesh(tiny: Path) -> AsyncIterator[LocalMesh]:
    """Two of everything. Who is told to stop has a minute for it; what dies is started again."""
    config = LocalMeshConfig(model=str(tiny), num_prefill=2, num_decode=2, num_routers=2, port=0, num_threads=1, stop_grace_s=60)
    async with LocalMesh(config) as mesh:
        footprint = Footprint.of(mesh)
        yield mesh
        footprint.grow(mesh)
    footprint.assert_gone()


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def _everybody_is_back(mesh: LocalMesh) -> None:
    """A test may end before what it killed has started again."""
    await eventually(lambda: _has_addresses(mesh), timeout_s=60)
    await mesh.wait_ready(60)


def _has_addresses(mesh: LocalMesh) -> bool:
    try:
        return bool(mesh.router_addresses)
    except RuntimeError:
        return False


def sampled(number: int, num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=number, max_tokens=num_tokens, ignore_eos=True)


@cache
def _expected(folder: Path, numbers: tuple[int, ...], num_tokens: int) -> list[list[int]]:
    jobs = [(oracle.prompt_of(number, PROMPT), sampled(number, num_tokens)) for number in numbers]
    return [choices[0] for choices in oracle.answers(folder, jobs)]


def expected(folder: Path, numbers: Sequence[int], num_tokens: int) -> list[list[int]]:
    return _expected(folder, tuple(numbers), num_tokens)


class Asked:
    """A request under way: what has come, in order."""

    def __init__(self, client: AsyncClient, number: int, num_tokens: int, timeout_s: float = 100) -> None:
        self.tokens: list[int] = []
        self.timings: Timings | None = None
        self.task = asyncio.create_task(self._run(client, number, num_tokens, timeout_s))

    async def _run(self, client: AsyncClient, number: int, num_tokens: int, timeout_s: float) -> None:
        prompt = oracle.prompt_of(number, PROMPT)
        options = {"temperature": 0.8, "seed": number, "max_tokens": num_tokens, "ignore_eos": True}
        async with client.generate_stream(prompt, mode="remote", timeout=timeout_s, **options) as events:  # type: ignore[arg-type]
            async for event in events:
                if isinstance(event, Delta):
                    assert event.first_index == len(self.tokens)
                    self.tokens.extend(event.token_ids)
                elif isinstance(event, Completed):
                    self.timings = event.timings


async def all_of(asked: Sequence[Asked]) -> list[list[int]]:
    await asyncio.gather(*(each.task for each in asked))
    return [each.tokens for each in asked]


async def under_way(asked: Sequence[Asked]) -> None:
    await eventually(lambda: all(each.tokens for each in asked), timeout_s=60)


async def test_requests_leave_a_decode_worker_that_is_told_to_stop(mesh: LocalMesh, tiny: Path) -> None:
    """Not one of them is lost, and none has stayed until its end."""
    numbers = range(500, 508)
    pid = mesh.member("decode-0").pid
    async with AsyncClient(mesh.router_addresses) as client:
        asked = [Asked(client, number, LONGER) for number in numbers]
        await under_way(asked)
        mesh.kill("decode-0", signal.SIGTERM)
        assert await all_of(asked) == expected(tiny, numbers, LONGER)
    timings = [each.timings for each in asked if each.timings is not None]
    assert [(each.decode_worker, each.num_resubmissions) for each in timings] == [("decode-1", 0)] * len(numbers)
    await eventually(lambda: not is_running(pid), timeout_s=60)
    await mesh.wait_ready(60)
    await assert_whole(mesh, timeout_s=30)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
async def test_nobody_misses_redis(mesh: LocalMesh, tiny: Path, number: signal.Signals) -> None:
    """Neither while it hangs, nor when it dies and comes back empty; a router that starts meanwhile knows its static peers."""
    pid, first = mesh.redis_pid, 600 + 100 * number
    assert pid is not None
    async with AsyncClient(mesh.router_addresses) as client:
        asked = [Asked(client, each, SHORT) for each in range(first, first + 8)]
        os.kill(pid, number)
        asked += [Asked(client, each, SHORT) for each in range(first + 8, first + 16)]
        if number == signal.SIGSTOP:
            await _restart_router(mesh)
            asked += [Asked(client, each, SHORT) for each in range(first + 16, first + 24)]
            await all_of(asked)
            os.kill(pid, signal.SIGCONT)
        assert await all_of(asked) == expected(tiny, range(first, first + len(asked)), SHORT)
        await eventually(lambda: mesh.redis_pid is not None)
        for address in mesh.router_addresses:
            await _registered(address)
    await mesh.wait_ready(60)
    await assert_whole(mesh)


async def _restart_router(mesh: LocalMesh) -> None:
    member = mesh.member("router-0")
    workers = ",".join(worker.address for worker in mesh.workers)
    member.plan = replace(member.plan, argv=(*member.plan.argv, "--workers", workers))
    await mesh.restart("router-0")


async def _registered(router: str) -> None:
    """The router has Redis again, and every worker is there."""
    async with AsyncClient(router) as client:
        while not (await client.status(timeout=10)).registry_connected:  # noqa: ASYNC110  # it happens in another process
            await asyncio.sleep(0.05)


async def test_streams_of_a_killed_router_resume_at_the_other(mesh: LocalMesh, tiny: Path) -> None:
    """Sixteen of them, and those of the other one do not notice."""
    lost, others = range(2000, 2016), range(2100, 2104)
    pid = mesh.member("router-0").pid
    async with AsyncClient(mesh.router_addresses) as client, AsyncClient(mesh.router_addresses[1:]) as beside:
        untouched = [Asked(beside, number, LONG) for number in others]
        await under_way(untouched)  # before the crowd comes: their prefill is tried once
        asked = [Asked(client, number, LONG) for number in lost]
        await under_way(asked)
        mesh.kill("router-0", signal.SIGKILL)
        await eventually(lambda: not is_running(pid))
        assert not all(each.task.done() for each in asked)
        assert await all_of(asked) == expected(tiny, lost, LONG)
        assert await all_of(untouched) == expected(tiny, others, LONG)
    timings = [each.timings for each in untouched if each.timings is not None]
    assert [(each.num_resubmissions, each.num_retries) for each in timings] == [(0, 0)] * len(others)
    await mesh.wait_ready(60)
    await assert_whole(mesh, timeout_s=30)


UNANSWERED_S = 50
"""Less than the minute for which gRPC waits for the answer to a ping, if nobody tells it otherwise."""


async def test_streams_of_a_router_that_stands_still_go_on_at_the_other(mesh: LocalMesh, tiny: Path) -> None:
    """New requests go there, too: of clients that know that it stands still, and of those that do not."""
    lost, new, others = range(2300, 2308), range(2308, 2312), range(2312, 2316)
    async with AsyncClient(mesh.router_addresses) as client, AsyncClient(mesh.router_addresses) as stranger:
        asked = [Asked(client, number, LONG, UNANSWERED_S) for number in lost]
        await under_way(asked)
        mesh.kill("router-0", signal.SIGSTOP)
        try:
            assert not all(each.task.done() for each in asked)
            later = [Asked(stranger, number, SHORT, UNANSWERED_S) for number in others]
            assert await all_of(asked) == expected(tiny, lost, LONG)
            assert await all_of([Asked(client, number, SHORT, UNANSWERED_S) for number in new]) == expected(tiny, new, SHORT)
            assert await all_of(later) == expected(tiny, others, SHORT)
        finally:
            mesh.kill("router-0", signal.SIGCONT)
    await mesh.wait_ready(60)
    await assert_whole(mesh, timeout_s=30)


async def test_a_prefill_worker_that_stops_in_the_middle_of_prompts(mesh: LocalMesh, tiny: Path) -> None:
    numbers = range(2200, 2208)
    async with AsyncClient(mesh.router_addresses) as client:
        asked = [Asked(client, number, SHORT) for number in numbers]
        mesh.kill("prefill-0", signal.SIGSTOP)
        try:
            assert await all_of(asked) == expected(tiny, numbers, SHORT)
        finally:
            mesh.kill("prefill-0", signal.SIGCONT)
    await mesh.wait_ready(60)
    await assert_whole(mesh, timeout_s=30)
