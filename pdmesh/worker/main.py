"""The worker's process: it loads the model, serves, registers and drains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import torch

from pdmesh.engine.loader.builder import Progress
from pdmesh.engine.memory import return_freed_memory
from pdmesh.platform import time_slices
from pdmesh.runtime import log
from pdmesh.runtime.config import ENV_PREFIX, ConfigError, load, options_of
from pdmesh.runtime.process import Lifecycle, end, run
from pdmesh.runtime.telemetry.config import TelemetryConfig
from pdmesh.worker.assembly import Worker
from pdmesh.worker.config import DecodeConfig, PrefillConfig, WorkerConfig
from pdmesh.worker.engines.base import WorkerEngine
from pdmesh.worker.engines.registry import loader, require
from pdmesh.worker.kv_events.settings import require_libraries

if TYPE_CHECKING:
    from pdmesh.runtime.registry.registry import Announcer, Registry
    from router.main import Router

_PROGRESS_PERIOD_S = 2.0
_SILENCE_S = 10.0

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None, *, config_class: type[WorkerConfig] = WorkerConfig, prog: str = "worker") -> NoReturn:
    """Run a worker from flags and environment until it is told to stop."""
    config = load(config_class, argv, os.environ, prog=prog)
    end(run(lambda life: serve(life, config, prog=prog), exit_with_parent=config.exit_with_parent))


def prefill_main() -> NoReturn:
    """Run `main` with the prefill role unless the settings say otherwise."""
    main(config_class=PrefillConfig, prog="prefill_service")


def decode_main() -> NoReturn:
    """Run `main` with the decode role unless the settings say otherwise."""
    main(config_class=DecodeConfig, prog="decode_service")


async def serve(life: Lifecycle, config: WorkerConfig, *, prog: str = "worker") -> None:
    """Run one worker. Raises ConfigError when the model cannot be loaded or does not fit, or an address is taken."""
    log.configure(prog)
    require(config.engine_name, config.engine.device)
    require_libraries(config.kv_event_settings)
    engine = await _load_engine(life, config)
    if life.stopping:
        engine.close()
        return
    worker = Worker(config, engine, worker_id=config.worker_id or f"worker-{secrets.token_hex(4)}", on_failure=life.fail)
    gateway: HttpGateway | None = None
    try:
        description = await worker.start()
        return_freed_memory()
        gateway = await _open_gateway(config, description.address)
        left_s = await _announced(life, config, worker, description.address, gateway)
        if life.error is None:
            await worker.drain(left_s)
    finally:
        if gateway is not None:
            await gateway.stop(at_once=True)
        await worker.stop()


async def _open_gateway(config: WorkerConfig, address: str) -> HttpGateway | None:
    """Return the worker's own HTTP, which serves; None where none is wanted."""
    if config.http_port is None:
        return None
    gateway = HttpGateway(config, address)
    try:
        await gateway.start()
    except BaseException:
        await gateway.stop()
        raise
    return gateway


async def _announced(
    life: Lifecycle, config: WorkerConfig, worker: Worker, address: str, gateway: HttpGateway | None = None
) -> float:
    """Register the worker and report it ready until the process is to stop; withdraw the registration before the worker
    drains; return what is left of its time for that. Requests over the worker's own HTTP end first, as those that wait there
    have to begin yet."""
    registry, announcer = _registration(config, worker)
    if announcer is not None:
        announcer.start()
        worker.changes.subscribe(announcer.renew_now)
    logger.info("worker %s serves %s at %s", worker.info().worker_id, config.served_name, address)
    urls = {"metrics_url": worker.metrics.url, "http_url": gateway.url if gateway is not None else ""}
    life.ready(address, worker_id=worker.info().worker_id, epoch=f"{worker.epoch:016x}", **urls)
    await life.wait_for_stop()
    stopping_at = time.monotonic()
    if gateway is None:
        worker.gate.draining = True
    if registry is not None and announcer is not None:
        await announcer.stop()
        await registry.stop()
    if gateway is not None:
        await gateway.stop(at_once=life.error is not None)
        worker.gate.draining = True
    return max(0.0, config.drain_grace_s - (time.monotonic() - stopping_at))


def _registration(config: WorkerConfig, worker: Worker) -> tuple[Registry, Announcer] | tuple[None, None]:
    if not config.redis:
        return None, None
    from pdmesh.runtime.registry.registry import Registry, worker_announcer  # redis is imported only for a registry

    registry = Registry(config.redis, config.mesh, ttl_s=config.registry_ttl_s, secret=worker.secret)
    return registry, worker_announcer(registry, worker.info)


def _config_error(error: Exception) -> ConfigError:
    """Return the error with the flag or variable at fault, which begins the engine's message; other errors are about the
    model."""
    name, _, problem = str(error).partition(": ")
    if name in os.environ:
        return ConfigError(name, problem)
    flags = {option.path[-1]: option.flag for option in options_of(WorkerConfig, ENV_PREFIX)}
    if problem and name in flags:
        return ConfigError(flags[name], problem)
    return ConfigError("--model", str(error))


def _gpu_error(error: Exception) -> ConfigError:
    """Return the error for a failure of the driver, torch's allocator, Triton or its C compiler. The usual cause is too little
    memory."""
    said = next(iter(str(error).splitlines()), "") or type(error).__name__
    if isinstance(error, torch.OutOfMemoryError):
        return ConfigError("--kv-memory-share", f"the GPU's memory does not suffice: {said}", "give less, or a smaller model")
    return ConfigError(
        "--device", f"cuda: {type(error).__name__}: {said}", "see the log above; --backend torch does without kernels"
    )


class _LoadProgress:
    """Report loading to the parent process: first the work before the weights (kernels may have to be compiled), then a line each
    few seconds; and where nothing has been said for longer, that it goes on. `say` is called on the loading thread."""

    def __init__(self, life: Lifecycle, text: str) -> None:
        self._life, self._text = life, text
        self._loop = asyncio.get_running_loop()
        self._began = self._last = time.monotonic()
        life.progress(text)

    def say(self, share: float, text: str) -> None:
        self._text = f"{text} ({share:.0%})" if share else text
        if share == 0.0 or time.monotonic() - self._last >= _PROGRESS_PERIOD_S:
            self._last = time.monotonic()
            with contextlib.suppress(RuntimeError):  # the event loop is closed: the process ends
                self._loop.call_soon_threadsafe(self._life.progress, self._text)

    async def keep_saying(self, period_s: float = _SILENCE_S) -> None:
        """Repeat the last text with the time so far, until cancelled."""
        while True:
            await asyncio.sleep(period_s)
            if time.monotonic() - self._last >= period_s:
                self._life.progress(f"{self._text}, {time.monotonic() - self._began:.0f} s so far")


def _load(config: WorkerConfig, say: Progress) -> WorkerEngine:
    with time_slices.computing():  # the threads of the kernels start here
        return loader(config.engine_name)(config, say)


async def _load_engine(life: Lifecycle, config: WorkerConfig) -> WorkerEngine:
    started = time.monotonic()
    progress = _LoadProgress(life, f"loading {config.engine.model}")
    telling = asyncio.create_task(progress.keep_saying())
    try:
        engine = await asyncio.to_thread(_load, config, progress.say)
    except ConfigError:
        raise
    except (ValueError, OSError, MemoryError) as error:
        raise _config_error(error) from error
    except Exception as error:
        if config.engine.device != "cuda":
            raise
        logger.exception("the GPU could not be made ready")
        raise _gpu_error(error) from error
    finally:
        telling.cancel()
    pool = engine.memory
    num_bytes = pool.num_layers * 2 * pool.num_blocks * pool.bytes_per_layer_block
    life.progress(
        f"loaded {config.engine.model} in {time.monotonic() - started:.1f} s; "
        f"KV pool of {pool.num_blocks} blocks, {num_bytes / 2**20:,.0f} MiB"
    )
    return engine


# A worker's own HTTP: OpenAI's and the other protocols of a router, for gateways that pick a worker themselves.
#
#     gateway ──HTTP──► a router in the worker's process, which knows this worker alone ──gRPC──► the worker
#
# It is a whole router, so that all works as behind one: templates, tools, constraints, sampling, admission, cancelling. The
# way to the worker is its gRPC port on this host; no token depends on it.


class HttpGateway:
    """Run the router of one worker, from `start` to `stop`."""

    def __init__(self, config: WorkerConfig, address: str) -> None:
        """Raises ConfigError where the model's folder has no tokenizer."""
        from router.config import RouterConfig  # a worker without HTTP needs none of a router's libraries
        from router.main import Router

        router_config = RouterConfig(
            host="127.0.0.1",
            port=0,
            http_port=config.http_port,
            http_host=config.host,
            models=(f"{config.served_name}={config.http_tokenizer or config.engine.model}",),
            workers=(address,),
            max_inflight=max(256, 2 * config.engine.max_num_seqs),
            rebalance="off",
            hedge_share=0.0,
            adapter_changes="off",
            drain_grace_s=config.drain_grace_s,
            linger_s=0.0,
            tls=config.tls,
            tls_client_auth="none",
            mesh_secret=config.mesh_secret,
            telemetry=replace(config.telemetry, metrics_port=None) if config.telemetry.otlp_endpoint else TelemetryConfig(),
        )
        self._is_stopped, self._linger_s = False, config.http_linger_s
        try:
            router_config.validate()
            self._router: Router = Router(router_config)
        except (ConfigError, ValueError) as error:
            raise _named_here(error) from error

    @property
    def url(self) -> str:
        """Return the URL that is served."""
        return "" if self._router.http is None else self._router.http.url

    async def start(self) -> str:
        """Serve; return the URL. Raises ConfigError when the port is taken."""
        await self._router.start()
        return self.url

    async def stop(self, *, at_once: bool = False) -> None:
        """Take requests for `http_linger_s` still, while /health and /metrics say 503, so that gateways have noticed; then let
        those under way finish, and end. `at_once`: nothing is waited for, since the engine has failed. Idempotent."""
        if self._is_stopped:
            return
        self._is_stopped = True
        if at_once:
            self._router.config = replace(self._router.config, drain_grace_s=0.0)
        elif self._router.frontend.is_ready:
            self._router.frontend.is_leaving = True
            await asyncio.sleep(self._linger_s)
        await self._router.stop()


def _named_here(error: Exception) -> ConfigError:
    """Return the error with the worker's flag in place of the router's."""
    if isinstance(error, ConfigError) and error.field != "--models":
        return error
    problem = error.problem if isinstance(error, ConfigError) else str(error).partition(": ")[2]
    return ConfigError("--http-tokenizer", problem, "give the folder with the model's tokenizer.json and config.json")
