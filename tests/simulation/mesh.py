"""A mesh in a simulated world: routers and workers as processes, each with the product's own classes, and clients."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdmesh.worker.assembly import Worker
from pdmesh.worker.config import WorkerConfig
from router.config import RouterConfig
from router.main import Router
from tests.simulation.engine import CONFIG, SimulatedEngine, make_engine
from tests.simulation.network import Network
from tests.simulation.world import Process, World
from tests.support.tiny_models import write_byte_tokenizer

MODEL = "sim"
_folders: list[str] = []


def model_folder() -> str:
    """Return the folder of the model, made once for all runs of this process."""
    if not _folders:
        folder = Path(tempfile.mkdtemp(prefix="pdmesh-sim-"))
        write_byte_tokenizer(folder)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        _folders.append(str(folder))
    return _folders[0]


@dataclass(eq=False)
class Member:
    """A worker or router of the mesh. `incarnation` counts its processes."""

    name: str
    address: str
    incarnation: int = 0
    process: Process | None = None
    worker: Worker | None = None
    router: Router | None = None
    roles: tuple[str, ...] = ()
    sizes: dict[str, int] = field(default_factory=dict)
    failures: list[BaseException] = field(default_factory=list)

    @property
    def is_up(self) -> bool:
        return self.process is not None and not self.process.is_dead


class SimulatedMesh:
    """Start and stop members; what is down may be started again at its address."""

    def __init__(self, world: World, network: Network) -> None:
        self.world, self.network = world, network
        self.workers: dict[str, Member] = {}
        self.routers: dict[str, Member] = {}
        self.graveyard: list[Any] = []

    def add_worker(self, name: str, roles: tuple[str, ...], **sizes: int) -> Member:
        member = Member(name, f"10.0.0.{len(self.workers) + 1}:7000")
        self.workers[name] = member
        member.roles, member.sizes = roles, sizes
        return member

    def add_router(self, name: str) -> Member:
        member = self.routers[name] = Member(name, f"10.0.1.{len(self.routers) + 1}:8100")
        return member

    def members(self) -> list[Member]:
        return [*self.workers.values(), *self.routers.values()]

    def start(self, member: Member) -> None:
        """Start a process for the member; it serves some time later."""
        member.incarnation += 1
        process = member.process = self.world.process(member.name)
        self.world.note("started", member.name, member.incarnation)
        process.start(self._run_worker(member) if member.name in self.workers else self._run_router(member))

    def kill(self, member: Member) -> None:
        """SIGKILL."""
        if member.process is not None and not member.process.is_dead:
            process = member.process
            self.graveyard += [set(process.tasks), member.worker, member.router]
            process.kill()
            self.network.died(process)
            member.worker = member.router = None

    async def _run_worker(self, member: Member) -> None:
        host, _, port = member.address.rpartition(":")
        engine = make_engine(model_folder(), **member.sizes)
        config = WorkerConfig(
            engine=engine.config, model_name=MODEL, host=host, port=int(port), transports=("grpc",), worker_id=member.name,
            roles=member.roles,
        )  # fmt: skip
        config.validate()
        worker = Worker(config, SimulatedEngine(engine), worker_id=member.name, on_failure=member.failures.append)
        member.worker = worker
        await worker.start()

    async def _run_router(self, member: Member) -> None:
        host, _, port = member.address.rpartition(":")
        config = RouterConfig(
            host=host, port=int(port), http_port=None, models=(f"{MODEL}={model_folder()}",), router_id=member.name,
            workers=tuple(worker.address for worker in self.workers.values()),
        )  # fmt: skip
        config.validate()
        router = Router(config)
        member.router = router
        await router.start()
