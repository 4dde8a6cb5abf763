"""`pdmesh up --autoscale` with real processes: workers come and go with the load, nobody notices, and outages change nothing."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from pdmesh import cli
from pdmesh.autoscaler.collect.collect import Collector
from pdmesh.autoscaler.collect.workers import Pools
from pdmesh.autoscaler.loop import Loop
from pdmesh.autoscaler.loop_history import read_entries
from pdmesh.autoscaler.platform import Asked
from pdmesh.autoscaler.roles import RoleChanger
from pdmesh.autoscaler.views import Flip, PoolDecision, PoolName
from pdmesh.client.client import AsyncClient
from pdmesh.commands.up import _scaled
from pdmesh.commands.up_autoscale import DECISIONS_FILE, PERIOD_S, AutoscaleOptions, local_loop, scaled
from pdmesh.launcher import local_state
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig, ProcessPlan
from tests.mesh import oracle
from tests.mesh.checks import Footprint, assert_whole
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(180),
]  # starts take many times as long on a machine that is busy
PROMPT, NUM_TOKENS = 40, 120
OPTIONS = AutoscaleOptions(autoscale=True, max_workers=3, ttft_ms=5000, tpot_ms=200, cool_down_s=3.0, stale_after_s=3.0)
FEW = ("--max-num-seqs=2",)
"""Sequences of a worker, so that a few clients are too many for one."""
ROUNDS = 2
"""Of the loop, in each of which it might have acted."""


class Load:
    """So many clients, each of which asks again as soon as it is answered: whatever the machine, one worker is too few for more
    than it has sequences. Each request has to be answered whole."""

    def __init__(self, mesh: LocalMesh, num_clients: int) -> None:
        self._mesh, self._num_clients = mesh, num_clients
        self._stopped = False
        self._numbers = itertools.count()
        self.num_answered = 0
        self.failures: list[str] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Load]:
        """While inside; ends when all that was asked is answered."""
        async with AsyncClient(self._mesh.router_addresses, retry_overload=True) as client, asyncio.TaskGroup() as group:
            for _ in range(self._num_clients):
                group.create_task(self._ask_on(client))
            try:
                yield self
            finally:
                self._stopped = True
        assert not self.failures

    async def _ask_on(self, client: AsyncClient) -> None:
        while not self._stopped:
            await self._ask(client, oracle.prompt_of(next(self._numbers), PROMPT))

    async def _ask(self, client: AsyncClient, prompt: list[int]) -> None:
        try:
            answer = await client.generate(prompt, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, timeout=60)
            assert len(answer.token_ids) == NUM_TOKENS
            self.num_answered += 1
        except Exception as error:  # noqa: BLE001  whatever a client sees is a failure
            self.failures.append(repr(error))


@asynccontextmanager
async def scaled_mesh(
    tiny: Path,
    folder: Path,
    options: AutoscaleOptions,
    say: Callable[[str], None] = print,
    *,
    adjust: Callable[[ProcessPlan], ProcessPlan] | None = None,
) -> AsyncIterator[tuple[LocalMesh, Loop]]:
    """As `pdmesh up --both 1 --autoscale` has it; all processes are gone afterwards."""
    base = LocalMeshConfig(
        model=str(tiny), num_prefill=0, num_decode=0, num_both=1, port=0, num_threads=1, log_dir=str(folder), worker_args=FEW,
        adjust=adjust,
    )  # fmt: skip
    async with told_mesh(base, options) as (mesh, path), scaled(local_loop(mesh, options, path, say)) as loop:
        yield mesh, loop


@asynccontextmanager
async def told_mesh(base: LocalMeshConfig, options: AutoscaleOptions) -> AsyncIterator[tuple[LocalMesh, Path]]:
    """One that can be scaled, and its objectives, which its routers have been told. All its processes are gone afterwards."""
    config = options.prepared(base)
    path = options.objectives_file(config, Path(config.log_dir))
    async with LocalMesh(replace(config, router_args=("--objectives", str(path))), on_event=print) as mesh:
        footprint = Footprint.of(mesh)
        yield mesh, path
        footprint.grow(mesh)
    footprint.assert_gone()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def lone(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[LocalMesh, Path]]:
    """One worker with both roles, whom nobody scales by itself; and its objectives."""
    folder = tmp_path_factory.mktemp("lone")
    base = LocalMeshConfig(
        model=str(tiny), num_prefill=0, num_decode=0, num_both=1, port=0, num_threads=1, log_dir=str(folder), worker_args=FEW
    )
    async with told_mesh(base, replace(OPTIONS, max_workers=2)) as told:
        yield told


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def separated(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[LocalMesh, Path]]:
    """A prefill worker and two decode workers, whom nobody scales by itself; and their objectives."""
    folder = tmp_path_factory.mktemp("separated")
    base = LocalMeshConfig(model=str(tiny), num_decode=2, port=0, num_threads=1, log_dir=str(folder), worker_args=FEW)
    async with told_mesh(base, OPTIONS) as told:
        yield told


def workers(mesh: LocalMesh) -> set[str]:
    """Those that are ready."""
    return {worker.name for worker in mesh.workers if worker.running and worker.start_s}


def pool_of(loop: Loop, name: PoolName = PoolName.BOTH) -> PoolDecision:
    """What was decided last of it; something has been."""
    assert loop.latest is not None
    return next(pool for pool in loop.latest[0].pools if pool.name is name)


def decided_s(loop: Loop) -> float:
    """When, on the loop's clock; long ago: nothing has been so far."""
    return loop.latest[1] if loop.latest is not None else float("-inf")


def texts(loop: Loop, kind: str) -> list[str]:
    return [entry.text for entry in loop.history.entries if entry.kind == kind]


async def all_generate(mesh: LocalMesh, num: int) -> None:
    """Returns once routers have heard of tokens by so many workers."""
    async with AsyncClient(mesh.router_addresses) as client, asyncio.timeout(60):
        while sum(each.load.num_generated_tokens > 0 for each in (await client.status(timeout=10)).workers) < num:  # noqa: ASYNC110
            await asyncio.sleep(0.1)  # the event happens in other processes


async def test_it_grows_under_load_and_shrinks_after(lone: tuple[LocalMesh, Path]) -> None:
    (mesh, path), options = lone, replace(OPTIONS, max_workers=2)
    async with scaled(local_loop(mesh, options, path, print)) as loop:
        async with Load(mesh, num_clients=4).running():
            await eventually(lambda: len(workers(mesh)) == 2, timeout_s=60)
            await all_generate(mesh, 2)
        await eventually(lambda: len(mesh.workers) == 1, timeout_s=60)
        await assert_whole(mesh)
        assert not texts(loop, "failed")
    entries = read_entries(mesh.log_dir / DECISIONS_FILE)[-len(loop.history.entries) :]
    assert [entry.text for entry in entries] == [entry.text for entry in loop.history.entries]
    grown, *_, shrunk = (entry for entry in entries if entry.kind == "scale")
    assert "both 1 → 2" in grown.text and "requests/s" in grown.text and grown.replicas == {"both": 2}
    assert "both 2 → 1" in shrunk.text and shrunk.replicas == {"both": 1}


async def test_without_a_registry_nothing_grows_however_many_ask(lone: tuple[LocalMesh, Path]) -> None:
    """What would be right is said, and begun once there is a registry again."""
    (mesh, path), options = lone, replace(OPTIONS, max_workers=2)
    async with scaled(local_loop(mesh, options, path, print)) as loop:
        await eventually(lambda: loop.latest is not None and pool_of(loop).held is None, timeout_s=30)
        assert mesh.redis_pid is not None
        os.kill(mesh.redis_pid, signal.SIGSTOP)
        try:
            await eventually(lambda: "an outage of the registry" in (pool_of(loop).held or ""), timeout_s=30)
            async with Load(mesh, num_clients=4).running() as load:
                await eventually(lambda: "; 2 would be right: " in pool_of(loop).reason, timeout_s=60)
                asked_s = loop.clock()
                await eventually(lambda: decided_s(loop) > asked_s + ROUNDS * PERIOD_S, timeout_s=30)
                assert "an outage of the registry" in (pool_of(loop).held or "") and "2 would be right" in pool_of(loop).reason
                assert workers(mesh) == {"worker-0"} and not texts(loop, "scale") and load.num_answered
                os.kill(mesh.redis_pid, signal.SIGCONT)
                await eventually(lambda: texts(loop, "scale"), timeout_s=60)
        finally:
            os.kill(mesh.redis_pid, signal.SIGCONT)
        assert len(texts(loop, "resume")) == len(texts(loop, "hold")) and "both 1 → 2" in texts(loop, "scale")[0]


async def test_status_shows_what_was_decided_and_why(
    separated: tuple[LocalMesh, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PDMESH_CACHE", str(tmp_path))
    mesh, _ = separated
    async with _scaled(mesh, replace(OPTIONS, cool_down_s=600.0)):
        await eventually(lambda: local_state.latest(mesh.worker_addresses))
        assert await asyncio.to_thread(cli.run, ["status", "--router", mesh.router_address]) == 0
    shown = capsys.readouterr().out
    assert "\nprefill stays at 1: " in shown and "\ndecode stays at 2: " in shown
    assert local_state.latest(mesh.worker_addresses) is None, "nobody decides any more"


@pytest.mark.parametrize("is_separated", [False, True], ids=["both", "separated"])
async def test_an_idle_mesh_goes_to_zero_and_a_request_waits_for_it_to_come_back(
    tiny: Path, tmp_path: Path, *, is_separated: bool
) -> None:
    """Twice, with several requests that come at once, the second time to a router that is killed while there is no worker; each
    gets the tokens that it got from the first workers."""
    options = replace(OPTIONS, ttft_ms=200, zero_after_s=4.0)
    base = LocalMeshConfig(
        model=str(tiny), num_prefill=int(is_separated), num_decode=int(is_separated), num_both=int(not is_separated), port=0,
        num_threads=1, log_dir=str(tmp_path),
    )  # fmt: skip
    config = options.prepared(base)
    config = replace(config, router_args=("--objectives", str(options.objectives_file(config, tmp_path)), *config.router_args))
    async with LocalMesh(config, on_event=print) as mesh:
        footprint = Footprint.of(mesh)
        path = options.objectives_file(config, tmp_path)
        async with scaled(local_loop(mesh, options, path, print)) as loop, AsyncClient(mesh.router_addresses) as client:
            answers = [await _answer(client) for _ in range(2)]
            for is_second in (False, True):
                await eventually(lambda: not mesh.workers, timeout_s=60)
                if is_second:
                    await _restarted(mesh, "router-0")
                answers += await asyncio.gather(*(_answer(client) for _ in range(3)))
                footprint.grow(mesh)
            assert all(answer == answers[0] for answer in answers)
            assert any("no request for" in text and "will wait about" in text for text in texts(loop, "scale"))
            await assert_whole(mesh)
    footprint.assert_gone()


async def _restarted(mesh: LocalMesh, name: str) -> None:
    pid = mesh.pids[name]
    mesh.kill(name, signal.SIGKILL)
    await eventually(lambda: mesh.pids.get(name, pid) != pid, timeout_s=30)


async def _answer(client: AsyncClient) -> tuple[int, ...]:
    answer = await client.generate(oracle.prompt_of(1, PROMPT), temperature=0, max_tokens=8, ignore_eos=True, timeout=60)
    return tuple(answer.token_ids)


async def test_starts_that_fail_are_told_and_not_repeated_without_end(tiny: Path, tmp_path: Path) -> None:
    def broken(plan: ProcessPlan) -> ProcessPlan:
        return replace(plan, argv=(*plan.argv, "--no-such-flag")) if plan.name == "worker-1" else plan

    events: list[str] = []
    options = replace(OPTIONS, min_workers=2)
    async with scaled_mesh(tiny, tmp_path, options, events.append, adjust=broken) as (mesh, loop):
        began = time.monotonic()
        await eventually(lambda: any("worker-1 ended with code 2" in text for text in events), timeout_s=40)
        await eventually(lambda: any("both does not grow: worker-1" in text for text in texts(loop, "failed")), timeout_s=20)
        async with Load(mesh, num_clients=1).running() as load:
            await eventually(lambda: load.num_answered >= 4, timeout_s=40)
        num_tries = sum("worker-1 ended" in text for text in events)
        assert num_tries <= 2 + (time.monotonic() - began) / 2, "each failure doubles the time until the next try"
        assert workers(mesh) == {"worker-0"} and load.num_answered


async def test_roles_change_within_a_second(
    separated: tuple[LocalMesh, Path], record_property: Callable[[str, object], None]
) -> None:
    """An idle worker takes the other role, serves in it, and gives it back; nobody who is served meanwhile notices."""
    mesh, _ = separated
    async with Load(mesh, num_clients=1).running() as load:
        collector, changer = Collector(mesh.router_addresses, "tiny", window_s=2.0), RoleChanger(drain_timeout_s=5.0)
        for giver, taker in ((PoolName.DECODE, PoolName.PREFILL), (PoolName.PREFILL, PoolName.DECODE)):
            await collector.look(time.monotonic())
            pools = Pools({PoolName.PREFILL: Asked(1), PoolName.DECODE: Asked(2)}, collector.workers)
            began = time.monotonic()
            done = await changer.flip(Flip(giver, taker, 1), pools)
            assert done.problem is None and len(done.workers) == 1
            while next(worker for worker in collector.workers if worker.worker_id in done.workers).pool is not taker:
                await collector.look(time.monotonic())
            record_property(f"{giver}_to_{taker}_s", round(time.monotonic() - began, 3))
            print(f"{done.workers[0]} is known to be {taker} after {time.monotonic() - began:.3f} s")
            assert done.workers[0].startswith("decode"), "the one that was lent is the one that comes back"
            moved = next(worker for worker in collector.workers if worker.worker_id in done.workers)
            assert moved.home is PoolName.DECODE and moved.is_lent == (taker is PoolName.PREFILL)
        answered = load.num_answered
        await eventually(lambda: load.num_answered > answered + 1)
        await changer.close()
        await collector.close()


async def test_silence_is_no_idleness(separated: tuple[LocalMesh, Path]) -> None:
    """A router hangs while one of two idle workers waits for the end of its cool-down: it stays until there are figures again.
    A router that is killed is heard when it is back. Last of those with this mesh, which has one worker less afterwards."""
    mesh, path = separated
    options = replace(OPTIONS, cool_down_s=5.0)
    async with scaled(local_loop(mesh, options, path, print)) as loop:
        await eventually(lambda: loop.latest is not None and pool_of(loop, PoolName.DECODE).held == "cool-down", timeout_s=30)
        before = {worker.name: worker.pid for worker in mesh.workers}
        mesh.kill("router-0", signal.SIGSTOP)
        try:
            silent_s = loop.clock()
            await eventually(lambda: any("nothing changes" in text and "does not answer" in text for text in texts(loop, "hold")))
            await eventually(lambda: decided_s(loop) > silent_s + 1.5 * options.cool_down_s, timeout_s=60)
            assert not texts(loop, "resume") and not texts(loop, "scale")
            assert {worker.name: worker.pid for worker in mesh.workers} == before
        finally:
            mesh.kill("router-0", signal.SIGCONT)
        await eventually(lambda: len(mesh.workers) == 2, timeout_s=60)
        assert ["decode 2 → 1" in text for text in texts(loop, "scale")] == [True]
        pid = mesh.pids["router-0"]
        mesh.kill("router-0", signal.SIGKILL)
        await eventually(lambda: mesh.pids.get("router-0", pid) != pid, timeout_s=30)
        await mesh.wait_ready(30)
        again_s = loop.clock()
        await eventually(
            lambda: decided_s(loop) > again_s and loop.latest is not None and loop.latest[0].held is None, timeout_s=30
        )
        assert len(texts(loop, "resume")) == len(texts(loop, "hold")), "whoever is back is heard"
        assert len(texts(loop, "scale")) == 1
