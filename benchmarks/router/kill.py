"""One of two routers is killed under load. Half of the streams prefer it: they go on at the other one through the client library;
the other half must not notice. Both halves are compared with the same prompts when nobody was killed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks.engine_runs import prompt
from benchmarks.harness import Figure, Options, say
from benchmarks.router.meshes import MESH, running
from pdmesh.client.client import AsyncClient, Completed, Delta
from pdmesh.errors import MeshError
from pdmesh.launcher.mesh import LocalMesh

SHAPE = replace(MESH, key="kill", name="two routers, two one-core workers", num_routers=2, restart=False)
VICTIM = "router-1"
PROMPT_TOKENS, STREAMS_OF_EACH, DISTURB_AFTER = 120, 8, 8


@dataclass
class Followed:
    """One stream as a client saw it. `longest_gap_s` between two messages with tokens."""

    num_resumes: int = 0
    error: str = ""
    completed: bool = False
    longest_gap_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    grown: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, client: AsyncClient, ids: Sequence[int], num_tokens: int) -> None:
        try:
            async with client.generate_stream(
                list(ids), max_tokens=num_tokens, temperature=0, ignore_eos=True, timeout=120
            ) as stream:
                last = time.monotonic()
                async for event in stream:
                    if isinstance(event, Delta):
                        self.tokens += event.token_ids
                        last = self._gap(last)
                    elif isinstance(event, Completed):
                        self.num_resumes, self.completed = event.num_resumes, True
        except MeshError as error:
            self.error = f"{error.code.name}: {error.message}"
        finally:
            self.grown.set()

    def _gap(self, last: float) -> float:
        now = time.monotonic()
        if len(self.tokens) > 1:
            self.longest_gap_s = max(self.longest_gap_s, now - last)
        if len(self.tokens) >= DISTURB_AFTER:
            self.grown.set()
        return now


@dataclass(frozen=True)
class Halves:
    """The streams of a run by the router that they prefer."""

    spared: list[Followed]
    struck: list[Followed]


async def _run(mesh: LocalMesh, num_tokens: int, *, kill: bool) -> Halves:
    """All streams at once; with `kill`, the second router is killed when all of its streams are in the middle."""
    first, second = mesh.router_addresses
    halves = Halves([Followed() for _ in range(STREAMS_OF_EACH)], [Followed() for _ in range(STREAMS_OF_EACH)])
    async with AsyncClient((first, second)) as spared, AsyncClient((second, first)) as struck, asyncio.TaskGroup() as group:
        for client, streams, offset in ((spared, halves.spared, 0), (struck, halves.struck, 1000)):
            for number, stream in enumerate(streams):
                group.create_task(stream.run(client, prompt(offset + number, PROMPT_TOKENS), num_tokens))
        if kill:
            await asyncio.gather(*(stream.grown.wait() for stream in halves.struck))
            mesh.kill(VICTIM)
    return halves


def figures_of(reference: Halves, seen: Halves) -> list[Figure]:
    """Pure."""
    same = sum(now.completed and now.tokens == before.tokens for now, before in zip(seen.struck, reference.struck, strict=True))
    spared = sum(now.completed and now.tokens == before.tokens for now, before in zip(seen.spared, reference.spared, strict=True))
    undisturbed = (*reference.spared, *reference.struck)
    fewest = [
        ("requests of the other router: completed with the same tokens", spared, STREAMS_OF_EACH),
        ("streams of the killed router: completed with the same tokens", same, STREAMS_OF_EACH),
        ("streams of the killed router: resumed on the other", sum(one.num_resumes > 0 for one in seen.struck), STREAMS_OF_EACH),
    ]
    most = [
        ("requests of the other router: errors", sum(bool(one.error) for one in seen.spared)),
        ("requests of the other router: resumed", sum(one.num_resumes > 0 for one in seen.spared)),
        ("errors without a kill", sum(bool(one.error) for one in undisturbed)),
    ]
    gaps = [
        ("streams of the killed router: longest pause", max(one.longest_gap_s for one in seen.struck)),
        ("requests of the other router: longest pause", max(one.longest_gap_s for one in seen.spared)),
        ("longest pause without a kill", max(one.longest_gap_s for one in undisturbed)),
    ]
    return [
        *(Figure(f"one of two routers killed: {name}", value, "streams", "higher", goal) for name, value, goal in fewest),
        *(Figure(f"one of two routers killed: {name}", value, "streams", "lower", 0) for name, value in most),
        *(Figure(f"one of two routers killed: {name}", 1e3 * value, "ms", "lower") for name, value in gaps),
    ]


async def figures(options: Options) -> list[Figure]:
    """An undisturbed run, then one in which the second router is killed."""
    num_tokens = int(options.pick(256, 96))
    async with running(SHAPE, options) as system:
        reference = await _run(system.mesh, num_tokens, kill=False)
        seen = await _run(system.mesh, num_tokens, kill=True)
    for one in (*seen.spared, *seen.struck):
        if one.error:
            say(f"kill: {one.error}")
    return figures_of(reference, seen)
