"""The frontend, which every client protocol shares: it takes requests as messages of `pdmesh.v1` and returns streams of
responses.

pdmesh.v1.Mesh (service.py) ─┐
OpenAI, Anthropic over HTTP  ├─► Frontend ─► the stages of a request (router/lifecycle/stages.py) ─► responses
KServe v2, vLLM's engine     ┘
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator

from pdmesh.planning.objectives import ModelObjective
from pdmesh.runtime.errors import InvalidArgument, Unavailable
from pdmesh.v1 import common_pb2, mesh_pb2, worker_pb2
from router.api import embedding, explain, status
from router.api.validation import MAX_PRIORITY_HINT, MAX_RETENTION_S, MAX_TENANT_CHARS, check_session_id, refuse
from router.auth import identity
from router.context import RouterContext
from router.fleet.model_changes.changes import ModelChanges
from router.lifecycle.request import OpenRequests, Request
from router.lifecycle.stages import Pipeline
from router.telemetry.request_trace import CHAT, COMPLETION, EMBEDDINGS, open_trace
from router.telemetry.timings import RequestTimings, now_ns
from router.tokenization.prepared_request import ServedModel
from router.tokenization.preprocessor import ClientMessage, Preprocessor, deadline_of

LAST_WORDS_S = 2.0
RequestMetadata = Iterable[tuple[str, str | bytes]]
"""Metadata of a gRPC call, or HTTP headers."""


class Frontend:
    """Serves until it is drained. The caller of a stream closes it (`aclose`): that is how a client leaves."""

    def __init__(
        self, core: RouterContext, objectives: tuple[ModelObjective, ...], registry_connected: Callable[[], bool]
    ) -> None:
        self.core = core
        self._preprocessor = Preprocessor(core)
        self._objectives = objectives
        self._registry_connected = registry_connected
        self.open_requests = OpenRequests()
        core.fleet.on_abort = self.open_requests.abort
        self.pipeline = Pipeline(core, self._preprocessor, self.open_requests)
        self.is_leaving = False  # True: requests are taken still, and whoever asks is told to send no more
        self.closing: list[Callable[[], Awaitable[None]]] = []  # what protocols hold open until the router ends

    def generate(
        self,
        request: mesh_pb2.GenerateRequest,
        time_left_s: float | None,
        received_ns: int | None = None,
        metadata: RequestMetadata | None = None,
    ) -> AsyncGenerator[mesh_pb2.GenerateResponse, None]:
        """Yield `started`, deltas, `completed`. `received_ns`: when it had arrived here, if not just now. `metadata` (or headers)
        may name the caller's trace. Raises MeshError."""
        return self.pipeline.run(self._request(COMPLETION, request, time_left_s, received_ns, metadata))

    def chat(
        self,
        request: mesh_pb2.ChatRequest,
        time_left_s: float | None,
        received_ns: int | None = None,
        metadata: RequestMetadata | None = None,
    ) -> AsyncGenerator[mesh_pb2.GenerateResponse, None]:
        """As `generate`."""
        return self.pipeline.run(self._request(CHAT, request, time_left_s, received_ns, metadata))

    async def embed(
        self,
        request: mesh_pb2.EmbedRequest,
        time_left_s: float | None,
        received_ns: int | None = None,
        metadata: RequestMetadata | None = None,
    ) -> mesh_pb2.EmbedResponse:
        """Return the embeddings of all inputs. Arguments as of `generate`. Raises MeshError."""
        deadline = deadline_of(time_left_s)

        async def embed_one(message: mesh_pb2.GenerateRequest) -> mesh_pb2.Embedding:
            left_s = None if deadline is None else deadline - asyncio.get_running_loop().time()
            return await self.pipeline.embed(self._request(EMBEDDINGS, message, left_s, received_ns, metadata), request.pooling)

        embeddings = await embedding.embed(request, embed_one)
        name = request.model or self.model_of("").name
        return mesh_pb2.EmbedResponse(model=name, embeddings=embeddings, request_id=request.options.request_id)

    def refused(self, operation: str, error: BaseException, received_ns: int, metadata: RequestMetadata | None = None) -> None:
        """Account for a request that ended before it was a message: it leaves a trace, and is counted, as those that are found
        invalid here. `operation`: what it was to be."""
        request = self._request(operation, mesh_pb2.GenerateRequest(), None, received_ns, metadata)
        request.timings.routed(received_ns)
        self.pipeline.end(request, error)

    async def tokenize(
        self, request: mesh_pb2.TokenizeRequest, time_left_s: float | None = None, *, add_special_tokens: bool = True
    ) -> mesh_pb2.TokenizeResponse:
        """Return the token ids of a text or a chat. `add_special_tokens`: those that the model wants around a text; a chat has
        what its template writes. Raises MeshError."""
        return await self._preprocessor.tokenize(request, time_left_s, add_special_tokens=add_special_tokens)

    async def count_chat(self, request: mesh_pb2.ChatRequest, time_left_s: float | None = None) -> int:
        """Return the number of tokens of the prompt that `chat` makes of the same request, also of one that is longer than the
        context. Raises MeshError."""
        return await self._preprocessor.count_chat(request, time_left_s)

    def models(self) -> mesh_pb2.ListModelsResponse:
        """Return the models that this router serves, with their ready workers."""
        return status.models(self.core)

    def model_of(self, name: str) -> ServedModel:
        """Return the model that computes requests for this name, which may be an adapter's. Raises MeshError."""
        return self._preprocessor.model_of(name)

    async def load_adapter(self, request: worker_pb2.LoadAdapterRequest) -> mesh_pb2.MeshAdapter:
        """Load a LoRA adapter on all workers of a model. Raises MeshError."""
        if request.name in self.core.models:
            raise InvalidArgument("name", f"{request.name!r} is a model's name; give the adapter another one")
        return await self.core.adapters.load(self.model_of(request.model).name, request.name, request.folder)

    async def unload_adapter(self, request: worker_pb2.UnloadAdapterRequest) -> mesh_pb2.MeshAdapter:
        """Unload a LoRA adapter on all workers of a model. Raises MeshError."""
        return await self.core.adapters.unload(self.model_of(request.model).name, request.name)

    async def update_weights(self, request: mesh_pb2.MeshUpdateWeightsRequest) -> mesh_pb2.MeshUpdateWeightsResponse:
        """Have all workers of a model compute with other weights. Raises MeshError."""
        return await self._model_changes.update_weights(self.model_of(request.model).name, request.folder)

    async def send_weights(self, messages: AsyncIterator[worker_pb2.SendWeightsRequest]) -> mesh_pb2.MeshUpdateWeightsResponse:
        """Do `update_weights` with files that come in the stream. Raises MeshError."""
        first = await anext(messages, worker_pb2.SendWeightsRequest())
        return await self._model_changes.send_weights(self.model_of(first.model).name, _again(first, messages))

    async def set_serving(self, request: mesh_pb2.MeshSetServingRequest) -> mesh_pb2.MeshSetServingResponse:
        """Have all workers of a model run, pause or sleep. Raises MeshError."""
        return await self._model_changes.set_serving(self.model_of(request.model).name, request.serving)

    def serving_states(self, model: str) -> list[worker_pb2.ServingState.ValueType]:
        """Return the states of the workers of a model. Raises MeshError."""
        return self._model_changes.serving_states(self.model_of(model).name)

    @property
    def _model_changes(self) -> ModelChanges:
        may_change = self.core.config.lets_clients_change_adapters
        core = self.core
        return ModelChanges(core.fleet, core.serving, core.weights, may_change=may_change, abort=self.open_requests.abort)

    async def set_traffic_split(self, request: mesh_pb2.SetTrafficSplitRequest) -> mesh_pb2.SetTrafficSplitResponse:
        """Split a model's new requests between revisions of its workers. Raises MeshError."""
        weights = [(each.revision, each.weight) for each in request.weights]
        split = await self.core.rollouts.set(self.model_of(request.model).name, weights, status.failing(self.core))
        return mesh_pb2.SetTrafficSplitResponse(split=split)

    def adapters(self) -> mesh_pb2.ListMeshAdaptersResponse:
        """Return all adapters, with the workers that have them."""
        return self.core.adapters.listed(self.core.models)

    async def release_session(self, request: mesh_pb2.ReleaseSessionRequest) -> mesh_pb2.ReleaseSessionResponse:
        """Have all workers of a model, or all, give up what they retain for a session. Raises MeshError."""
        model = self.model_of(request.model).name if request.model else ""
        check_session_id("session_id", request.session_id)
        if len(request.tenant) > MAX_TENANT_CHARS:
            refuse("tenant", f"has {len(request.tenant)} characters, {MAX_TENANT_CHARS} are allowed")
        return await self.core.releases.release(identity.claimed(request.tenant, "tenant"), request.session_id, model)

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
        """Return whether requests are taken: a decode worker can take one now, or they may wait for the first."""
        return not self.is_leaving and not self.open_requests.is_draining and self.core.is_ready

    async def drain(self, grace_s: float) -> None:
        """Admit no request; let streams finish for `grace_s` seconds, then end them so that their clients resume elsewhere."""
        self.open_requests.is_draining = True
        self.core.flow_control.close(self.open_requests.closed())
        for timeout_s in (grace_s, LAST_WORDS_S):
            try:
                async with asyncio.timeout(timeout_s):
                    await self.open_requests.idle.wait()
                return
            except TimeoutError:
                self.open_requests.fail(Unavailable("this router is going; resume on another one"))

    async def close(self) -> None:
        """Release what protocols hold open, once nothing is served any more."""
        for close in self.closing:
            await close()

    def _request(
        self,
        operation: str,
        message: ClientMessage,
        time_left_s: float | None,
        received_ns: int | None,
        metadata: RequestMetadata | None,
    ) -> Request:
        received_ns = received_ns or now_ns()
        trace = open_trace(self.core, operation, self.core.tracing.extract(metadata), received_ns)
        return Request(message, time_left_s, RequestTimings(received_ns, spans=trace.spans), trace)


# Request options in gRPC metadata or HTTP headers: for clients and proxies that cannot set the fields of the message.

SLO_TTFT, SLO_TPOT = "x-pdmesh-slo-ttft-ms", "x-pdmesh-slo-tpot-ms"
RETRIES = ("grpc-previous-rpc-attempts", "x-stainless-retry-count")
"""Headers in which gRPC itself and OpenAI's clients give the number of earlier attempts."""

PRIORITY, TENANT = "x-pdmesh-priority", "x-pdmesh-tenant"
SESSION, RETENTION, SESSION_FINAL = "x-pdmesh-session-id", "x-pdmesh-kv-retention-s", "x-pdmesh-session-final"
PRIORITY_HINT = "x-pdmesh-priority-hint"
_SESSION_KEYS = (SESSION, RETENTION, SESSION_FINAL, PRIORITY_HINT)
_OF_OTHERS = LLM_D_TTFT, LLM_D_TPOT = "x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"
"""What llm-d's clients send for the same objectives; those by pdmesh's own names go before."""
_ONCE = frozenset((SLO_TTFT, SLO_TPOT, *_OF_OTHERS, PRIORITY, TENANT, *_SESSION_KEYS))
MAX_MS = MAX_ATTEMPT = 2**32 - 1

_PRIORITIES = {
    "interactive": common_pb2.PRIORITY_INTERACTIVE,
    "standard": common_pb2.PRIORITY_STANDARD,
    "batch": common_pb2.PRIORITY_BATCH,
}
_DIGITS = re.compile(r"[0-9]{1,10}")
_NUMBER = re.compile(r"-?[0-9]{1,10}")
_TRUTHS = {"true": True, "1": True, "false": False, "0": False}


def fill_options(options: mesh_pb2.RequestOptions, metadata: Iterable[tuple[str, str | bytes]]) -> None:
    """Set the fields of `options` that are unset from `metadata`. Raises InvalidArgument that names the key, also for a key that
    a field overrides."""
    for name, value in sorted(_known(metadata), key=lambda said: said[0] in _OF_OTHERS):
        if name in (SLO_TTFT, LLM_D_TTFT):
            options.slo_ttft_ms = options.slo_ttft_ms or _milliseconds(name, value)
        elif name in (SLO_TPOT, LLM_D_TPOT):
            options.slo_tpot_ms = options.slo_tpot_ms or _milliseconds(name, value)
        elif name == PRIORITY:
            options.priority = options.priority or _priority(value)
        elif name == TENANT:
            options.tenant = options.tenant or value
        elif name in RETRIES:
            options.attempt = options.attempt or _attempt(name, value)
        elif name in _SESSION_KEYS:
            _fill_session(options, name, value)


def _known(metadata: Iterable[tuple[str, str | bytes]]) -> Iterator[tuple[str, str]]:
    """Yield the keys that say something here, in lower case. Refuses a key that is there twice, with two values."""
    seen: dict[str, str] = {}
    for key, value in metadata:
        name = key.lower()
        if not isinstance(value, str) or (name not in _ONCE and name not in RETRIES):
            continue
        if name in _ONCE and seen.setdefault(name, value) != value:
            refuse(name, "is there twice, with different values; send it once")
        yield name, value


def _fill_session(options: mesh_pb2.RequestOptions, name: str, value: str) -> None:
    if name == SESSION:
        check_session_id(name, value)
        options.session_id = options.session_id or value
    elif name == RETENTION:
        options.kv_retention_s = options.kv_retention_s or _number(name, value, 0, MAX_RETENTION_S)
    elif name == PRIORITY_HINT:
        options.priority_hint = options.priority_hint or _number(name, value, -MAX_PRIORITY_HINT, MAX_PRIORITY_HINT)
    else:
        options.session_final = truth(name, value) or options.session_final


def truth(name: str, value: str) -> bool:
    """Return what a header says that is true or false. Raises InvalidArgument."""
    if value.lower() not in _TRUTHS:
        refuse(name, f"{value[:40]!r} is neither true nor false")
    return _TRUTHS[value.lower()]


def _number(name: str, value: str, low: int, high: int) -> int:
    if not _NUMBER.fullmatch(value) or not low <= int(value) <= high:
        refuse(name, f"{value[:40]!r} is not a whole number from {low} to {high}")
    return int(value)


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


async def _again(
    first: worker_pb2.SendWeightsRequest, messages: AsyncIterator[worker_pb2.SendWeightsRequest]
) -> AsyncIterator[worker_pb2.SendWeightsRequest]:
    """Yield the first message, which was read to know the model, and the others."""
    yield first
    async for message in messages:
        yield message
