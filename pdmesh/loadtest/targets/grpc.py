"""Sends requests to the mesh's own gRPC API, through the client library."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import cast

from pdmesh.client.channel import addresses
from pdmesh.client.client import AsyncClient, Completed, Delta
from pdmesh.client.types import GenerateOptions, Timings
from pdmesh.errors import Cancelled, DeadlineExceeded, MeshError, Overloaded
from pdmesh.loadtest.record import Objectives, Outcome
from pdmesh.loadtest.targets.target import (
    Ask,
    Done,
    Event,
    Fleet,
    PromptKind,
    TargetError,
    TargetInfo,
    Tokens,
    conversation,
    conversation_ids,
)
from pdmesh.runtime.rpc.tls import TlsConfig
from pdmesh.v1 import mesh_pb2, worker_pb2

_CHECK_TIMEOUT_S = 10.0
_MAX_UINT32 = 0xFFFF_FFFF


@dataclass(frozen=True)
class GrpcSettings:
    """Configure the requests. `resume_timeout_s`: how long the client looks for another router when one is lost.
    `send_objectives`: a request carries those of its class. `prompt`: token ids, or words that the router tokenizes. `mode`:
    "local" or "remote" for every request; empty: the router chooses. `send_sessions`: requests name their session, so that the
    mesh may hold its KV and route its turns by it."""

    model: str = ""
    vocab_size: int = 32_000
    temperature: float = 0.0
    ignore_eos: bool = True
    connections: int = 1
    resume_timeout_s: float = 0.0
    send_objectives: bool = True
    tls: TlsConfig | None = None
    api_key: str = ""
    prompt: PromptKind = "tokens"
    mode: str = ""
    send_sessions: bool = False


@dataclass(frozen=True, slots=True)
class _Prepared:
    prompt: str | list[int]
    options: GenerateOptions
    timeout_s: float


class GrpcTarget:
    """Send to routers at "host:port,…": each client prefers another of them; with a `resume_timeout_s` it falls back on the
    rest."""

    def __init__(self, routers: str, settings: GrpcSettings) -> None:
        self._settings = settings
        known = addresses(routers)
        self._clients = [
            AsyncClient(
                _rotated(known, number),
                resume_timeout_s=settings.resume_timeout_s,
                tls=settings.tls,
                api_key=settings.api_key,
            )
            for number in range(max(settings.connections, len(known)))
        ]
        self._next = cycle(self._clients)

    async def check(self) -> TargetInfo:
        """Return the model and its context. Raises TargetError if no router answers or it does not serve the model."""
        try:
            models = await self._clients[0].list_models(timeout=_CHECK_TIMEOUT_S)
        except MeshError as error:
            raise _target_error(error) from error
        wanted = self._settings.model
        chosen = models[0] if len(models) == 1 and not wanted else next((m for m in models if m.name == wanted), None)
        if chosen is None:
            names = ", ".join(model.name for model in models) or "none"
            raise TargetError(Outcome.ERROR, f"model {wanted!r} is not served; there are: {names}")
        return TargetInfo(chosen.name, chosen.max_context or None)

    def prepare(self, ask: Ask) -> _Prepared:
        """Return the whole conversation, and the options of the request."""
        settings = self._settings
        options = GenerateOptions(
            max_tokens=ask.output_tokens,
            temperature=settings.temperature,
            ignore_eos=settings.ignore_eos,
            request_id=ask.request_id,
            priority=ask.traffic.priority,
            tenant=ask.traffic.tenant,
            **(_objectives(ask.objectives) if settings.send_objectives else {}),
            **(GenerateOptions(mode=settings.mode) if settings.mode else {}),
            **(GenerateOptions(session_id=ask.session_id) if settings.send_sessions else {}),
        )
        return _Prepared(self._prompt(ask), options, ask.timeout_s)

    def _prompt(self, ask: Ask) -> str | list[int]:
        settings = self._settings
        if settings.prompt == "words":
            return conversation(ask.said, ask.seed)
        return conversation_ids(ask.said, ask.seed, settings.vocab_size)

    async def stream(self, prepared: object) -> AsyncGenerator[Event, None]:
        """See Target.stream."""
        assert isinstance(prepared, _Prepared)
        try:
            stream = next(self._next).generate_stream(
                prepared.prompt, model=self._settings.model, timeout=prepared.timeout_s, **prepared.options
            )
            async with stream as events:
                async for event in events:
                    if isinstance(event, Delta) and event.token_ids:
                        yield Tokens(len(event.token_ids), event.token_ids, event.text)
                    elif isinstance(event, Completed):
                        yield _done(event)
        except MeshError as error:
            raise _target_error(error) from error

    async def fleet(self) -> Fleet | None:
        """Return the workers that are alive, and the router's requests. Raises TargetError if it does not answer within a
        second."""
        try:
            return _fleet(await self._clients[0].status(timeout=1.0))
        except MeshError as error:
            raise _target_error(error) from error

    async def close(self) -> None:
        """Close the channels."""
        for client in self._clients:
            await client.close()


def _objectives(objectives: Objectives) -> GenerateOptions:
    """Return the objectives in whole milliseconds; a missing one takes the model's."""
    named = {"slo_ttft_ms": objectives.ttft_ms, "slo_tpot_ms": objectives.tpot_ms}
    whole = {name: min(max(1, round(bound)), _MAX_UINT32) for name, bound in named.items() if bound is not None}
    return cast(GenerateOptions, whole)


def _rotated(known: Sequence[str], number: int) -> tuple[str, ...]:
    start = number % len(known)
    return (*known[start:], *known[:start])


def _done(event: Completed) -> Done:
    usage, timings = event.usage, event.timings
    return Done(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, _phases_ms(timings), _workers(timings))


def _phases_ms(timings: Timings) -> dict[str, float]:
    parts = {**timings.ttft_parts, **timings.first_gap_parts}
    return {name: ns / 1e6 for name, ns in parts.items()} if timings.ttft_ns else {}


def _workers(timings: Timings) -> str:
    return " → ".join(worker for worker in (timings.prefill_worker, timings.decode_worker) if worker)


def _fleet(status: mesh_pb2.GetStatusResponse) -> Fleet:
    roles = [worker.load.roles or worker.info.roles for worker in status.workers if worker.alive]
    return Fleet(
        num_prefill=sum(worker_pb2.ROLE_PREFILL in has for has in roles),
        num_decode=sum(worker_pb2.ROLE_DECODE in has for has in roles),
        num_inflight=status.num_inflight,
        num_queued=status.num_queued,
    )


def _target_error(error: MeshError) -> TargetError:
    if isinstance(error, Overloaded):
        return TargetError(Outcome.REFUSED, error.message)
    if isinstance(error, DeadlineExceeded):
        return TargetError(Outcome.TIMEOUT, "the deadline passed")
    if isinstance(error, Cancelled):
        return TargetError(Outcome.ERROR, "the server cancelled the request")
    return TargetError(Outcome.ERROR, f"{error.code.name}: {error.message}")
