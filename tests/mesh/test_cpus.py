"""A mesh whose workers compute on cores of their own."""

import asyncio
import fcntl
import os
import signal
import struct
import time
from pathlib import Path

import pytest

from pdmesh.client.client import AsyncClient
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from pdmesh.platform.fallbacks import cores_to_share, usable_cores
from pdmesh.sampling_params import SamplingParams
from tests.mesh import oracle
from tests.runtime.telemetry.scrape import scrape


def bound_to(pid: int) -> list[set[int]]:
    """Cores of those threads of a process that may not run everywhere."""
    tasks = [int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()]
    return [cores for task in tasks if (cores := os.sched_getaffinity(task)) != set(usable_cores())]


def slots_in(table: str, num_slots: int = 2) -> list[tuple[int, ...]]:
    """Of each slot: whether it has an owner, until when it is wanted, who has borrowed it, how often it was borrowed."""
    content = Path(table).read_bytes()
    return [struct.unpack_from("=QqQQ", content, 64 * (1 + slot)) for slot in range(num_slots)]


def owner_of(table: str, slot: int) -> int:
    """The process that holds the lock on a slot, which says that its owner lives; 0: none does."""
    lock = "hhqqi4x"  # struct flock: l_type, l_whence, l_start, l_len, l_pid
    with open(table, "rb") as file:
        found = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(lock, fcntl.F_WRLCK, os.SEEK_SET, 64 * (1 + slot), 1, 0))
    kind, _, _, _, pid = struct.unpack(lock, found)
    return 0 if kind == fcntl.F_UNLCK else int(pid)


async def until_free(table: str, slot: int) -> None:
    """Wait until its owner computes nothing."""
    async with asyncio.timeout(10):
        while slots_in(table, slot + 1)[slot][1] > 1e3 * time.monotonic():  # noqa: ASYNC110  # another process changes it
            await asyncio.sleep(0.01)


async def core_seconds(mesh: LocalMesh, name: str, direction: str) -> float:
    """What a worker says that it has lent or borrowed."""
    (url,) = mesh.member(name).metrics_urls
    page = await asyncio.to_thread(scrape, url)
    return page.value("pdmesh_engine_shared_core_seconds_total", direction=direction)


@pytest.mark.skipif(len(cores_to_share()) < 2, reason="needs two cores")
async def test_engines_have_cores_of_their_own(tiny: Path) -> None:
    prompt = oracle.prompt_of(41, 50)
    async with LocalMesh(LocalMeshConfig(model=str(tiny), port=0, num_threads=1, bind_cpus=True, lend_cores=False)) as mesh:
        async with AsyncClient(mesh.router_addresses) as client:
            answer = await client.generate(prompt, temperature=0, max_tokens=8, mode="remote", timeout=60)
        prefill, decode = (bound_to(mesh.member(name).pid) for name in ("prefill-0", "decode-0"))
        assert prefill and decode and prefill[0].isdisjoint(decode[0])
        assert all(cores == prefill[0] for cores in prefill) and all(cores == decode[0] for cores in decode)
        assert os.sched_getaffinity(mesh.member("decode-0").pid) == set(usable_cores())
    assert [list(answer.token_ids)] == oracle.answer(tiny, prompt, SamplingParams(temperature=0, max_tokens=8))


@pytest.mark.skipif(len(cores_to_share()) < 2, reason="needs two cores")
async def test_a_prompt_computes_on_the_core_of_the_worker_that_has_nothing_to_do(tiny: Path) -> None:
    prompts = [oracle.prompt_of(seed, 400) for seed in range(50, 58)]
    async with LocalMesh(LocalMeshConfig(model=str(tiny), port=0, num_threads=1, metrics_port=0)) as mesh:
        names = ("prefill-0", "decode-0")

        async def shared() -> tuple[list[float], list[float]]:
            """Lent by each, and borrowed by the other."""
            lent, borrowed = [[await core_seconds(mesh, name, way) for name in names] for way in ("lent", "borrowed")]
            return lent, borrowed[::-1]

        before = await shared()  # a worker that starts first borrows cores of one that is not there yet to have lent them
        async with AsyncClient(mesh.router_addresses) as client:
            answers = [await client.generate(each, temperature=0, max_tokens=2, mode="remote", timeout=60) for each in prompts]
        for _ in range(50):  # pages of metrics are a moment old
            lent, borrowed = (
                [now - then for now, then in zip(*each, strict=True)] for each in zip(await shared(), before, strict=True)
            )
            if sum(lent) > 0 and lent == pytest.approx(borrowed, abs=1e-6):
                break
            await asyncio.sleep(0.2)
        assert sum(lent) > 0 and lent == pytest.approx(borrowed, abs=1e-6), "what one of two has lent, the other has borrowed"
        table, slots = mesh.config.core_table, slots_in(mesh.config.core_table)
    assert all(is_owned for is_owned, *_ in slots), "each worker has a slot"
    assert sum(times_borrowed for *_, times_borrowed in slots) > 0
    with pytest.raises(FileNotFoundError):  # the table is not left behind
        slots_in(table)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert [list(answer.token_ids)] == oracle.answer(tiny, prompt, SamplingParams(temperature=0, max_tokens=2))


@pytest.mark.skipif(len(cores_to_share()) < 2, reason="needs two cores")
async def test_a_frozen_worker_and_a_killed_one_cost_no_token_and_keep_no_core(tiny: Path) -> None:
    """Its core is lent on while it stands still, and the one that is started in its place has a core again.

    A worker borrows the first slots that are free, on two cores one. So the decode worker with the lower slot is frozen: a prompt
    takes its core before the other's. Each time there are new prompts: what is cached takes no core. Those for the frozen
    worker's core have a length of their own: cores are borrowed for the third and fourth step of a size, then if it pays.
    """
    prompts = [oracle.prompt_of(seed, 200 if 66 <= seed < 72 else 400) for seed in range(60, 84)]
    greedy = SamplingParams(temperature=0, max_tokens=8)
    expected = [oracle.answer(tiny, each, greedy) for each in prompts]

    async def check(client: AsyncClient, turn: int) -> None:
        asked = slice(6 * turn, 6 * (turn + 1))
        found = [await client.generate(each, temperature=0, max_tokens=8, mode="remote", timeout=90) for each in prompts[asked]]
        assert [[list(answer.token_ids)] for answer in found] == expected[asked]

    async with LocalMesh(LocalMeshConfig(model=str(tiny), port=0, num_threads=1, num_decode=2)) as mesh:
        table = mesh.config.core_table
        async with AsyncClient(mesh.router_addresses) as client:
            await check(client, 0)
            slot_of = {owner_of(table, slot): slot for slot in range(3)}
            slot, frozen = min((slot_of[mesh.member(name).pid], name) for name in ("decode-0", "decode-1"))
            await until_free(table, slot)
            mesh.kill(frozen, signal.SIGSTOP)
            before = slots_in(table, 3)[slot][-1]
            await check(client, 1)
            assert slots_in(table, 3)[slot][-1] > before, "the core of the frozen worker was lent to none"
            mesh.kill(frozen)
            await check(client, 2)
            await mesh.wait_ready(60)
            await check(client, 3)
        assert [is_owned for is_owned, *_ in slots_in(table, 4)] == [1, 1, 1, 0], "the new worker has the slot of the old one"


async def test_too_few_cores_are_said(tiny: Path) -> None:
    events: list[str] = []
    more = len(usable_cores()) + 1
    config = LocalMeshConfig(model=str(tiny), port=0, num_threads=more, bind_cpus=True)
    async with LocalMesh(config, on_event=events.append):
        assert any("not bound to cores" in event for event in events)
