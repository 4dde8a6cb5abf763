"""A mesh whose requests are followed: it sends its traces to a collector of ours, and all of its processes have failpoints."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from benchmarks.harness import say
from pdmesh.client.client import AsyncClient
from pdmesh.client.types import Generation
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig, ProcessPlan
from tests.chaos.arming import Arming
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.traces import Trace, trace_of

ENGINE_FAILPOINTS = Path(__file__).parent / "engine_failpoints"
ROUTERS, PREFILLS, DECODES = ("router-0",), ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
# Placed by nothing that differs from one run to the next, and by nobody twice.
STEADY = ("--policy=least-loaded", "--hedge-share=0", "--rebalance=off")
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Traced:
    """The mesh, its collector, and the failpoints of each process."""

    mesh: LocalMesh
    receiver: OtlpReceiver
    armings: dict[str, Arming]
    numbers: Iterator[int] = field(default_factory=lambda: count(9000))

    async def ask(self, client: AsyncClient, mode: str = "remote", *, length: int = 150, max_tokens: int = 16) -> Generation:
        """A prompt of `length` tokens that nobody has seen."""
        number = next(self.numbers)
        return await client.generate(
            unseen(number, length),
            max_tokens=max_tokens,
            temperature=0,
            ignore_eos=True,
            mode=mode,
            request_id=f"r{number}",
            timeout=TIMEOUT_S,
        )

    async def trace(self, request_id: str, wanted: Set[str], enough: Callable[[Trace], bool] = lambda _: True) -> Trace:
        """See `trace_of`."""
        return await trace_of(self.receiver, request_id, wanted, enough)

    def arm(self, names: Sequence[str], point: str, action: str) -> None:
        """In the processes of these names."""
        for name in names:
            self.armings[name].arm(point, action)

    def disarm(self) -> None:
        """All of them."""
        for arming in self.armings.values():
            arming.disarm_all()


def unseen(number: int, length: int) -> list[int]:
    """Token ids, the same ones for the same number, such as every model has: those of bytes, or of as many first entries."""
    return random.Random(number).choices(range(1, 250), k=length)


@asynccontextmanager
async def traced_mesh(config: LocalMeshConfig, folder: Path) -> AsyncIterator[Traced]:
    """Two workers of each kind; what dies is started again. `folder` gets the files of the failpoints. Raises StartFailed."""
    armings = {name: Arming(folder / name) for name in (*ROUTERS, *PREFILLS, *DECODES)}

    def adjust(plan: ProcessPlan) -> ProcessPlan:
        env = {**plan.env, **armings[plan.name].environment}
        if plan.is_worker:
            env["PYTHONPATH"] = f"{ENGINE_FAILPOINTS}{os.pathsep}{env['PYTHONPATH']}"
        return replace(plan, env=env)

    with OtlpReceiver() as receiver:
        config = replace(
            config,
            num_prefill=len(PREFILLS),
            num_decode=len(DECODES),
            num_threads=1,
            router_args=STEADY,
            otlp_endpoint=receiver.endpoint,
            adjust=adjust,
        )
        async with LocalMesh(config, on_event=say) as mesh:
            yield Traced(mesh, receiver, armings)
