"""`pdmesh up`: runs a mesh on this machine until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from rich.console import RenderableType

from pdmesh import overrides
from pdmesh.adapter_id import ADAPTER_FILES, named_folder
from pdmesh.client.channel import DEFAULT_ADDRESS
from pdmesh.commands.tls import exports
from pdmesh.commands.up_autoscale import AutoscaleOptions, Shown, local_loop, scaled
from pdmesh.engine.config import EngineConfig, named_proposers
from pdmesh.launcher.layout import expectation
from pdmesh.launcher.local_state import TARGETS_FILE, DecisionFile, MetricsFiles, Target, follow
from pdmesh.launcher.mesh import LocalMesh, process_table
from pdmesh.launcher.plan import EMBEDDED_REDIS, START_TIMEOUT_HELP, LocalMeshConfig, check_packages, engine_python
from pdmesh.models import registry
from pdmesh.models.registry import check_headers
from pdmesh.platform.fallbacks import cores_to_share
from pdmesh.runtime.child import StartFailed
from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.rpc.mesh_secret import VARIABLE, MeshSecretConfig
from pdmesh.runtime.rpc.tls import TlsConfig
from pdmesh.runtime.telemetry.config import parse_endpoint
from pdmesh.terminal import show
from pdmesh.text.generation_config import GenerationConfig
from pdmesh.worker.config import WorkerConfig
from pdmesh.worker.engines.registry import DEFAULT_ENGINE, ENGINE_HELP, ENGINES, check_settings, start_timeout_s
from pdmesh.worker.engines.vllm_settings import VLLM_ARG_HELP
from router.engine_bridge.address import parse_all


@dataclass(frozen=True)
class Options:
    """Start a mesh on this machine, and stop it with Ctrl-C: pdmesh up --prefill 1 --decode 1."""

    prefill: int = field(default=1, metadata={"help": "workers that compute prompts"})
    decode: int = field(default=1, metadata={"help": "workers that decode"})
    both: int = field(default=0, metadata={"help": "workers with both roles"})
    routers: int = field(default=1, metadata={"help": "routers, on consecutive ports"})
    router_processes: int = field(default=1, metadata={"help": "processes of each router, which share its ports"})
    model: str = field(default=registry.DEFAULT_MODEL, metadata={"help": "known name, folder, .gguf file or name of the hub"})
    offline: bool = field(default=False, metadata={"help": "take a model of the hub from its cache alone"})
    override: tuple[str, ...] = field(default=(), metadata={"help": overrides.HELP, "repeated": True})
    engine: str = field(default=DEFAULT_ENGINE, metadata={"help": ENGINE_HELP, "choices": ENGINES})
    vllm_args: tuple[str, ...] = field(default=(), metadata={"help": VLLM_ARG_HELP, "flag": "vllm_arg", "repeated": True})
    device: Literal["cpu", "cuda"] = field(default="cpu", metadata={"help": "where the engines compute"})
    host: str = field(default="127.0.0.1", metadata={"help": "address to listen on"})
    port: int = field(default=8100, metadata={"help": "port of the (first) router; 0: any free one"})
    http_port: int | None = field(
        default=8000, metadata={"help": "port of OpenAI's API over HTTP on the (first) router; 0: any free one; empty: none"}
    )
    http_batch_folder: str = field(
        default="", metadata={"help": "folder of files and batches of OpenAI's API, for all routers; empty: there are no batches"}
    )
    metrics_port: int | None = field(
        default=None,
        metadata={"help": "port of /metrics of the (first) router, the other processes follow; 0: any free ones; empty: none"},
    )
    console: bool = field(default=True, metadata={"help": "serve a page that shows the mesh at work"})
    console_port: int = field(default=8200, metadata={"help": "port of that page; 0: any free one"})
    console_host: str = field(
        default="127.0.0.1", metadata={"help": "address of that page; anyone who reaches it may use the mesh"}
    )
    redis: str = field(default=EMBEDDED_REDIS, metadata={"help": "embedded, or the URL of a Redis", "secret": True})
    mesh: str = field(default="default", metadata={"help": "name of the mesh: meshes that share a Redis need different ones"})
    threads: int = field(default=0, metadata={"help": "threads of each worker; 0: the cores divided by the workers"})
    speculation: str = field(
        default="",
        metadata={"help": "speculative decoding: auto, none, or proposers joined by commas; empty: the workers' default (auto)"},
    )
    lora: tuple[str, ...] = field(
        default=(),
        metadata={"help": "LoRA adapter of every worker, NAME=FOLDER as PEFT saved it", "repeated": True},
    )
    max_loras: int = field(
        default=0, metadata={"help": "LoRA adapters that each worker has places for; 0: 8 with --lora, none without"}
    )
    engine_address: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "stock engine that serves vLLM's gRPC engine protocol, as one more worker: [NAME=]grpc://HOST:PORT",
            "repeated": True,
        },
    )
    bind_cpus: bool = field(default=False, metadata={"help": "each worker computes on cores of its own, where there are enough"})
    lend_cores: bool = field(
        default=True,
        metadata={"help": "workers compute on each other's idle cores"},
    )
    tls: bool = field(default=False, metadata={"help": "encrypt, with certificates made for this mesh and deleted with it"})
    certificates: TlsConfig = field(default_factory=TlsConfig, metadata={"flatten": True})
    mesh_secret: MeshSecretConfig = field(default_factory=MeshSecretConfig, metadata={"flatten": True})
    log_dir: str = field(default="", metadata={"help": "folder for the logs of the processes; empty: a new temporary one"})
    start_timeout_s: float = field(default=0.0, metadata={"help": START_TIMEOUT_HELP})
    otlp_endpoint: str = field(
        default="", metadata={"help": "collector that gets the traces of all processes, OTLP over gRPC, host:port; empty: none"}
    )
    scaling: AutoscaleOptions = field(default_factory=AutoscaleOptions, metadata={"flatten": True})
    generation_config: GenerationConfig = field(
        default="auto",
        metadata={"help": "whether the model's generation_config.json sets sampling defaults: auto, or none to ignore them"},
    )
    worker_args: tuple[str, ...] = field(default=(), metadata={"help": "more flags for each worker, such as --max-num-seqs=32"})
    router_args: tuple[str, ...] = field(default=(), metadata={"help": "more flags for each router, such as --max-queued=16"})

    def validate(self) -> None:
        """Raise ValueError that names the field."""
        for name in ("prefill", "decode", "both", "threads"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: must not be negative")
        overrides.check(self.override)
        if self.decode + self.both < 1:
            raise ValueError("decode: a mesh needs a worker that decodes; give at least 1")
        if self.routers < 1:
            raise ValueError("routers: a mesh needs a router; give at least 1")
        if self.router_processes < 1:
            raise ValueError("router_processes: must be at least 1")
        if not 0 <= self.port <= 65535:
            raise ValueError("port: must be between 0 and 65535")
        if self.http_port is not None and not 0 <= self.http_port <= 65535:
            raise ValueError("http_port: must be between 0 and 65535")
        if self.http_batch_folder and self.http_port is None:
            raise ValueError("http_batch_folder: needs HTTP; give --http-port, too")
        check_adapters(self.lora, self.max_loras)
        self._check_engines()
        if self.speculation:
            named_proposers(self.speculation)
        if not 0 <= self.console_port <= 65535:
            raise ValueError("console_port: must be between 0 and 65535")
        if self.scaling.autoscale:
            self.scaling.prepared(_mesh_config(self, Path("model")))
        self.scaling.check_objectives(registry.model_name(self.model))
        if self.otlp_endpoint:
            parse_endpoint(self.otlp_endpoint)
        if self.tls and self.certificates.is_set:
            raise ValueError("tls: makes certificates, and others are given; leave out one of them")
        check_engine(self)
        _mesh_config(self, Path("model")).validate()

    def start_timeout(self) -> float:
        """Return the seconds that the processes may take to get ready."""
        return self.start_timeout_s or start_timeout_s(self.engine)

    def _check_engines(self) -> None:
        try:
            parse_all(self.engine_address)
        except ValueError as error:
            raise ValueError(f"engine_address: {error}") from None


def run(options: Options) -> int:
    """Run the command; return 0 when it was stopped as asked; 1 when it could not start."""
    try:
        check_packages()
        python = engine_python(options.engine, options.device)
        folder = registry.ensure_model(options.model, offline=options.offline)
        if options.engine == DEFAULT_ENGINE:  # another knows other models
            check_headers(folder, options.override)
        return asyncio.run(_serve(replace(_config(options, folder), worker_python=python), options.scaling))
    except (registry.ModelError, StartFailed, ConfigError) as error:
        print(f"pdmesh up: {error}", file=sys.stderr)
        return 1


def _config(options: Options, folder: Path) -> LocalMeshConfig:
    """Return the configuration of the mesh. Routers get the objectives, too: they reject requests that would miss them."""
    config = _mesh_config(options, folder)
    if options.scaling.autoscale:
        config = options.scaling.prepared(config)
        config = replace(config, log_dir=config.log_dir or tempfile.mkdtemp(prefix="pdmesh-logs-"))
    if options.scaling.autoscale or options.scaling.objectives:
        path = options.scaling.objectives_file(config, Path(config.log_dir))
        config = replace(config, router_args=("--objectives", str(path), *config.router_args))
    return config


def _mesh_config(options: Options, folder: Path) -> LocalMeshConfig:
    return LocalMeshConfig(
        model=str(folder),
        model_name=registry.model_name(options.model),
        num_prefill=options.prefill,
        num_decode=options.decode,
        num_both=options.both,
        num_routers=options.routers,
        router_processes=options.router_processes,
        engine=options.engine,
        device=options.device,
        host=options.host,
        port=options.port,
        http_port=options.http_port,
        http_batch_folder=options.http_batch_folder,
        metrics_port=options.metrics_port,
        console_port=options.console_port if options.console else None,
        console_host=options.console_host,
        redis=options.redis,
        mesh=options.mesh,
        num_threads=options.threads,
        bind_cpus=options.bind_cpus,
        lend_cores=options.lend_cores,
        start_timeout_s=options.start_timeout(),
        log_dir=options.log_dir,
        tls=options.certificates,
        throwaway_tls=options.tls,
        mesh_secret=options.mesh_secret,
        throwaway_secret=not options.mesh_secret.is_set,
        otlp_endpoint=options.otlp_endpoint,
        worker_args=(
            *_speculation(options.speculation),
            *_overrides(options.override),
            *adapter_flags(options.lora, options.max_loras),
            *vllm_flags(options.vllm_args),
            *options.worker_args,
        ),
        router_args=(
            *_generation_config(options.generation_config),
            *(f"--engine-address={address}" for address in options.engine_address),
            *options.router_args,
        ),
    )


def _speculation(value: str) -> tuple[str, ...]:
    """Return flags of each worker: one that does not decode drafts nothing, but may get that role later."""
    return ("--speculation", value) if value else ()


def _overrides(given: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(part for override in given for part in ("--override", override))


def vllm_flags(given: tuple[str, ...]) -> tuple[str, ...]:
    """Return flags of each worker."""
    return tuple(part for argument in given for part in ("--vllm-arg", argument))


def check_engine(options: Options) -> None:
    """Raise ValueError, naming the field, for options that the engine of the workers cannot take."""
    engine = EngineConfig(
        "model",
        override=options.override,
        device=options.device,
        speculation=options.speculation or "auto",
        lora=options.lora,
        max_loras=options.max_loras,
    )
    try:
        check_settings(options.engine, WorkerConfig(engine=engine, engine_name=options.engine, vllm_args=options.vllm_args))
    except ValueError as error:
        raise ValueError(str(error).removeprefix("engine.")) from error


def _generation_config(value: GenerationConfig) -> tuple[str, ...]:
    return () if value == "auto" else ("--generation-config", value)


def check_adapters(lora: tuple[str, ...], max_loras: int) -> None:
    """Raise ValueError, naming field and folder, for adapters that no worker could load: before anything starts."""
    if max_loras < 0:
        raise ValueError("max_loras: must not be negative")
    for text in lora:
        try:
            name, folder = named_folder(text)
        except ValueError as error:
            raise ValueError(f"lora: {error}") from error
        missing = [file for file in ADAPTER_FILES if not (Path(folder) / file).is_file()]
        if missing:
            raise ValueError(f"lora: {name}: {folder} has no {missing[0]}; give the folder that PEFT's save_pretrained wrote")


def adapter_flags(lora: tuple[str, ...], max_loras: int) -> tuple[str, ...]:
    """Return flags of each worker, with folders that do not depend on where it starts."""
    named = [named_folder(text) for text in lora]
    flags = [part for name, folder in named for part in ("--lora", f"{name}={Path(folder).resolve()}")]
    return (*flags, *(("--max-loras", str(max_loras)) if max_loras else ()))


async def _serve(config: LocalMeshConfig, scaling: AutoscaleOptions) -> int:
    stop = asyncio.Event()
    starting = asyncio.current_task()
    loop = asyncio.get_running_loop()
    mesh = LocalMesh(config, on_event=_say, on_progress=_say)

    def on_signal() -> None:
        if stop.is_set():
            # The kernel ends the children with this process.
            os._exit(130)
        stop.set()
        if not mesh.started and starting is not None:
            starting.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    _say(f"starting; logs in {mesh.log_dir}")
    try:
        async with mesh:
            show(*_summary(mesh, scaling))
            async with _scaled(mesh, scaling) as targets, _metrics_told(mesh, targets):
                await stop.wait()
            _say("stopping (Ctrl-C again: at once)")
    except asyncio.CancelledError:
        _say("stopped before it was ready")
        return 130
    _say("stopped")
    return 0


@asynccontextmanager
async def _metrics_told(mesh: LocalMesh, more: tuple[Target, ...]) -> AsyncIterator[None]:
    """Write the metrics targets, with --metrics-port, while the mesh runs."""
    if mesh.config.metrics_port is None:
        yield
        return
    files = MetricsFiles(mesh.log_dir)
    following = asyncio.create_task(follow(files, lambda: ((*mesh.metrics_targets, *more), mesh.member_addresses)))
    try:
        yield
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        files.remove()


@asynccontextmanager
async def _scaled(mesh: LocalMesh, scaling: AutoscaleOptions) -> AsyncIterator[tuple[Target, ...]]:
    """Start and stop workers, with --autoscale; yields where that serves its metrics. Raises ConfigError."""
    if not scaling.autoscale:
        yield ()
        return
    path, file = scaling.objectives_file(mesh.config, mesh.log_dir), DecisionFile(lambda: mesh.member_addresses)
    try:
        shown = Shown.of(mesh.config)
        loop = local_loop(mesh, scaling, path, _say, listeners=[file.decided], shown=shown)
        async with shown.open() as url, scaled(loop):
            yield (Target("autoscaler", "autoscaler", (url,) if url else ()),)
    finally:
        file.remove()


def _summary(mesh: LocalMesh, scaling: AutoscaleOptions) -> list[RenderableType]:
    """Return what runs where, and what to do next. Raises ConfigError."""
    config = mesh.config
    routers = ",".join(mesh.router_addresses)
    flag = "" if routers == DEFAULT_ADDRESS else f" --router {routers}"
    return [
        "",
        process_table(mesh),
        "",
        *_tls_lines(config),
        f"for `pdmesh roles` in another terminal: export {VARIABLE}={config.mesh_secret.mesh_secret_file}",
        f"{config.name_of_model} on {config.device}; logs in {mesh.log_dir}",
        *([line] if (line := expectation(config, len(cores_to_share()))) and not scaling.autoscale else []),
        *scaling.summary(config, mesh.log_dir),
        *(f"OpenAI's API: {url}/v1" for url in mesh.http_urls),
        *_metrics_lines(mesh),
        *([f"console: {mesh.console_url}"] if mesh.console_url else []),
        f'try: pdmesh chat{flag} "What is the capital of France?" --temperature 0',
        "stop: Ctrl-C",
    ]


def _metrics_lines(mesh: LocalMesh) -> list[str]:
    if mesh.config.metrics_port is None:
        return []
    return [f"metrics: {mesh.routers[0].metrics_urls[0]} and others; for Prometheus: {mesh.log_dir / TARGETS_FILE}"]


def _tls_lines(config: LocalMeshConfig) -> list[str]:
    """Return what clients in other terminals need."""
    return ["encrypted; in the terminal of a client:", *exports(config.tls), ""] if config.tls.is_set else []


def _say(text: str) -> None:
    print(f"pdmesh: {text}", file=sys.stderr, flush=True)
