"""Processes die, clients leave and deadlines pass at every state of the hand-off: answers stay right, pools stay whole."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio

from pdmesh.client.client import AsyncClient
from pdmesh.errors import DeadlineExceeded
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig, ProcessPlan
from pdmesh.runtime.failpoints import VARIABLE
from pdmesh.sampling_params import SamplingParams
from tests.chaos.arming import Arming
from tests.mesh import oracle
from tests.mesh.checks import Footprint, assert_whole, is_running

pytestmark = pytest.mark.asyncio(loop_scope="module")

PREFILL_POINTS = ("prefill.accepted", "prefill.computed", "push.hello", "push.part", "push.before_commit", "push.committed")
DECODE_POINTS = ("decode.reserved", "decode.receiving", "decode.committed", "decode.running")
LENGTH, NUM_TOKENS = 60, 20
BY_LOAD = ("--policy=least-loaded",)
"""Each worker gets its share, however slow it has been found to be, and no deadline is refused by prediction."""


async def ask(client: AsyncClient, number: int, timeout: float = 60) -> list[int]:
    result = await client.generate(
        oracle.prompt_of(number, LENGTH),
        temperature=0.8,
        seed=number,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        mode="remote",
        timeout=timeout,
    )
    return list(result.token_ids)


def expected(folder: Path, number: int) -> list[int]:
    params = SamplingParams(temperature=0.8, seed=number, max_tokens=NUM_TOKENS, ignore_eos=True)
    return oracle.answer(folder, oracle.prompt_of(number, LENGTH), params)[0]


async def until_dead(pid: int, timeout_s: float = 20) -> None:
    async with asyncio.timeout(timeout_s):
        while is_running(pid):  # noqa: ASYNC110  # another process's death has no event here
            await asyncio.sleep(0.02)


@dataclass(frozen=True)
class Unwatched:
    """Two workers of each kind; what dies stays dead until the test restarts it. One of each kind can be armed while it runs."""

    mesh: LocalMesh
    armings: dict[str, Arming]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def unwatched(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Unwatched]:
    folder = tmp_path_factory.mktemp("failpoints")
    armings = {name: Arming(folder / name) for name in ("prefill-0", "decode-0")}

    def adjust(plan: ProcessPlan) -> ProcessPlan:
        arming = armings.get(plan.name)
        return plan if arming is None else replace(plan, env={**plan.env, **arming.environment})

    config = LocalMeshConfig(
        model=str(tiny), num_prefill=2, num_decode=2, port=0, restart=False, num_threads=1, router_args=BY_LOAD, adjust=adjust
    )
    async with LocalMesh(config) as mesh:
        footprint = Footprint.of(mesh)
        yield Unwatched(mesh, armings)
        footprint.grow(mesh)
    footprint.assert_gone()


@pytest.mark.parametrize("failpoint", [*PREFILL_POINTS, *DECODE_POINTS])
async def test_a_worker_killed_at_each_state(unwatched: Unwatched, tiny: Path, failpoint: str) -> None:
    victim = "decode-0" if failpoint.startswith("decode") else "prefill-0"
    mesh, arming = unwatched.mesh, unwatched.armings[victim]
    arming.arm(failpoint, "kill@2")
    pid = mesh.member(victim).pid
    # Prompts that no worker has seen: routing by cached prefix would spare the one that has just been restarted.
    first = 1000 + 8 * [*PREFILL_POINTS, *DECODE_POINTS].index(failpoint)
    numbers = range(first, first + 8)
    async with AsyncClient(mesh.router_addresses) as client:
        answers = await asyncio.gather(*(ask(client, number) for number in numbers))
        await until_dead(pid)
        assert arming.was_hit(failpoint)
        assert answers == [expected(tiny, number) for number in numbers]
        assert await ask(client, 99) == expected(tiny, 99)  # at once, by those who are left
    await assert_whole(mesh)
    arming.disarm(failpoint)
    await mesh.restart(victim)
    await mesh.wait_ready(60)


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
async def test_a_worker_that_stalls_costs_a_delay(unwatched: Unwatched, tiny: Path, victim: str) -> None:
    mesh, numbers = unwatched.mesh, range(10, 16)
    async with AsyncClient(mesh.router_addresses) as client:
        asked = [asyncio.create_task(ask(client, number)) for number in numbers]
        mesh.kill(victim, signal.SIGSTOP)
        try:
            assert list(await asyncio.gather(*asked)) == [expected(tiny, number) for number in numbers]
        finally:
            mesh.kill(victim, signal.SIGCONT)
    await mesh.wait_ready(30)
    await assert_whole(mesh, timeout_s=30)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def slow(tiny: Path) -> AsyncIterator[LocalMesh]:
    """One worker of each kind that dwells 120 ms at every state, so that a moment in time is a state."""
    delays = ",".join(f"{point}=delay:120" for point in [*PREFILL_POINTS, *DECODE_POINTS])
    config = LocalMeshConfig(model=str(tiny), port=0, num_threads=1, env={VARIABLE: delays}, router_args=BY_LOAD)
    async with LocalMesh(config) as mesh:
        footprint = Footprint.of(mesh)
        yield mesh
        footprint.grow(mesh)
    footprint.assert_gone()


async def some_at_a_time(moments: Iterable[Awaitable[bool]]) -> int:
    """How many came true. A few together: what delays one does not hold up the others."""
    places = asyncio.Semaphore(4)

    async def one(moment: Awaitable[bool]) -> bool:
        async with places:
            return await moment

    return sum(await asyncio.gather(*(one(moment) for moment in moments)))


async def test_a_client_that_leaves_at_each_state(slow: LocalMesh) -> None:
    async def leave(number: int) -> bool:
        task = asyncio.create_task(ask(client, 200 + number))
        await asyncio.wait([task], timeout=0.03 + 0.08 * number)
        left = task.cancel()
        await asyncio.wait([task])
        return left

    async with AsyncClient(slow.router_addresses) as client:
        assert await some_at_a_time(leave(number) for number in range(20)) >= 10
        await assert_whole(slow)


async def test_a_deadline_that_passes_at_each_state(slow: LocalMesh) -> None:
    async def passes(number: int) -> bool:
        try:
            await ask(client, 300 + number, timeout=0.05 + 0.08 * number)
        except DeadlineExceeded:
            return True
        return False

    async with AsyncClient(slow.router_addresses) as client:
        assert await some_at_a_time(passes(number) for number in range(16)) >= 8
        await assert_whole(slow)


async def test_the_slow_mesh_answers_right_all_the_same(slow: LocalMesh, tiny: Path) -> None:
    async with AsyncClient(slow.router_addresses) as client:
        assert await ask(client, 400) == expected(tiny, 400)
    await assert_whole(slow)
