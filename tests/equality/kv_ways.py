"""The ways through a mesh whose workers bring KV whatever it costs: from their tiers what their pools have lost, from each other
what those lack. Pools and tiers are so small that both happen in nearly every way."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.engine_runs import flags_of
from kvtransfer.tiers.backends.block_file import HEADER_BYTES
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig, ProcessPlan
from tests.equality import mesh_runs
from tests.equality.ways import BLOCK_SIZE, Outcome, Task, decode_killed, router_killed, tight_groups
from tests.support import kv_counts

FORCED = ("--kv-pull", "always", "--kv-restore", "always")
GB = 1e9
_LOOK_S, _WRITTEN_S = 0.3, 60.0


@dataclass(frozen=True)
class Room:
    """Blocks that each pool has, and bytes of the prefill worker's tiers: the pool holds less than host memory, and that less
    than the disk, which lacks some of the prompts all the same. `disk_bytes` is far more than the decode workers write."""

    prefill_blocks: int
    decode_blocks: int
    host_bytes: int
    prefill_disk_bytes: int
    disk_bytes: int

    @classmethod
    def of(cls, task: Task) -> Room:
        """Return what makes the ways below do what they are named after."""
        block_bytes = task.engine().kv.shape.bytes_per_block
        needs = [-(-(len(prompt) + task.num_tokens) // BLOCK_SIZE) for prompt in task.prompts]
        total, longest = sum(needs), max(needs)
        of_prompts = sum(len(prompt) // BLOCK_SIZE for prompt in task.prompts)
        file_bytes = block_bytes + HEADER_BYTES
        prefill_blocks = max(of_prompts // 5, longest + 2)
        host_blocks = max(of_prompts * 2 // 5, prefill_blocks * 13 // 10)
        disk_blocks = max(of_prompts * 7 // 10, host_blocks * 6 // 5)
        return cls(
            prefill_blocks=prefill_blocks,
            decode_blocks=2 * total,
            host_bytes=host_blocks * block_bytes,
            prefill_disk_bytes=disk_blocks * file_bytes,
            disk_bytes=10 * total * file_bytes,
        )


def forced_mesh(task: Task, room: Room, folder: Path) -> LocalMesh:
    """One prefill worker, and two decode workers that share a disk, in `folder`."""

    def adjust(plan: ProcessPlan) -> ProcessPlan:
        if not plan.is_worker:
            return plan
        role, is_prefill = plan.roles[0], "prefill" in plan.roles
        num_blocks, num_bytes = (
            (room.prefill_blocks, room.prefill_disk_bytes) if is_prefill else (room.decode_blocks, room.disk_bytes)
        )
        disk = ("--kv-disk", str(folder / role), "--kv-disk-gb", str(num_bytes / GB))
        host = ("--kv-host-gb", str(room.host_bytes / GB)) if is_prefill else ()
        return replace(plan, argv=(*plan.argv, "--num-blocks", str(num_blocks), *disk, *host))

    flags = (*flags_of(task.settings), *FORCED)
    return LocalMesh(
        LocalMeshConfig(model=str(task.folder), num_decode=2, port=0, metrics_port=0, worker_args=flags, adjust=adjust)
    )


class Watch:
    """Count what workers brought since the last look."""

    def __init__(self, mesh: LocalMesh) -> None:
        self._mesh = mesh
        self._before: dict[tuple[str, int], Counter[str]] = {}

    async def look(self) -> Counter[str]:
        now = await kv_counts.read_counts(self._mesh.workers)
        found, self._before = kv_counts.since(self._before, now), now
        return found

    async def settled(self) -> Counter[str]:
        """As `look`, when no tier writes any more: what a pool publishes is written behind. Raises TimeoutError."""
        async with asyncio.timeout(_WRITTEN_S):
            before, now = None, await kv_counts.read_counts(self._mesh.workers)
            while now != before:
                await asyncio.sleep(_LOOK_S)
                before, now = now, await kv_counts.read_counts(self._mesh.workers)
        return await self.look()


async def forced_ways(task: Task, folder: Path, *, kills: bool = True) -> AsyncIterator[Outcome]:
    """(b) REMOTE, (c) LOCAL, (d) together, (g) decode worker killed, (h) router killed, (f) preempted, with KV that is brought;
    `folder` gets the disks. What was restored and what was fetched is evidence by itself."""
    async for outcome in first_ways(task, folder, kills=kills):
        yield outcome
    async for outcome in ways_started_again(task, folder, kills=kills):
        yield outcome
    yield await _preempted(task, folder)


async def first_ways(task: Task, folder: Path, *, kills: bool = True) -> AsyncIterator[Outcome]:
    """Those of a mesh that finds nothing in `folder`. `kills`: also with a decode worker killed; answers of a tiny model whose
    prompts are cached are over before the blow falls."""
    async with forced_mesh(task, Room.of(task), folder) as mesh:
        ask, watch = partial(mesh_runs.run, mesh.router_addresses, task.prompts, task.draw, task.num_tokens), Watch(mesh)
        # LOCAL first: then the decode workers have what the prefill workers lack, and fetch.
        streams = await ask(mode="local")
        written = (await watch.settled())[kv_counts.WRITTEN]
        yield Outcome("KV forced: mesh LOCAL, written behind", mesh_runs.tokens(streams), written)
        streams = await ask(mode="remote")
        fetched = (await watch.settled())[kv_counts.FETCHED]
        yield Outcome("KV forced: mesh REMOTE, fetched from decode workers", mesh_runs.tokens(streams), fetched)

        tokens = await _asked_backwards(task, mesh)
        found = await watch.settled()
        yield Outcome("KV forced: mesh REMOTE, restored from host memory", tokens, found[kv_counts.HOST])
        yield Outcome("KV forced: mesh REMOTE, restored from disk", tokens, found[kv_counts.DISK])

        if kills:
            killed = await decode_killed(mesh, ask)
            yield replace(killed, way=f"KV forced: {killed.way}")


async def ways_started_again(task: Task, folder: Path, *, kills: bool = True) -> AsyncIterator[Outcome]:
    """Those of a mesh that finds what another one has left in `folder`."""
    async with forced_mesh(task, Room.of(task), folder) as mesh:
        ask, watch = partial(mesh_runs.run, mesh.router_addresses, task.prompts, task.draw, task.num_tokens), Watch(mesh)
        streams = await ask(mode="local")
        restored = (await watch.settled())[kv_counts.RESTORED]
        yield Outcome("KV forced: mesh started again, LOCAL, restored", mesh_runs.tokens(streams), restored)
        streams = await ask(together=True, mode="remote")
        found = await watch.settled()
        brought = found[kv_counts.RESTORED] + found[kv_counts.FETCHED]
        yield Outcome("KV forced: mesh started again, REMOTE together, restored or fetched", mesh_runs.tokens(streams), brought)
        if kills:
            killed = await router_killed(mesh, ask)
            yield replace(killed, way=f"KV forced: {killed.way}")


async def _asked_backwards(task: Task, mesh: LocalMesh) -> list[list[int]]:
    """Return the tokens of each prompt, the last one asked first: in the same order as before, the least recently used block
    would always be the next that is wanted."""
    prompts = task.prompts[::-1]
    streams = await mesh_runs.run(mesh.router_addresses, prompts, task.draw, task.num_tokens, mode="remote")
    return mesh_runs.tokens(streams)[::-1]


async def _preempted(task: Task, folder: Path) -> Outcome:
    """(f) asked twice, in pools too small for all answers at once: the second time they are restored."""
    outputs: list[list[int]] = [[] for _ in task.prompts]
    evidence = Counter[str]()
    for number, group in enumerate(tight_groups(task.prompts, task.num_tokens)):
        disk = ("--kv-disk", str(folder / f"preempted-{number}"))
        chosen: Sequence[Sequence[int]] = [task.prompts[number] for number in group.numbers]
        async with task.mesh("--num-blocks", str(group.num_blocks), *FORCED, *disk, metrics_port=0) as mesh:
            watch = Watch(mesh)
            ask = partial(mesh_runs.run, mesh.router_addresses, chosen, task.draw, task.num_tokens, together=True)
            first = mesh_runs.tokens(await ask())
            await watch.settled()
            again = mesh_runs.tokens(await ask())
            evidence += await watch.settled()
        if again != first:
            raise AssertionError("the same prompts, asked again, gave other tokens")
        for number, answer in zip(group.numbers, again, strict=True):
            outputs[number] = answer
    return Outcome("KV forced: mesh, preempted", outputs, evidence[kv_counts.RESTORED])
