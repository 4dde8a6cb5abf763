"""A mesh in a simulated world: routers and workers as processes, each with the product's own classes, clients, and a Redis."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtransfer.tiers.settings import TierConfig
from pdmesh.runtime.registry.registry import Registry, worker_announcer
from pdmesh.worker.assembly import Worker
from pdmesh.worker.config import WorkerConfig
from router.config import RouterConfig
from router.main import Router
from tests.simulation import tiers
from tests.simulation.engine import CONFIG, SimulatedEngine, make_engine
from tests.simulation.environment.network import Network
from tests.simulation.environment.redis import Keys, RedisServer
from tests.simulation.scenario import Machine, Scenario
from tests.simulation.world import Process, World, current_process
from tests.support.tiny_models import write_byte_tokenizer

MODEL = "sim"
REDIS, REDIS_HOST, REDIS_PORT = "redis", "10.0.2.1", 6379
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

    def __init__(self, world: World, network: Network, scenario: Scenario) -> None:
        self.world, self.network, self.scenario = world, network, scenario
        self.workers: dict[str, Member] = {}
        self.routers: dict[str, Member] = {}
        self.redis = Member(REDIS, f"{REDIS_HOST}:{REDIS_PORT}") if scenario.redis != "none" else None
        self.redis_server: RedisServer | None = None
        self.graveyard: list[Any] = []
        self._machines = dict(scenario.machines)
        self._disk: Keys | None = None
        self._kv_disks: dict[str, tiers.Stored] = {}
        network.hosts[REDIS_HOST] = REDIS

    @property
    def redis_url(self) -> str:
        return f"redis://{self.redis.address}/0" if self.redis is not None else ""

    def kv_disk_of(self, name: str) -> tiers.Stored:
        """Return what the disk beneath a worker's pool holds; it stays when the worker dies."""
        return self._kv_disks.setdefault(name, {})

    def add_worker(self, name: str, roles: tuple[str, ...], **sizes: int) -> Member:
        member = Member(name, f"10.0.0.{len(self.workers) + 1}:7000")
        self.workers[name] = member
        self.network.hosts[member.address.rpartition(":")[0]] = name
        member.roles, member.sizes = roles, sizes
        return member

    def add_router(self, name: str) -> Member:
        member = self.routers[name] = Member(name, f"10.0.1.{len(self.routers) + 1}:8100")
        self.network.hosts[member.address.rpartition(":")[0]] = name
        return member

    def members(self) -> list[Member]:
        return [*self.workers.values(), *self.routers.values(), *([self.redis] if self.redis is not None else [])]

    def start(self, member: Member) -> None:
        """Start a process for the member; it serves some time later."""
        member.incarnation += 1
        process = member.process = self.world.process(member.name)
        machine = self._machines.get(member.name, Machine())
        process.host, process.clock_ppm, process.wall_skew_ns = machine.host, machine.clock_ppm, machine.wall_skew_ms * 10**6
        self.network.get_power(member.name)
        self.world.note("started", member.name, member.incarnation)
        if member is self.redis:
            process.start(self._run_redis())
        else:
            process.start(self._run_worker(member) if member.name in self.workers else self._run_router(member))

    def kill(self, member: Member, *, loses_power: bool = False) -> None:
        """SIGKILL, or what a host does to its processes when it loses power."""
        if member.process is not None and not member.process.is_dead:
            process = member.process
            self.graveyard += [set(process.tasks), member.worker, member.router]
            process.kill()
            (self.network.lose_power if loses_power else self.network.died)(process)
            member.worker = member.router = None
            if member is self.redis and self.redis_server is not None:
                self._disk = self.redis_server.disk if self.scenario.redis == "saved" else None

    async def _run_redis(self) -> None:
        self.redis_server = RedisServer(self._disk)
        await self.redis_server.run(REDIS_HOST, REDIS_PORT)

    async def _run_worker(self, member: Member) -> None:
        host, _, port = member.address.rpartition(":")
        transports = self.scenario.transports
        engine = make_engine(model_folder(), kv_shared="shm" in transports, **member.sizes)
        config = WorkerConfig(
            engine=engine.config, model_name=MODEL, host=host, port=int(port), transports=transports, worker_id=member.name,
            roles=member.roles, redis=self.redis_url, kv_pull="always" if self.scenario.seed % 2 else "auto",
            tiers=tiers.CONFIG if self.scenario.seed // 2 % 2 else TierConfig(),
        )  # fmt: skip
        config.validate()
        worker = Worker(config, SimulatedEngine(engine), worker_id=member.name, on_failure=member.failures.append)
        member.worker = worker
        await worker.start()
        if config.redis:  # as pdmesh.worker.main does
            announcer = worker_announcer(Registry(config.redis, config.mesh, ttl_s=config.registry_ttl_s), worker.info)
            announcer.start()
            worker.changes.subscribe(announcer.renew_now)

    async def _run_router(self, member: Member) -> None:
        host, _, port = member.address.rpartition(":")
        config = RouterConfig(
            host=host, port=int(port), http_port=None, models=(f"{MODEL}={model_folder()}",), router_id=member.name,
            workers=tuple(worker.address for worker in self.workers.values()) if self.scenario.is_static else (),
            redis=self.redis_url,
        )  # fmt: skip
        config.validate()
        router = Router(config)
        member.router = router
        await router.start()


def install_hosts() -> None:
    """Have each process belong to its simulated host: those of one host reach each other by shared memory."""
    import kvtransfer.transports.common
    import pdmesh.worker.description

    def host_id() -> str:
        process = current_process()
        return "" if process is None else process.host

    for owner in (kvtransfer.transports.common, pdmesh.worker.description):
        setattr(owner, "host_id", host_id)  # noqa: B010  a name that the module has imported
