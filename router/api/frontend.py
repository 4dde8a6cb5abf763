"""The frontend, which every client protocol shares: it takes requests as messages of `pdmesh.v1` and returns streams of
responses.

pdmesh.v1.Mesh (service.py) ─┐
OpenAI over HTTP             ├─► Frontend ─► Preprocessor (checks, tokens) ─► Request (admission, dispatcher) ─► responses
KServe v2, vLLM's engine     ┘
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextlib import aclosing

from pdmesh.planning.objectives import ModelObjective
from pdmesh.runtime import failpoints
from pdmesh.runtime.errors import InvalidArgument, Unavailable
from pdmesh.v1 import common_pb2, mesh_pb2
from router.api import explain, status
from router.api.validation import refuse
from router.context import RouterContext
from router.lifecycle.request import Request
from router.routing.routing_request import goals_ms
from router.telemetry.request_trace import CHAT, COMPLETION, RequestTrace, open_trace
from router.telemetry.request_trace import OFF as NO_TRACE
from router.telemetry.timings import RequestTimings, now_ns
from router.tokenization.prepared_request import PreparedRequest
from router.tokenization.preprocessor import Preprocessor

LAST_WORDS_S = 2.0
RequestMetadata = Iterable[tuple[str, str | bytes]]
"""Metadata of a gRPC call, or HTTP headers."""


class Frontend:
    """Serve requests until the router is drained. The caller of `generate` or `chat` closes the stream with `aclose`, which also
    cancels a request that has not ended."""

    def __init__(
        self, core: RouterContext, objectives: tuple[ModelObjective, ...], registry_connected: Callable[[], bool]
    ) -> None:
        self.core = core
        self._preprocessor = Preprocessor(core)
        self._objectives = objectives
        self._registry_connected = registry_connected
        self._requests: set[Request] = set()
        self._num_streams = 0  # includes streams whose requests are still being prepared
        self.on_asked: Callable[[str, int], None] | None = None  # tenant, and tokens of prompt and output
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def generate(
        self,
        request: mesh_pb2.GenerateRequest,
        time_left_s: float | None,
        received_ns: int | None = None,
        metadata: RequestMetadata | None = None,
    ) -> AsyncGenerator[mesh_pb2.GenerateResponse, None]:
        """Return the stream of `started`, deltas, `completed`. `received_ns`: when the request arrived at this process; None:
        now. `metadata` (or headers) may name the caller's trace. Raises MeshError."""
        received_ns = received_ns or now_ns()
        trace = self._trace(COMPLETION, received_ns, metadata)
        return self._stream(self._preprocessor.from_generate(request, time_left_s), received_ns, trace)

    def chat(
        self,
        request: mesh_pb2.ChatRequest,
        time_left_s: float | None,
        received_ns: int | None = None,
        metadata: RequestMetadata | None = None,
    ) -> AsyncGenerator[mesh_pb2.GenerateResponse, None]:
        """Return the same stream as `generate`, for a chat."""
        received_ns = received_ns or now_ns()
        trace = self._trace(CHAT, received_ns, metadata)
        return self._stream(self._preprocessor.from_chat(request, time_left_s), received_ns, trace)

    def refused(self, operation: str, error: BaseException, received_ns: int, metadata: RequestMetadata | None = None) -> None:
        """Count a request that failed before it became a message of `pdmesh.v1`, and leave a trace of it, as for requests that
        are found invalid here. `operation`: what it was to be."""
        self._never_began(error, received_ns, self._trace(operation, received_ns, metadata))

    async def tokenize(self, request: mesh_pb2.TokenizeRequest, time_left_s: float | None = None) -> mesh_pb2.TokenizeResponse:
        """Return the token ids of a text or a chat. Raises MeshError."""
        return await self._preprocessor.tokenize(request, time_left_s)

    def models(self) -> mesh_pb2.ListModelsResponse:
        """Return the models that this router serves, with their ready workers."""
        return status.models(self.core)

    def status(self) -> mesh_pb2.GetStatusResponse:
        """Return this router's view of the mesh."""
        return status.status(self.core, self._objectives, registry_connected=self._registry_connected())

    async def explain(self, request: mesh_pb2.ExplainRequest) -> mesh_pb2.ExplainResponse:
        """Return placement decisions with their reasons. Raises MeshError."""
        what = request.WhichOneof("what")
        if what == "request_id":
            return explain.of_request(self.core, request.request_id)
        if what == "latest":
            return explain.latest(self.core, request.latest)
        if what == "generate":
            return explain.dry_run(self.core, await self._preprocessor.from_generate(request.generate, None))
        if what == "chat":
            return explain.dry_run(self.core, await self._preprocessor.from_chat(request.chat, None))
        raise InvalidArgument("what", "what: name one of request_id, generate, chat, latest")

    @property
    def is_ready(self) -> bool:
        """Return whether some decode worker can take a request now."""
        return not self._draining and self.core.fleet.ready()

    async def drain(self, grace_s: float) -> None:
        """Admit no further requests; let streams finish for `grace_s` seconds, then end them so that their clients resume
        elsewhere."""
        self._draining = True
        self.core.flow_control.close(self._going())
        for timeout_s in (grace_s, LAST_WORDS_S):
            try:
                await asyncio.wait_for(self._idle.wait(), timeout_s)
                return
            except TimeoutError:
                for request in self._requests:
                    request.fail(Unavailable("this router is shutting down; resume on another one"))

    async def _stream(
        self, making: Coroutine[object, object, PreparedRequest], received_ns: int, trace: RequestTrace = NO_TRACE
    ) -> AsyncGenerator[mesh_pb2.GenerateResponse, None]:
        if self._draining:
            making.close()
            self._never_began(going := self._going(), received_ns, trace)
            raise going
        self._num_streams += 1
        self._idle.clear()
        try:
            async with aclosing(self._made(making, received_ns, trace)) as messages:
                async for message in messages:
                    yield message
        finally:
            self._num_streams -= 1
            if not self._num_streams:
                self._idle.set()

    async def _made(
        self, making: Coroutine[object, object, PreparedRequest], received_ns: int, trace: RequestTrace = NO_TRACE
    ) -> AsyncGenerator[mesh_pb2.GenerateResponse, None]:
        timings = RequestTimings(received_ns, spans=trace.spans)
        timings.routed(received_ns)
        request: Request | None = None
        error: BaseException | None = None
        try:
            prepared = await making
            await failpoints.hit_async("router.route")
            request = self._begin(prepared, timings)
            trace.admitted(request.prepared)
            async with aclosing(request.messages()) as messages:
                async for message in messages:
                    yield message
        except BaseException as caught:
            error = caught
            raise
        finally:
            self._end(request, timings, trace, error)

    def _begin(self, prepared: PreparedRequest, timings: RequestTimings) -> Request:
        if self._draining:
            raise self._going()
        if self.on_asked is not None:
            self.on_asked(prepared.tenant, len(prepared.prompt) + prepared.num_choices * prepared.sampling.max_tokens)
        request = Request(self.core, prepared, timings)
        self._requests.add(request)
        return request

    def _never_began(self, error: BaseException, received_ns: int, trace: RequestTrace) -> None:
        timings = RequestTimings(received_ns, spans=trace.spans)
        timings.routed(received_ns)
        self._end(None, timings, trace, error)

    def _end(self, request: Request | None, timings: RequestTimings, trace: RequestTrace, error: BaseException | None) -> None:
        """Record the end of a request. A stream that is closed after its last message counts as completed, not as cancelled."""
        if request is None:
            trace.ended(timings, None, error)
            self.core.metrics.ended(None, (0, 0), 0, timings, error)
            return
        self._requests.discard(request)
        error, prepared = None if request.is_complete else error, request.prepared
        trace.ended(timings, request.brought, error)
        self.core.metrics.ended(
            prepared, goals_ms(self.core, prepared), request.num_generated, timings, error, trace=trace.sent_as
        )

    def _trace(self, operation: str, received_ns: int, metadata: RequestMetadata | None) -> RequestTrace:
        return open_trace(self.core, operation, self.core.tracing.extract(metadata), received_ns)

    def _going(self) -> Unavailable:
        return Unavailable("this router is shutting down; use another one")


# Request options in gRPC metadata or HTTP headers: for clients and proxies that cannot set the fields of the message.

SLO_TTFT, SLO_TPOT = "x-pdmesh-slo-ttft-ms", "x-pdmesh-slo-tpot-ms"
RETRIES = ("grpc-previous-rpc-attempts", "x-stainless-retry-count")
"""Headers in which gRPC itself and OpenAI's clients give the number of earlier attempts."""

PRIORITY, TENANT = "x-pdmesh-priority", "x-pdmesh-tenant"
MAX_MS = MAX_ATTEMPT = 2**32 - 1

_PRIORITIES = {
    "interactive": common_pb2.PRIORITY_INTERACTIVE,
    "standard": common_pb2.PRIORITY_STANDARD,
    "batch": common_pb2.PRIORITY_BATCH,
}
_DIGITS = re.compile(r"[0-9]{1,10}")


def fill(options: mesh_pb2.RequestOptions, metadata: Iterable[tuple[str, str | bytes]]) -> None:
    """Set the fields of `options` that are unset from `metadata`. Raises InvalidArgument that names the key, also for a key that
    a field overrides."""
    for key, value in metadata:
        name = key.lower()
        if not isinstance(value, str):
            continue
        if name == SLO_TTFT:
            options.slo_ttft_ms = options.slo_ttft_ms or _milliseconds(name, value)
        elif name == SLO_TPOT:
            options.slo_tpot_ms = options.slo_tpot_ms or _milliseconds(name, value)
        elif name == PRIORITY:
            options.priority = options.priority or _priority(value)
        elif name == TENANT:
            options.tenant = options.tenant or value
        elif name in RETRIES:
            options.attempt = options.attempt or _attempt(name, value)


def _milliseconds(name: str, value: str) -> int:
    if not _DIGITS.fullmatch(value) or not 1 <= int(value) <= MAX_MS:
        refuse(name, f"{value[:40]!r} is not a number of milliseconds from 1 to {MAX_MS}")
    return int(value)


def _attempt(name: str, value: str) -> int:
    if not _DIGITS.fullmatch(value) or int(value) > MAX_ATTEMPT:
        refuse(name, f"{value[:40]!r} is not a number of attempts from 0 to {MAX_ATTEMPT}")
    return int(value)


def _priority(value: str) -> common_pb2.Priority.ValueType:
    if value.lower() not in _PRIORITIES:
        refuse(PRIORITY, f"{value[:40]!r} is none of {', '.join(_PRIORITIES)}")
    return _PRIORITIES[value.lower()]
