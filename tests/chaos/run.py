"""`make chaos`: thousands of faults in meshes of a tiny model, the second one encrypted, some hundreds in one of SmolLM2, in one
where each process has a host of its own, in one whose logs stand still, in one whose prefill workers fetch KV, in one whose
workers keep KV on disks that fail, and in one of pairs that speculate and answer with grammars and tools; goes on where it was
stopped.

    python -m tests.chaos --seconds 600 --kinds kill,stop --seed 7
    python -m tests.chaos --engine vllm

Writes `benchmarks/results/chaos.json` (`chaos_vllm.json`); exits 1 if a token was wrong, lost or repeated, a client saw an error
or something leaked.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.handoff.protection import cost_figures
from benchmarks.harness import say, write
from benchmarks.vllm.answers import EAGER
from pdmesh.models.catalogue import cache_folder
from pdmesh.models.registry import ensure_model
from pdmesh.worker.engines.registry import DEFAULT_ENGINE
from tests.chaos import report
from tests.chaos.campaign import Campaign
from tests.chaos.disks import can_have_mounts, with_own_mounts
from tests.chaos.hosts import MemoryGroup, can_have_namespaces, in_namespace
from tests.chaos.load import SHARES_CACHE, Load, Sizes, guided_jobs, make_jobs
from tests.chaos.mesh import ChaosMesh, MeshSize
from tests.chaos.plan import (
    ANY_MOMENT,
    BASE_KINDS,
    LIMIT_KINDS,
    NETWORK_KINDS,
    TIER_KINDS,
    TIER_STATES,
    Kind,
    PlannedFault,
    make_plan,
)
from tests.chaos.record import Progress, Round, Tally
from tests.support.tiny_models import make_tiny_model

TINY_FAULTS, REAL_FAULTS = 5070, 280  # 30 of each kind at each state; a quarter of the latter on a busy machine
VLLM_TINY_FAULTS, VLLM_REAL_FAULTS = 440, 110  # a worker takes some 20 s to come back
LIMIT_FAULTS = 280  # 10 of each kind at each state
PULL_FAULTS = 550
LOG_FAULTS = 220  # half of them of logs that stand still
PAIR_FAULTS = 200  # 100 of ranks, the others of what strikes any worker
HOST_FAULTS = 324  # 54 of each kind, of workers and of routers
TIER_FAULTS = 650  # 10 of each kind at each state
APART_VARIABLE = "PDMESH_CHAOS_APART"
"""Set in a process that is in a namespace of its own, to the stage that it runs alone: HOSTS or TIERS."""
HOSTS, TIERS = "hosts", "tiers"
TIER_FLAGS = ("--kv-pull", "always", "--kv-restore", "always", "--kv-disk-gb", "0.0019")
TIER_DISK_MB, TIER_HOST_GB = 4, 0.00103
"""A tiny model's block has 2.5 KiB: a pool of 400 blocks, as many in host memory, 700 on a disk with room for 1000."""
ROUND_FAULTS = 55
NUM_JOBS = 64
FLOAT32_FLAGS = ("--backend", "torch", "--dtype", "float32", "--quantization", "none")
MIN_LEAD = 1e-3
"""Nats: far above what two engines that compute in float32 differ by."""


@dataclass(frozen=True)
class Stage:
    """One campaign: its mesh, its load, its plan."""

    name: str
    size: MeshSize
    sizes: Sizes
    num_clients: int
    plan: Sequence[PlannedFault]
    one_at_a_time: bool = False
    min_lead: float = 0.0
    choices_handed_over: bool = True
    num_busy_loops: int = 0  # processes beside the mesh that compute all the time
    num_guided: int = 0  # of the load's requests: with a grammar, or a tool
    shares_cache: float = SHARES_CACHE

    @property
    def rounds(self) -> list[Sequence[PlannedFault]]:
        """The plan in batches; after each, the mesh has to come to rest."""
        return [self.plan[start : start + ROUND_FAULTS] for start in range(0, len(self.plan), ROUND_FAULTS)]


def tiny_stage(model: Path, plan: Sequence[PlannedFault]) -> Stage:
    """Three workers of each kind, so that two of each may be struck at once."""
    size = MeshSize(model, num_prefill=3, num_decode=3, kv_memory_mb=16)
    return Stage("tiny", size, Sizes(prompt=(40, 300), output=(8, 48), first_id=1, last_id=250), num_clients=8, plan=plan)


def real_stage(model: Path, plan: Sequence[PlannedFault]) -> Stage:
    """Two workers of each kind, one fault at a time: a stall has one cause."""
    size = MeshSize(model, num_prefill=2, num_decode=2, kv_memory_mb=256)
    sizes = Sizes(prompt=(40, 120), output=(8, 32), first_id=1000, last_id=40_000)
    return Stage(report.REAL_MODEL, size, sizes, num_clients=4, plan=plan, one_at_a_time=True)


def limits_stage(model: Path, seed: int) -> Stage:
    """Disks that are full, and control groups without memory where we may have some."""
    kinds = LIMIT_KINDS if MemoryGroup.is_allowed() else (Kind.DISK_FULL,)
    stage = tiny_stage(model, make_plan(seed, LIMIT_FAULTS, kinds))
    return replace(stage, name="tiny, limits")


def logs_stage(model: Path, seed: int) -> Stage:
    """Processes whose logs are taken by nothing, while the faults of others give them something to say."""
    others = (Kind.KILL, Kind.RESTART, Kind.RESET, Kind.BLACK_HOLE)
    stage = tiny_stage(model, _half_and_half(seed, LOG_FAULTS, (Kind.LOG_STANDS,), others))
    return replace(stage, name="tiny, logs")


def pulls_stage(model: Path, seed: int) -> Stage:
    """Prefill workers that fetch whatever another worker has."""
    kinds = (Kind.KILL, Kind.STOP, Kind.RESTART, Kind.RESET, Kind.BLACK_HOLE, Kind.SLOW, Kind.DROP, Kind.LOSSY)
    stage = tiny_stage(model, make_plan(seed, PULL_FAULTS, kinds))
    return replace(stage, name="tiny, pulls", size=replace(stage.size, engine_flags=("--kv-pull", "always")))


def _half_and_half(seed: int, num_faults: int, kinds: Sequence[Kind], others: Sequence[Kind]) -> list[PlannedFault]:
    """Return a plan of which every other fault is of `kinds`."""
    pairs = zip(make_plan(seed, num_faults // 2, kinds), make_plan(seed, num_faults // 2, others), strict=True)
    return [replace(fault, number=number) for number, fault in enumerate(fault for pair in pairs for fault in pair)]


def pairs_stage(model: Path, seed: int) -> Stage:
    """Workers of two processes each, which speculate; half of what is asked has a grammar or a tool."""
    others = (Kind.KILL, Kind.STOP, Kind.RESTART, Kind.RESET, Kind.BLACK_HOLE, Kind.SLOW)
    stage = tiny_stage(model, _half_and_half(seed, PAIR_FAULTS, (Kind.RANK_KILL,), others))
    flags = (*FLOAT32_FLAGS, "--tensor-parallel", "2", "--speculation", "auto")
    size = replace(stage.size, num_prefill=2, num_decode=2, engine_flags=flags, kv_memory_mb=2 * stage.size.kv_memory_mb)
    return replace(stage, name="tiny, pairs", size=size, num_clients=6, num_guided=NUM_JOBS // 2, min_lead=MIN_LEAD)


def hosts_stage(model: Path, seed: int) -> Stage:
    """Each process in a network namespace of its own, whose packets are lost."""
    stage = tiny_stage(model, make_plan(seed, HOST_FAULTS, NETWORK_KINDS))
    return replace(stage, name="tiny, hosts", size=replace(stage.size, has_hosts=True))


def tiers_stage(model: Path, seed: int) -> Stage:
    """Workers with small pools, and tiers beneath them, that restore and fetch whatever they can. Where nothing can be mounted,
    disks are never full or read-only."""
    has_mounts = can_have_mounts()
    unbounded = () if has_mounts else (Kind.KV_DISK_FULL, Kind.KV_DISK_READ_ONLY)
    kinds = [kind for kind in TIER_KINDS if kind not in unbounded]
    stage = tiny_stage(model, make_plan(seed, TIER_FAULTS, kinds, (ANY_MOMENT, *TIER_STATES)))
    size = replace(stage.size, kv_memory_mb=1, engine_flags=TIER_FLAGS)
    size = replace(size, kv_disk_mb=TIER_DISK_MB, has_mounts=has_mounts, kv_host_gb=TIER_HOST_GB)
    sizes = replace(stage.sizes, prompt=(100, 450))
    return replace(stage, name=report.TIERS, size=size, sizes=sizes, shares_cache=0.8)


def busy(stage: Stage) -> Stage:
    """The stage on a machine that has something else to do as well."""
    return replace(stage, name=f"{stage.name}, {report.BUSY}", num_busy_loops=3)


def encrypted(stage: Stage) -> Stage:
    """The stage with certificates and a secret in its mesh."""
    return replace(stage, name=f"{stage.name}, encrypted", size=replace(stage.size, is_encrypted=True))


def on_vllm(stage: Stage) -> Stage:
    """The stage with vLLM in its workers, in float32, and two of each kind, which is what the memory of a laptop holds. Their
    logits are not bit for bit the reference's, so what is asked has answers that do not hang on bits."""
    flags = ("--dtype", "float32", "--vllm-arg", EAGER)
    kv_memory_mb = 2 * stage.size.kv_memory_mb  # float32 takes twice as much
    size = replace(stage.size, num_prefill=2, num_decode=2, kv_memory_mb=kv_memory_mb, engine="vllm", engine_flags=flags)
    return replace(stage, size=size, num_clients=4, min_lead=MIN_LEAD, choices_handed_over=False)


@dataclass(frozen=True)
class EngineCampaigns:
    """What differs by the engine of the workers."""

    results: str
    tiny_faults: int
    real_faults: int
    goals: report.Goals
    tiny_model: str = "tiny"
    tiny_fields: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""  # of the file of rounds
    adapted: Callable[[Stage], Stage] = lambda stage: stage


CAMPAIGNS: Mapping[str, EngineCampaigns] = {
    DEFAULT_ENGINE: EngineCampaigns("chaos", TINY_FAULTS, REAL_FAULTS, report.OWN_GOALS),
    "vllm": EngineCampaigns(
        results="chaos_vllm",
        tiny_faults=VLLM_TINY_FAULTS,
        real_faults=VLLM_REAL_FAULTS,
        goals=report.VLLM_GOALS,
        tiny_model="tiny-vllm",
        tiny_fields={"head_dim": 32},  # a multiple of 32: what vLLM's kernels for CPUs ask for
        prefix="vllm-",
        adapted=on_vllm,
    ),
}


@contextlib.asynccontextmanager
async def busy_loops(number: int) -> AsyncIterator[None]:
    """Have so many processes compute within the block, each on a core if it gets one."""
    loops = [await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass") for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            await loop.wait()


async def run_stage(stage: Stage, progress: Progress, *, seed: int, until: float) -> None:
    """The rounds that are not done yet, as far as they begin before `until` (monotonic seconds)."""
    missing = [number for number in range(len(stage.rounds)) if progress.find(stage.name, number) is None]
    if not missing or time.monotonic() > until:
        return
    say(
        f"{stage.name}: {len(stage.plan)} faults, {len(missing)} of {len(stage.rounds)} rounds to do; answers of one engine first"
    )
    jobs = make_jobs(stage.size.model, stage.sizes, seed, NUM_JOBS - stage.num_guided, min_lead=stage.min_lead)
    jobs += await guided_jobs(stage.size.model, seed, stage.num_guided, FLOAT32_FLAGS) if stage.num_guided else []
    folder = Path(tempfile.mkdtemp(prefix="pdmesh-chaos-"))
    mesh = ChaosMesh(stage.size, folder)
    async with mesh, busy_loops(stage.num_busy_loops):
        load = Load(
            mesh.routers,
            jobs,
            seed=seed + missing[0],
            num_clients=stage.num_clients,
            choices_handed_over=stage.choices_handed_over,
            shares_cache=stage.shares_cache,
            tls=mesh.tls,
        )
        campaign = Campaign(stage.name, mesh, load, one_at_a_time=stage.one_at_a_time)
        for number in missing:
            if time.monotonic() > until:
                break
            done = await campaign.round(number, stage.rounds[number])
            progress.add(done)
            say(_line(done, len(stage.rounds)))
    left = mesh.left_behind()
    if left:
        progress.add(_left_behind(stage.name, left))
    if left or report.failures([each for each in progress.rounds if each.campaign == stage.name]):
        say(f"{stage.name}: something went wrong; the logs of all processes are in {folder / 'logs'}")
    else:
        shutil.rmtree(folder, ignore_errors=True)


def _left_behind(campaign: str, problems: Sequence[str]) -> Round:
    """Found after the last process should have ended; a round of its own, that no plan has."""
    return Round(campaign, -1, 0.0, [], [], Tally(), problems=problems)


def _line(done: Round, num_rounds: int) -> str:
    rate = 60 * len(done.dealt) / done.elapsed_s
    wrong = "; ".join(report.failures([done])[:3]) or "nothing wrong"
    dealt = f"{len(done.dealt)} faults in {done.elapsed_s:.0f} s ({rate:.0f} a minute), {len(done.not_dealt)} not dealt"
    moved = f", {dict(done.kv_counts)}" if done.kv_counts else ""
    return f"{done.campaign} {done.number + 1}/{num_rounds}: {dealt}, {done.tally.num_requests} requests{moved}; {wrong}"


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=1, help="of the plan; another one is another campaign (default: 1)")
    parser.add_argument("--engine", choices=tuple(CAMPAIGNS), default=DEFAULT_ENGINE, help="of the workers (default: our own)")
    parser.add_argument("--faults", type=int, help=f"on the tiny model (default: {TINY_FAULTS}; vllm: {VLLM_TINY_FAULTS})")
    parser.add_argument("--real-faults", type=int, help=f"on SmolLM2 (default: {REAL_FAULTS}; vllm: {VLLM_REAL_FAULTS})")
    parser.add_argument("--kinds", default="", help=f"comma separated, of: {', '.join(BASE_KINDS)} (default: all)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no round later; the next run goes on")
    parser.add_argument("--fresh", action="store_true", help="forget the rounds that former runs have done")
    arguments = parser.parse_args(argv)
    numbers = CAMPAIGNS[arguments.engine]
    arguments.faults = numbers.tiny_faults if arguments.faults is None else arguments.faults
    arguments.real_faults = numbers.real_faults if arguments.real_faults is None else arguments.real_faults
    return arguments


def _is_whole(arguments: argparse.Namespace) -> bool:
    """Is it the plan of `make chaos`? Then its results, however far it came, are the ones that documents may name."""
    numbers = CAMPAIGNS[arguments.engine]
    return (arguments.faults, arguments.real_faults, arguments.kinds) == (numbers.tiny_faults, numbers.real_faults, "")


async def _run(arguments: argparse.Namespace, kinds: Sequence[Kind], progress: Progress) -> None:
    until, numbers = time.monotonic() + arguments.seconds, CAMPAIGNS[arguments.engine]
    if arguments.faults:
        tiny = make_tiny_model(cache_folder() / "chaos" / numbers.tiny_model, **numbers.tiny_fields)
        half = (arguments.faults + 1) // 2
        plan = make_plan(arguments.seed, arguments.faults, kinds)
        for stage in (tiny_stage(tiny, plan[:half]), encrypted(tiny_stage(tiny, plan[half:]))):
            await run_stage(numbers.adapted(stage), progress, seed=arguments.seed, until=until)
    if arguments.real_faults:
        real = ensure_model("smollm2-135m-instruct", say)
        plan = make_plan(arguments.seed + 1, arguments.real_faults, kinds)
        most = len(plan) - len(plan) // 4
        for stage in (real_stage(real, plan[:most]), busy(real_stage(real, plan[most:]))):
            await run_stage(numbers.adapted(stage), progress, seed=arguments.seed, until=until)
    if _is_whole(arguments) and arguments.engine == DEFAULT_ENGINE:
        seed = arguments.seed
        pulls, logs = pulls_stage(tiny, seed + 6), logs_stage(tiny, seed + 5)
        for stage in (limits_stage(tiny, seed + 2), pulls, logs, pairs_stage(tiny, seed + 3)):
            await run_stage(stage, progress, seed=arguments.seed, until=until)


def _run_apart(name: str, arguments: argparse.Namespace, progress: Progress) -> int:
    """Run the stage of hosts, or of tiers, in a namespace of its own, and take in its rounds. Returns the exit code, 0 where
    there can be no namespaces of networks; tiers do without."""
    argv = [sys.executable, "-m", "tests.chaos", "--seed", str(arguments.seed), "--seconds", str(arguments.seconds)]
    if name == HOSTS:
        if not can_have_namespaces():
            say("no hosts: this machine has no network namespaces for us, or no `ip`, `unshare`, `nsenter` and `setpriv`")
            return 0
        argv = in_namespace(argv)
    elif can_have_mounts():
        argv = with_own_mounts(argv)
    with subprocess.Popen(argv, env={**os.environ, APART_VARIABLE: name}) as process:
        try:
            code = process.wait()
        except KeyboardInterrupt:  # the terminal has told it as well
            code = process.wait()
    progress.read_again()
    return code


def _run_one(name: str, arguments: argparse.Namespace, progress: Progress) -> int:
    """Run the stage of hosts, or of tiers, in this process, which is in a namespace of its own. Returns the exit code."""
    tiny, seed = make_tiny_model(cache_folder() / "chaos" / CAMPAIGNS[DEFAULT_ENGINE].tiny_model), arguments.seed
    stage = hosts_stage(tiny, seed + 4) if name == HOSTS else tiers_stage(tiny, seed + 7)
    try:
        asyncio.run(run_stage(stage, progress, seed=seed, until=time.monotonic() + arguments.seconds))
    except KeyboardInterrupt:
        return 1
    return 1 if report.failures([each for each in progress.rounds if each.campaign == stage.name]) else 0


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 1 if something was wrong."""
    arguments = _arguments(argv)
    numbers = CAMPAIGNS[arguments.engine]
    kinds = [Kind(name.strip()) for name in arguments.kinds.split(",")] if arguments.kinds else list(BASE_KINDS)
    name = f"{arguments.seed}-{arguments.faults}-{arguments.real_faults}-{'-'.join(kind.name.lower() for kind in kinds)}"
    progress = Progress(f"{numbers.prefix}{name}"[:120], fresh=arguments.fresh)
    if apart := os.environ.get(APART_VARIABLE):
        return _run_one(apart, arguments, progress)
    code = 0
    try:
        began = time.monotonic()
        asyncio.run(_run(arguments, kinds, progress))
        if _is_whole(arguments) and arguments.engine == DEFAULT_ENGINE:
            for name in (HOSTS, TIERS):
                arguments.seconds -= time.monotonic() - began
                began = time.monotonic()
                code |= _run_apart(name, arguments, progress)
    except KeyboardInterrupt:
        say(f"stopped; the same command goes on from {progress.path}")
    for line in report.lines(progress.rounds):
        say(line)
    if _is_whole(arguments):
        figures = report.figures(progress.rounds, goals=numbers.goals)
        if arguments.engine == DEFAULT_ENGINE and arguments.seconds == float("inf"):
            figures += cost_figures(ensure_model("smollm2-135m-instruct", say))
        write(numbers.results, figures, seed=arguments.seed, report=report.tables(progress.rounds))
    return 1 if code or report.failures(progress.rounds) else 0


if __name__ == "__main__":
    sys.exit(main())
