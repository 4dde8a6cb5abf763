"""Prefill and decode workers of different tensor-parallel degrees: real processes, equal tokens, loud ends."""

import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.engine_runs import GREEDY, SAMPLED, Draw, make_engine, run
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig, ProcessPlan
from tests.equality import mesh_runs
from tests.mesh import oracle
from tests.mesh.checks import Footprint, assert_whole, is_running
from tests.support.waiting import eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="on the CPU ranks share memory as Linux has it")
NUM_TOKENS = 16
# Of one token, of whole blocks, of several steps (the budget is 64 tokens).
PROMPTS = [oracle.prompt_of(700 + length, length) for length in (1, 16, 70, 200)]
WORKER_ARGS = ("--backend", "torch", "--dtype", "float32", "--max-num-batched-tokens", "64", "--num-blocks", "256")
# Up to four ranks take turns on a busy machine's two cores: no late prompt is to be computed elsewhere.
PATIENT = ("--lease-s", "30", "--stream-timeout-s", "10")
ROUTER_ARGS = ("--hedge-share", "0")


def expected(folder: Path, draw: Draw) -> list[list[int]]:
    """Of one engine of one rank."""
    engine = make_engine(folder, backend="torch", dtype="float32", num_blocks=256, num_threads=1)
    try:
        return run(engine, PROMPTS, draw.params(NUM_TOKENS))
    finally:
        engine.close()


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_hand_off_between_degrees_gives_the_same_tokens(tiny: Path, prefill: int, decode: int, transport: str) -> None:
    async with mesh_with(tiny, {"prefill-0": prefill, "decode-0": decode}, (*PATIENT, "--transports", transport)) as mesh:
        footprint = Footprint.of(mesh)
        ranks = [pid for worker in ("prefill-0", "decode-0") for pid in ranks_of(mesh, worker)]
        assert len(ranks) == prefill + decode - 2
        for draw in (GREEDY, SAMPLED, GREEDY):  # the last time the beginnings are cached on both ends
            streams = await mesh_runs.run(mesh.router_addresses, PROMPTS, draw, NUM_TOKENS, mode="remote", together=True)
            assert mesh_runs.tokens(streams) == expected(tiny, draw)
            assert {s.timings.transport for s in streams if s.timings} == {transport}
        await assert_whole(mesh)
        footprint.grow(mesh)
    footprint.assert_gone()
    assert not any(map(is_running, ranks))


async def test_ranks_fetch_what_ranks_have(tiny: Path) -> None:
    """The decode worker computed the prompts; the prefill worker, cold, gets all of it but their last blocks."""
    args = (*PATIENT, "--kv-pull", "always")
    async with mesh_with(tiny, {"prefill-0": 2, "decode-0": 2}, args) as mesh:
        first = await mesh_runs.run(mesh.router_addresses, PROMPTS, GREEDY, NUM_TOKENS, mode="local")
        again = await mesh_runs.run(mesh.router_addresses, PROMPTS, GREEDY, NUM_TOKENS, mode="remote")
        assert mesh_runs.tokens(again) == mesh_runs.tokens(first)
        assert mesh_runs.tokens(again) == expected(tiny, GREEDY)
        cached = [stream.timings.prefill_cached_tokens for stream in again if stream.timings]
        assert cached == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]
        await assert_whole(mesh)


async def test_a_rank_that_dies_idle_ends_its_worker_which_comes_back(tiny: Path) -> None:
    async with mesh_with(tiny, {"decode-0": 2}) as mesh:
        worker, [rank] = mesh.pids["decode-0"], ranks_of(mesh, "decode-0")
        os.kill(rank, signal.SIGKILL)
        await eventually(lambda: not is_running(worker), timeout_s=30)
        await eventually(lambda: mesh.pids.get("decode-0") not in (None, worker), timeout_s=30)
        [stream] = await mesh_runs.run(mesh.router_addresses, PROMPTS[2:3], GREEDY, NUM_TOKENS)
        assert stream.token_ids == expected(tiny, GREEDY)[2]


async def test_a_killed_worker_leaves_no_rank(tiny: Path) -> None:
    async with mesh_with(tiny, {"decode-0": 2}) as mesh:
        worker, [rank] = mesh.pids["decode-0"], ranks_of(mesh, "decode-0")
        os.kill(worker, signal.SIGKILL)
        await eventually(lambda: not is_running(rank), timeout_s=10)


def mesh_with(folder: Path, degrees: Mapping[str, int], worker_args: tuple[str, ...] = ()) -> LocalMesh:
    """One worker of each kind, of these degrees (else 1)."""

    def adjust(plan: ProcessPlan) -> ProcessPlan:
        degree = degrees.get(plan.name, 1)
        return replace(plan, argv=(*plan.argv, "--tensor-parallel", str(degree))) if plan.is_worker else plan

    args = (*WORKER_ARGS, *worker_args)
    config = LocalMeshConfig(model=str(folder), port=0, num_threads=1, worker_args=args, router_args=ROUTER_ARGS, adjust=adjust)
    return LocalMesh(config)


def ranks_of(mesh: LocalMesh, worker: str) -> list[int]:
    """Processes that the worker has started."""
    parent = mesh.pids[worker]
    tasks = Path(f"/proc/{parent}/task").glob("*/children")
    return [int(pid) for task in tasks for pid in task.read_text().split()]
