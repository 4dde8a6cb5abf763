"""The processes of a local mesh: pure functions from its configuration to the command line of each process."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pdmesh
from pdmesh.engine.config import default_kv_share
from pdmesh.platform.capabilities import AFFINITY
from pdmesh.runtime.addresses import split_address
from pdmesh.runtime.child import StartFailed, import_path, python_command
from pdmesh.runtime.config import to_env
from pdmesh.runtime.rpc.mesh_secret import MeshSecretConfig
from pdmesh.runtime.rpc.tls import TlsConfig
from pdmesh.worker.engines.registry import DEFAULT_ENGINE, PACKAGES, START_TIMEOUT_S

EMBEDDED_REDIS = "embedded"
START_TIMEOUT_HELP = "how long the processes may take to get ready; 0: as the engine needs, 180 s, or 900 s of vllm"
ROLES_OF_PREFIX = {"prefill": ("prefill",), "decode": ("decode",), "worker": ("prefill", "decode")}
# What routers and workers import: a client-only installation lacks them.
_PACKAGES = (
    "grpc_health", "grpc_reflection", "redis", "tokenizers", "jinja2", "starlette", "uvicorn", "torch", "safetensors", "numpy",
    "crc32c",
)  # fmt: skip


@dataclass(frozen=True)
class LocalMeshConfig:
    """Configure a mesh on this machine."""

    model: str  # folder or .gguf file, ready to be loaded
    model_name: str = ""  # what clients ask for; empty: the name of the folder
    num_prefill: int = 1
    num_decode: int = 1
    num_both: int = 0  # workers with both roles
    num_routers: int = 1
    router_processes: int = 1  # of each router
    engine: str = DEFAULT_ENGINE  # of each worker, by name
    worker_python: str = ""  # interpreter of the workers: see `engine_python`; empty: the present one
    device: str = "cpu"
    host: str = "127.0.0.1"
    port: int = 8100  # of the first router, the others follow; 0: any free ones
    http_port: int | None = None  # OpenAI's API on the first router, the others follow; 0: any free ones; None: no HTTP
    http_batch_folder: str = ""  # of files and batches, shared by all routers; empty: there are no batches
    metrics_port: int | None = (
        None  # /metrics of the first router, the others and the workers follow; 0: any free ones; None: no such
    )
    console_port: int | None = None  # the page that shows the mesh; 0: any free one; None: no console
    console_host: str = "127.0.0.1"
    redis: str = EMBEDDED_REDIS  # or a URL
    mesh: str = "default"
    num_threads: int = 0  # of each worker; 0: the cores divided by the workers
    bind_cpus: bool = False  # each worker's engine to cores of its own, where there are enough: see `cpu_sets`
    lend_cores: bool = True  # workers compute on each other's cores while these have nothing to do
    core_table: str = ""  # the file that lending goes by; LocalMesh makes it
    max_workers: int = 0  # that there may be later: cores and memory are divided by this number; 0: the initial one
    drain_grace_s: float | None = None  # for a removed worker to finish its work; None: half of stop_grace_s
    restart: bool = True  # processes that die are started again
    start_timeout_s: float = START_TIMEOUT_S
    stop_grace_s: float = 3.0  # for each of: routers, workers
    log_dir: str = ""  # empty: a new temporary folder, which stays
    tls: TlsConfig = field(default_factory=TlsConfig)  # certificates of every process; none: nothing is encrypted
    throwaway_tls: bool = False  # make certificates for this mesh, and delete them when it stops
    mesh_secret: MeshSecretConfig = field(default_factory=MeshSecretConfig)  # of every process; none: ports serve all
    throwaway_secret: bool = False  # make a secret for this mesh, and delete it when it stops
    otlp_endpoint: str = ""  # collector that gets traces and metrics of every process; empty: what the environment says
    worker_args: tuple[str, ...] = ()
    router_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)  # added to every process's environment
    adjust: Callable[[ProcessPlan], ProcessPlan] | None = None  # changes flags or environment of each process

    @property
    def name_of_model(self) -> str:
        """Return the name that clients use."""
        return self.model_name or Path(self.model).resolve().stem

    @property
    def num_workers(self) -> int:
        """Return the number of all workers, whatever their roles."""
        return self.num_prefill + self.num_decode + self.num_both

    @property
    def num_sharing(self) -> int:
        """Return the number of workers by which cores and memory are divided."""
        return max(1, self.num_workers, self.max_workers)

    @property
    def has_lending(self) -> bool:
        """Return whether workers lend each other cores."""
        return self.lend_cores and self.can_lend and self.num_sharing > 1

    @property
    def can_lend(self) -> bool:
        """Return whether workers compute with the native kernels, which lend cores, unless these cannot be had."""
        own = " ".join(self.worker_args).replace("=", " ").split()
        given = dict(pairwise(own))
        is_native = given.get("--backend", "auto") in ("auto", "native") and given.get("--tensor-parallel", "1") == "1"
        return is_native and self.engine == DEFAULT_ENGINE and self.device == "cpu"

    @property
    def autoscaler_metrics_port(self) -> int | None:
        """Return the port after those of the routers, whether there is an autoscaler or not; the workers follow."""
        return self.metrics_port and self.metrics_port + self.num_routers * self.router_processes

    @property
    def num_metrics_ports(self) -> int:
        """Return the number of ports that the initial processes have."""
        return self.num_routers * self.router_processes + 1 + self.num_workers

    def validate(self) -> None:
        """Raise ValueError that names the field."""
        for name in ("num_prefill", "num_decode", "num_both", "num_threads", "max_workers"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: must not be negative")
        if self.bind_cpus and self.max_workers:
            raise ValueError("bind_cpus: excludes max_workers, as the number of workers that share the cores is not known")
        if self.num_decode + self.num_both < 1:
            raise ValueError("num_decode: a mesh needs a worker that decodes; give at least 1")
        if self.num_routers < 1:
            raise ValueError("num_routers: a mesh needs a router; give at least 1")
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65535 - self.num_metrics_ports:
            raise ValueError("metrics_port: must be a port that leaves one for each process behind it")
        if self.throwaway_tls and self.tls.is_set:
            raise ValueError("throwaway_tls: excludes certificates of your own (tls)")
        if self.throwaway_secret and self.mesh_secret.is_set:
            raise ValueError("throwaway_secret: excludes a secret of your own (mesh_secret)")


@dataclass(frozen=True)
class ProcessPlan:
    """Describe one process to run."""

    name: str
    roles: tuple[str, ...]  # "router", "console", or of a worker: "prefill", "decode"
    argv: tuple[str, ...]
    env: Mapping[str, str]

    @property
    def is_worker(self) -> bool:
        """Return whether it runs an engine."""
        return not {"router", "console"}.intersection(self.roles)


def worker_plans(config: LocalMeshConfig, redis_url: str, cores: Sequence[int]) -> list[ProcessPlan]:
    """Return one plan for each worker: prefill-0 …, decode-0 …, worker-0 … (both roles). `cores`: those that they may use."""
    counts = {"prefill": config.num_prefill, "decode": config.num_decode, "worker": config.num_both}
    named = [(f"{prefix}-{index}", roles) for prefix, roles in ROLES_OF_PREFIX.items() for index in range(counts[prefix])]
    sets = cpu_sets(config, cores) or [()] * len(named)
    first = config.autoscaler_metrics_port
    return [
        _worker(config, name, roles, redis_url, cores, cpus, metrics_port=first and first + 1 + number)
        for number, ((name, roles), cpus) in enumerate(zip(named, sets, strict=True))
    ]


def worker_plan(config: LocalMeshConfig, name: str, redis_url: str, cores: Sequence[int]) -> ProcessPlan:
    """Return the plan of an additional worker; its name begins with its roles, as those of `worker_plans` do."""
    roles = ROLES_OF_PREFIX[name.rpartition("-")[0]]
    port = None if config.metrics_port is None else 0
    return _worker(config, name, roles, redis_url, cores, (), metrics_port=port)


def num_threads(config: LocalMeshConfig, cores: Sequence[int]) -> int:
    """Return the threads of each worker."""
    return config.num_threads or max(1, len(cores) // config.num_sharing)


def cpu_sets(config: LocalMeshConfig, cores: Sequence[int]) -> list[tuple[int, ...]]:
    """Return disjoint cores for the engine of each worker; none when they are not to be bound, the system cannot, or there are
    fewer cores than workers (or than their threads). Neighbours stay together: they share caches. The remaining cores serve
    everything else."""
    share = len(cores) // max(1, config.num_workers)
    if not config.bind_cpus or not AFFINITY.is_there or share < max(1, config.num_threads):
        return []
    return [tuple(cores[index * share : (index + 1) * share]) for index in range(config.num_workers)]


def _kv_share(config: LocalMeshConfig) -> float:
    """Return each worker's share of the device's free memory after loading: together they leave as much as one with the default;
    on a CPU as two, as our engine's pool takes memory only where it is used. Another engine's takes all of it at once."""
    alone = default_kv_share(config.device)
    fills_later = config.device == "cpu" and config.engine == DEFAULT_ENGINE
    return min(alone, (2 * alone if fills_later else alone) / config.num_sharing)


def _worker(
    config: LocalMeshConfig,
    name: str,
    roles: tuple[str, ...],
    redis_url: str,
    cores: Sequence[int],
    cpus: tuple[int, ...],
    *,
    metrics_port: int | None,
) -> ProcessPlan:
    threads = num_threads(config, cores)
    flags = {
        "--worker-id": name,
        "--roles": ",".join(roles),
        "--model": config.model,
        "--model-name": config.name_of_model,
        "--engine": config.engine,
        "--device": config.device,
        "--host": config.host,
        "--port": "0",
        **_metrics_flag(metrics_port),
        "--mesh": config.mesh,
        "--num-threads": str(threads),
        **({"--cpus": ",".join(map(str, cpus))} if cpus else {}),
        **_lending_flags(config, threads, len(cores)),
        "--kv-memory-share": f"{_kv_share(config):.4g}",
        "--drain-grace-s": str(config.stop_grace_s / 2 if config.drain_grace_s is None else config.drain_grace_s),
    }
    # Idle threads that spin would take the cores from the other workers' threads.
    openmp = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
    python = config.worker_python
    command = _command("pdmesh.worker", flags, config.worker_args, python)
    return ProcessPlan(name, roles, command, {**_environment(config, redis_url, python), **openmp})


def _lending_flags(config: LocalMeshConfig, threads: int, num_cores: int) -> dict[str, str]:
    """Return how a worker shares cores: those of workers that are not there (yet, or any more) included."""
    if not config.core_table:
        return {}
    return {"--core-table": config.core_table, "--shared-cores": str(min(num_cores, config.num_sharing * threads))}


def router_plans(config: LocalMeshConfig, redis_url: str) -> list[ProcessPlan]:
    """Return one plan for each router: router-0 …, on consecutive ports."""
    return [_router(config, index, redis_url) for index in range(config.num_routers)]


def _router(config: LocalMeshConfig, index: int, redis_url: str) -> ProcessPlan:
    name = f"router-{index}"
    flags = {
        **({"--processes": str(config.router_processes)} if config.router_processes > 1 else {}),
        **_metrics_flag(config.metrics_port and config.metrics_port + index * config.router_processes),
        "--host": config.host,
        "--port": str(config.port + index if config.port else 0),
        "--http-port": "" if config.http_port is None else str(config.http_port + index if config.http_port else 0),
        **({"--http-batch-folder": config.http_batch_folder} if config.http_batch_folder else {}),
        "--models": f"{config.name_of_model}={config.model}",
        "--mesh": config.mesh,
        "--drain-grace-s": str(config.stop_grace_s / 2),
    }
    return ProcessPlan(name, ("router",), _command("router", flags, config.router_args), _environment(config, redis_url))


def _metrics_flag(port: int | None) -> dict[str, str]:
    return {} if port is None else {"--metrics-port": str(port)}


def console_plan(
    config: LocalMeshConfig, otlp_address: str, routers: Sequence[str], *, forward: str = "", redis_url: str = ""
) -> ProcessPlan:
    """Return the plan of the console, which receives traces at `otlp_address` and forwards them to the collector at `forward`, if
    any."""
    host, port = split_address(otlp_address)
    flags = {
        "--routers": ",".join(routers),
        "--host": config.console_host,
        "--port": str(config.console_port),
        "--otlp-host": host,
        "--otlp-port": str(port),
        "--forward-otlp": forward,
    }
    return ProcessPlan(
        "console", ("console",), _command("pdmesh.console", flags, ("--otlp-port-is-held",)), _environment(config, redis_url)
    )


def with_port(plan: ProcessPlan, port: int, flag: str = "--port") -> ProcessPlan:
    """Return the plan with a fixed port: a restarted router must be found where it was."""
    at = plan.argv.index(flag) + 1
    return ProcessPlan(plan.name, plan.roles, (*plan.argv[:at], str(port), *plan.argv[at + 1 :]), plan.env)


def _command(module: str, flags: Mapping[str, str], more: tuple[str, ...], python: str = "") -> tuple[str, ...]:
    return (
        *python_command("-m", module, python=python),
        *(part for pair in flags.items() for part in pair),
        "--exit-with-parent",
        *more,
    )


def _environment(config: LocalMeshConfig, redis_url: str, interpreter: str = "") -> dict[str, str]:
    """Return what children need: the import path of this code, installed or not; the Redis URL, which may hold a password and so
    is not a flag; and the certificates and the mesh secret, or that there are none, whatever our own environment says."""
    collector = {"PDMESH_OTLP_ENDPOINT": config.otlp_endpoint} if config.otlp_endpoint else {}
    python = {**import_path(interpreter), "PYTHONUNBUFFERED": "1"}
    trust = {**to_env(config.tls), **to_env(config.mesh_secret)}
    return {**python, "PDMESH_REDIS": redis_url, **trust, **collector, **config.env}


def check_packages() -> None:
    """Raise StartFailed, with the command that installs them, when packages are missing that the processes need."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise StartFailed(
            f"Python packages are missing ({', '.join(missing)}); install what a mesh on this machine needs with: "
            "pip install 'pdmesh[local]'"
        )


_CHECK_ENGINE = """
import sys
from pdmesh.runtime.config import ConfigError
from pdmesh.worker.engines.registry import require
try:
    require(*sys.argv[1:])
except ConfigError as error:
    sys.exit(str(error))
"""


def engine_python(engine: str, device: str) -> str:
    """Return the interpreter for workers with the engine (`found_python`). Raises StartFailed, with what to do, if there is none,
    or it cannot run the engine on the device."""
    package, python = PACKAGES.get(engine), found_python(engine)
    if package is None:
        return sys.executable
    if not python:
        raise StartFailed(
            f"--engine {engine}: the package {package.module} is not installed here; {package.remedy}; or name an interpreter "
            f"that has it in {package.python_variable}"
        )
    try:
        _check_engine(python, engine, device)
    except OSError as error:
        raise StartFailed(f"{package.python_variable}: {python}: {error.strerror}; name a Python interpreter") from None
    return python


def found_python(engine: str) -> str:
    """Return the present interpreter if it has the engine's package, else the one that the engine's variable names, else that of
    the engine's environment in this checkout; empty: there is none."""
    package = PACKAGES.get(engine)
    if package is None or package.version() is not None:
        return sys.executable
    made = Path(pdmesh.__file__).parents[1] / package.folder / "bin/python"
    return os.environ.get(package.python_variable, "") or (str(made) if made.is_file() else "")


def _check_engine(python: str, engine: str, device: str) -> None:
    """Ask the interpreter whether it can run the engine. Raises OSError, or StartFailed with its answer."""
    command = python_command("-c", _CHECK_ENGINE, engine, device, python=python)
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **import_path(python)}, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise StartFailed(f"{python} cannot run the engine {engine}: {said[-1] if said else 'it ended'}")
