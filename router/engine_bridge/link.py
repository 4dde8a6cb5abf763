"""The link to one stock engine: what it says of itself, whether it lives, and its load.

connect: GetModelInfo, GetServerInfo, HealthCheck ──► up, with a new epoch ──► HealthCheck and GetLoads each period ──┐
   ▲                                                                                                                  │
   └──────────────── down: unhealthy, gone, or silent ◄───────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import grpc
import grpc.aio

from pdmesh.runtime.rpc.channel import connect
from pdmesh.third_party.vllm import vllm_engine_pb2 as pb
from pdmesh.third_party.vllm.vllm_engine_pb2_grpc import VllmEngineStub
from pdmesh.v1 import common_pb2
from router.engine_bridge.address import EngineAddress

T = TypeVar("T")
FLAG = "--engine-address"
RETRY_S = 0.5
ABORT_TIMEOUT_S = 2.0
DEFAULT_BLOCK_SIZE = 16
DEFAULT_MAX_NUM_SEQS = 256

logger = logging.getLogger(__name__)


class NotAnEngine(Exception):
    """Report that what answers at an address cannot be used as an engine; the message says why, and what to do."""


class EngineDown(Exception):
    """Report that an engine cannot serve now."""


@dataclass(frozen=True)
class EngineFacts:
    """Hold what an engine says of itself. Zero: it does not say."""

    model: str
    server: str
    max_context: int
    block_size: int
    kv_dtype: str
    max_num_seqs: int

    @property
    def identity(self) -> common_pb2.Identity:
        """Return the identity of its worker. The weights are not known: requests go by the model's name alone."""
        return common_pb2.Identity(model=self.model, numeric_mode=self.server, protocol_version=1)

    @property
    def layout(self) -> common_pb2.KVLayout:
        """Return the layout of its KV, which is never handed over."""
        return common_pb2.KVLayout(
            block_size=self.block_size, kv_dtype=self.kv_dtype, tensor_parallel_size=1, arrangement="engine"
        )


@dataclass(frozen=True)
class EngineLoad:
    """Hold the latest figures of GetLoads. Without any, only what this router sent counts."""

    num_running: int = 0
    num_waiting: int = 0
    num_used_tokens: int = 0
    num_total_tokens: int = 0
    max_num_seqs: int = 0

    @classmethod
    def of(cls, loads: Iterable[pb.SchedulerLoad]) -> EngineLoad:
        """Return the sum over the engine's ranks."""
        ranks = list(loads)
        return cls(
            num_running=sum(rank.num_running_reqs for rank in ranks),
            num_waiting=sum(rank.num_waiting_reqs for rank in ranks),
            num_used_tokens=sum(_used_tokens(rank) for rank in ranks),
            num_total_tokens=sum(rank.max_total_num_tokens for rank in ranks),
            max_num_seqs=sum(rank.max_running_requests for rank in ranks),
        )


def _used_tokens(rank: pb.SchedulerLoad) -> int:
    return rank.num_used_tokens or round(rank.token_usage * rank.max_total_num_tokens)


@dataclass(eq=False)
class EngineProcess:
    """Hold the engine from one connection to its loss. `epoch` tells it from the next one."""

    facts: EngineFacts
    load: EngineLoad
    epoch: int = field(default_factory=lambda: secrets.randbits(63) | 1)
    lost: asyncio.Event = field(default_factory=asyncio.Event)


class EngineLink:
    """Follow one engine, from `start` to `stop`. `current`: the engine while it lives; `problem`: why it does not."""

    def __init__(
        self,
        address: EngineAddress,
        models: Iterable[str],
        *,
        period_s: float,
        timeout_s: float,
        on_down: Callable[[EngineProcess], None],
    ) -> None:
        """Create it. `models`: those that the router serves; `timeout_s`: silence after which the engine counts as lost."""
        self.address = address
        self.current: EngineProcess | None = None
        self.problem = "it was not asked yet"
        self._models = frozenset(models)
        self._period_s = period_s
        self._call_timeout_s = timeout_s / 2
        self._on_down = on_down
        self._channel = connect(address.target)
        self._stub = VllmEngineStub(self._channel)
        self._task: asyncio.Task[None] | None = None
        self._aborts: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to follow it."""
        self._task = asyncio.create_task(self._run(), name=f"engine {self.address.target}")

    async def stop(self) -> None:
        """Leave the engine; what runs there is aborted."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._down("the router stops")
        await asyncio.gather(*self._aborts, return_exceptions=True)
        await self._channel.close()

    def generate(
        self, request: pb.GenerateRequest, timeout_s: float | None
    ) -> grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]:
        """Return the call that computes the request."""
        return self._stub.Generate(request, timeout=timeout_s)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Have the engine drop requests, in the background: it may see late that their calls were cancelled."""
        task = asyncio.create_task(self._abort(list(request_ids)), name=f"abort on {self.address.target}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def probe(self) -> None:
        """Ask the engine once what it is. Raises NotAnEngine; an engine that does not answer, or is not ready, is no error."""
        try:
            await self._connect()
        except (EngineDown, grpc.aio.AioRpcError) as error:
            logger.warning("%s %s is not ready, the router goes on without it: %s", FLAG, self.address.target, _words(error))

    async def _abort(self, request_ids: list[str]) -> None:
        try:
            await self._stub.Abort(pb.AbortRequest(request_ids=request_ids), timeout=ABORT_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            logger.info("%s did not take an Abort: %s", self.address.target, _words(error))

    async def _run(self) -> None:
        while True:
            problem = "internal error"
            try:
                process = await self._connect()
                self._up(process)
                await self._follow(process)
            except (EngineDown, NotAnEngine, grpc.aio.AioRpcError) as error:
                problem = _words(error)
            except Exception:  # a bug must not lose the engine for good
                logger.exception("following %s failed", self.address.target)
            self._down(problem)
            await asyncio.sleep(RETRY_S)

    async def _connect(self) -> EngineProcess:
        """Return the engine that answers. Raises NotAnEngine, EngineDown, AioRpcError."""
        info = await self._model_info()
        model = self._model_name(info)
        await self._check_health()
        server = await self._ask(lambda: self._stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=self._call_timeout_s))
        load = await self._load()
        return EngineProcess(_facts(model, info.max_context_length, server or pb.GetServerInfoResponse(), load), load)

    async def _model_info(self) -> pb.GetModelInfoResponse:
        try:
            info = await self._stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=self._call_timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
            raise NotAnEngine(
                f"{self.address.target} answers, but it does not serve vllm.grpc.engine.VllmEngine; start the engine with "
                "`vllm serve MODEL --grpc`, or give the port where it does"
            ) from error
        if not info.max_context_length:
            raise NotAnEngine(f"{self.address.target} says no max_context_length in GetModelInfo; it is no engine that generates")
        return info

    def _model_name(self, info: pb.GetModelInfoResponse) -> str:
        name = self.address.model or info.served_model_name or info.model_path
        if name in self._models:
            return name
        known = ", ".join(sorted(self._models))
        raise NotAnEngine(
            f"{self.address.target} serves {name!r}, and --models has {known}; "
            f"give {FLAG} NAME=grpc://{self.address.target} with the name of its model there"
        )

    async def _follow(self, process: EngineProcess) -> None:
        """Watch the engine. Raises EngineDown, AioRpcError once it is lost."""
        while True:
            await asyncio.sleep(self._period_s)
            await self._check_health()
            process.load = await self._load()

    async def _check_health(self) -> None:
        """Raise EngineDown unless the engine is healthy. One late answer is forgiven: this process may have slept."""
        try:
            health = await self._stub.HealthCheck(pb.HealthCheckRequest(), timeout=self._call_timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
            health = await self._stub.HealthCheck(pb.HealthCheckRequest(), timeout=self._call_timeout_s)
        if not health.healthy:
            raise EngineDown(f"it says that it is not healthy: {health.message or 'no reason'}")

    async def _load(self) -> EngineLoad:
        answer = await self._ask(lambda: self._stub.GetLoads(pb.GetLoadsRequest(), timeout=self._call_timeout_s))
        return EngineLoad() if answer is None else EngineLoad.of(answer.loads)

    async def _ask(self, call: Callable[[], Awaitable[T]]) -> T | None:
        """Return the answer; None where this engine does not have the method, or is late: the figures are no sign of life."""
        try:
            return await call()
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.DEADLINE_EXCEEDED):
                return None
            raise

    def _up(self, process: EngineProcess) -> None:
        facts = process.facts
        logger.info(
            "engine %s is up: model %s, %s, context %d", self.address.target, facts.model, facts.server, facts.max_context
        )
        self.current, self.problem = process, ""

    def _down(self, problem: str) -> None:
        if problem != self.problem:
            logger.warning("%s %s: %s", FLAG, self.address.target, problem)
        self.problem = problem
        process, self.current = self.current, None
        if process is not None:
            process.lost.set()
            self._on_down(process)


def _facts(model: str, max_context: int, server: pb.GetServerInfoResponse, load: EngineLoad) -> EngineFacts:
    return EngineFacts(
        model=model,
        server=server.server_type or "vllm-grpc",
        max_context=max_context,
        block_size=server.block_size if server.block_size > 0 else DEFAULT_BLOCK_SIZE,
        kv_dtype=server.kv_cache_dtype or "auto",
        max_num_seqs=max(server.max_num_seqs, load.max_num_seqs) or DEFAULT_MAX_NUM_SEQS,
    )


def _words(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error)
