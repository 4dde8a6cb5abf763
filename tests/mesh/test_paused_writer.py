"""A prefill worker is stopped in the middle of a push for many leases; what it does when it wakes touches nobody's blocks."""

import asyncio
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from pdmesh.client.client import AsyncClient
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig, ProcessPlan
from pdmesh.runtime.failpoints import VARIABLE
from pdmesh.sampling_params import SamplingParams
from tests.mesh import oracle
from tests.mesh.checks import Footprint, assert_whole

pytestmark = pytest.mark.asyncio(loop_scope="module")

LEASE_S, STOPPED_LEASES = 0.4, 6
LENGTH, NUM_TOKENS, CHUNK = 200, 24, 40  # of a prompt, five chunks: a push of several parts
NUM_BLOCKS = 30  # on decode: two requests fill it


def adjusted(transport: str) -> LocalMeshConfig:
    """`prefill-0` stops itself before the third part of its first push; decode has room for two requests."""

    def adjust(plan: ProcessPlan) -> ProcessPlan:
        if not plan.is_worker:
            return plan
        flags = ["--transports", transport, "--lease-s", str(LEASE_S), "--max-num-batched-tokens", str(CHUNK)]
        if plan.name == "decode-0":
            flags += ["--num-blocks", str(NUM_BLOCKS)]
        env = {**plan.env, VARIABLE: "push.part=pause@3"} if plan.name == "prefill-0" else plan.env
        return replace(plan, argv=(*plan.argv, *flags), env=env)

    return LocalMeshConfig(model="", num_prefill=2, num_decode=1, port=0, restart=False, num_threads=1, adjust=adjust)


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=["shm", "tcp", "grpc"])
async def mesh(tiny: Path, request: pytest.FixtureRequest) -> AsyncIterator[LocalMesh]:
    async with LocalMesh(replace(adjusted(request.param), model=str(tiny))) as mesh:
        footprint = Footprint.of(mesh)
        yield mesh
        footprint.grow(mesh)
    footprint.assert_gone()


async def ask(client: AsyncClient, number: int) -> list[int]:
    prompt = oracle.prompt_of(number, LENGTH)
    options = {"temperature": 0.8, "seed": number, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    result = await client.generate(prompt, mode="remote", timeout=60, **options)  # type: ignore[arg-type]
    return list(result.token_ids)


def expected(folder: Path, number: int) -> list[int]:
    params = SamplingParams(temperature=0.8, seed=number, max_tokens=NUM_TOKENS, ignore_eos=True)
    return oracle.answer(folder, oracle.prompt_of(number, LENGTH), params)[0]


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


async def test_a_writer_that_wakes_after_every_lease(mesh: LocalMesh, tiny: Path) -> None:
    paused = mesh.member("prefill-0").pid
    async with AsyncClient(mesh.router_addresses) as client:
        answers: dict[int, list[int]] = {}
        # Until the writer stops itself: its request goes on over the other prefill worker, in the same blocks.
        for pair in zip(range(100, 120, 2), range(101, 121, 2), strict=True):  # two at once: both prefill workers get one
            answers.update(zip(pair, await asyncio.gather(*(ask(client, each) for each in pair)), strict=True))
            if is_stopped(paused):
                break
        assert is_stopped(paused), "prefill-0 was given nothing to push"
        # Its blocks are given to others again and again, all of them, for longer than any lease.
        loop = asyncio.get_running_loop()
        until, number = loop.time() + STOPPED_LEASES * LEASE_S, 200
        while loop.time() < until:
            pair = (number, number + 1)
            answers.update(zip(pair, await asyncio.gather(*(ask(client, each) for each in pair)), strict=True))
            number += 2
        # It wakes while they are written and read.
        asked = [asyncio.create_task(ask(client, each)) for each in range(300, 312)]
        await asyncio.sleep(0.02)
        mesh.kill("prefill-0", signal.SIGCONT)
        answers.update(zip(range(300, 312), await asyncio.gather(*asked), strict=True))
        assert answers == {each: expected(tiny, each) for each in answers}
        await mesh.wait_ready(30)
        assert await ask(client, 400) == expected(tiny, 400)
    await assert_whole(mesh, timeout_s=30)
