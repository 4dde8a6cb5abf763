"""The meshes that are measured: how each is shaped, and how it is asked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from benchmarks.harness import PLAIN_FLAGS, say
from benchmarks.router.options import MODEL, Options
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from pdmesh.loadtest.targets.grpc import GrpcSettings, GrpcTarget


@dataclass(frozen=True)
class Shape:
    """Processes and how the router decides. `mode`: forced on every request ("local": nothing is separated); empty: the policy
    chooses. Each worker's engine gets cores of its own, as many as there are for each. `kv_memory_mb` of each worker."""

    key: str
    name: str
    num_prefill: int = 0
    num_decode: int = 0
    num_both: int = 0
    num_routers: int = 1
    policy: str = "predict"
    mode: str = ""
    kv_memory_mb: int = 1536
    worker_args: tuple[str, ...] = ()
    router_args: tuple[str, ...] = ()
    restart: bool = True

    def config(self, options: Options) -> LocalMeshConfig:
        return LocalMeshConfig(
            model=str(options.model),
            model_name=MODEL,
            num_prefill=self.num_prefill,
            num_decode=self.num_decode,
            num_both=self.num_both,
            num_routers=self.num_routers,
            port=0,
            bind_cpus=True,
            restart=self.restart,
            log_dir=str(options.folder / "logs" / self.key),
            worker_args=("--kv-memory-mb", str(self.kv_memory_mb), *PLAIN_FLAGS, *self.worker_args),
            router_args=("--policy", self.policy, *self.router_args),
        )


MESH = Shape("mesh", "pdmesh, two one-core workers", num_both=2)
# What is compared with fills its steps, as chunked prefill does: nobody there knows what was promised.
FULL_STEPS = ("--no-keep-pace",)
TWO_CORES = Shape(
    "two-cores",
    "one two-core engine, aggregated",
    num_both=1,
    policy="round-robin",
    mode="local",
    kv_memory_mb=3072,
    worker_args=FULL_STEPS,
)
TWO_ENGINES = Shape(
    "two-engines", "two one-core engines, aggregated", num_both=2, policy="least-loaded", mode="local", worker_args=FULL_STEPS
)
SEPARATED = Shape("separated", "separated: one prefill worker, one decode worker", num_prefill=1, num_decode=1)


@dataclass(frozen=True)
class Running:
    """A mesh that is ready. `target` asks as the shape says."""

    shape: Shape
    mesh: LocalMesh
    target: GrpcTarget


@asynccontextmanager
async def running(shape: Shape, options: Options) -> AsyncIterator[Running]:
    """Starts it, and ends all of its processes. Raises StartFailed."""
    say(f"{shape.name}: starting")
    async with LocalMesh(shape.config(options), on_event=say) as mesh, asking(mesh, mode=shape.mode) as target:
        yield Running(shape, mesh, target)


@asynccontextmanager
async def asking(mesh: LocalMesh, *, mode: str = "") -> AsyncIterator[GrpcTarget]:
    """Asks all routers, in `mode`."""
    target = GrpcTarget(",".join(mesh.router_addresses), GrpcSettings(mode=mode))
    try:
        yield target
    finally:
        await target.close()


def with_policy(shape: Shape, policy: str) -> Shape:
    """The same under another policy."""
    return replace(shape, key=f"{shape.key}-{policy}", name=f"{shape.name}, {policy}", policy=policy)
