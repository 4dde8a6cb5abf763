"""The external processing service: one HTTP request as it sees it, messages of the proxy in, answers out; and its metrics.

    headers ─► body … ─► its end ─► pick ─► headers' answer, body's answers ─► response headers ─► end of the stream
    headers without a body, or of a proxy that sends none ─► pick by load alone

A proxy that sends bodies FULL_DUPLEX_STREAMED gets the answer to the headers once the body is there; one that buffers them gets
it at once, and the endpoint with the answer to the body.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import grpc

from pdmesh.runtime.errors import MeshError
from pdmesh.runtime.telemetry.metrics import OFF, Metrics, Readings, counter, gauge, histogram
from pdmesh.third_party.envoy import ext_proc_pb2 as pb
from pdmesh.third_party.envoy import ext_proc_pb2_grpc as pb_grpc
from router.endpoint_picker.config import PickerConfig, is_endpoint
from router.endpoint_picker.endpoints import Endpoints
from router.endpoint_picker.picker import Asked, Pick, Picker
from router.endpoint_picker.prompts import NO_PROMPT, prompt_of
from router.flow_control.slo_admission import STANDARD

if TYPE_CHECKING:
    from pdmesh.third_party.envoy.ext_proc_pb2_grpc import _MaybeAsyncIterator, _ServicerContext

DESTINATION = "x-gateway-destination-endpoint"
SUBSET_NAMESPACE, SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
SERVED_NAMESPACE, SERVED = "envoy.lb", "x-gateway-destination-endpoint-served"
OBJECTIVE, FAIRNESS_ID = "x-gateway-inference-objective", "x-gateway-inference-fairness-id"
TTFT_MS, TPOT_MS = "x-slo-ttft-ms", "x-slo-tpot-ms"
MAX_CHUNK = 62_000
"""Bytes of a chunk that goes back: Envoy takes up to 64 KiB."""
MAX_TENANT_CHARS = 64
MAX_GOAL_S = 86_400.0
_Mode = pb.ProtocolConfiguration
_NO_BODY = (_Mode.NONE, _Mode.STREAMED)
_BUFFERED = (_Mode.BUFFERED, _Mode.BUFFERED_PARTIAL)
_TYPES = {400: "invalid_request_error", 413: "invalid_request_error", 429: "rate_limit_error"}
PickFor = Callable[[Asked], Awaitable[Pick]]


class RefusedRequest(Exception):
    """Raised to end the exchange with a response of the picker's own."""

    def __init__(self, status: int, code: str, message: str, retry_delay_s: float | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.retry_delay_s = status, code, message, retry_delay_s


def refused_by(error: MeshError) -> RefusedRequest:
    """Return the refusal for an error of picking: 429 for overload, 503 without an endpoint, as the protocol has it."""
    status = 429 if error.code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED) else 503
    return RefusedRequest(status, error.reason or "", error.message, error.retry_delay_s)


class HeldBytes:
    """Count the bytes of bodies that a picker holds, at most `most`."""

    def __init__(self, most: int) -> None:
        self.most, self.num_bytes = most, 0

    def take(self, num_bytes: int) -> bool:
        """Count some more; False, and nothing counted, where they are too many."""
        if self.num_bytes + num_bytes > self.most:
            return False
        self.num_bytes += num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        """Count some less."""
        self.num_bytes -= num_bytes


class Exchange:
    """Follow one HTTP request. `end` has to be called when its stream is over."""

    def __init__(self, config: PickerConfig, priorities: Mapping[str, int], pick_for: PickFor, held: HeldBytes) -> None:
        self._config, self._priorities, self._pick_for = config, priorities, pick_for
        self._mode = _Mode.FULL_DUPLEX_STREAMED
        self._response_mode = _Mode.NONE
        self._headers: dict[str, str] = {}
        self._subset: frozenset[str] | None = None
        self._body: list[bytes] = []
        self._num_bytes, self._held = 0, held
        self.pick: Pick | None = None

    def end(self) -> None:
        """Give the place back. Idempotent."""
        self._give_back()
        if self.pick is not None:
            self.pick.end()

    def _give_back(self) -> None:
        self._held.give_back(self._num_bytes)
        self._num_bytes = 0

    async def answers(self, message: pb.ProcessingRequest) -> Sequence[pb.ProcessingResponse]:
        """Return the answers to one message; none while the body is awaited. Raises RefusedRequest, and what `pick_for`
        raises."""
        if message.HasField("protocol_config"):
            self._mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        kind = message.WhichOneof("request")
        if kind == "request_headers":
            return await self._on_headers(message)
        if kind == "request_body":
            return await self._on_body(message.request_body)
        if kind == "request_trailers":
            answers = await self._on_end_of_body(has_trailers=True)
            return [*answers, pb.ProcessingResponse(request_trailers=pb.TrailersResponse())]
        if kind == "response_headers":
            return self._on_response(message)
        if kind == "response_body":
            return [self._same_body(message.response_body)]
        if kind == "response_trailers":
            return [pb.ProcessingResponse(response_trailers=pb.TrailersResponse())]
        raise RefusedRequest(500, "protocol", "the gateway sent a message of no kind that this picker knows")

    async def _on_headers(self, message: pb.ProcessingRequest) -> Sequence[pb.ProcessingResponse]:
        headers = message.request_headers
        self._headers = {each.key.lower(): _text(each) for each in headers.headers.headers}
        self._subset = _subset(message.metadata_context)
        if headers.end_of_stream or self._mode in _NO_BODY:
            self.pick = await self._pick_for(self._asked(b"", has_body=False))
            return [_with_endpoint(pb.ProcessingResponse(request_headers=pb.HeadersResponse()), self.pick)]
        if self._mode in _BUFFERED:
            return [pb.ProcessingResponse(request_headers=pb.HeadersResponse())]
        return ()

    async def _on_body(self, body: pb.HttpBody) -> Sequence[pb.ProcessingResponse]:
        if self.pick is not None:  # the endpoint is known already: nothing is looked at any more
            return [self._same_request(body.body, is_end=body.end_of_stream)]
        num_bytes = len(body.body)
        if self._num_bytes + num_bytes > self._config.max_body_bytes:
            text = f"the body has more than {self._config.max_body_bytes} bytes (max_body_bytes)"
            raise RefusedRequest(413, "body_too_large", text)
        if not self._held.take(num_bytes):
            text = f"the bodies that arrive or wait have {self._held.most} bytes together (max_queued_bytes); retry later"
            raise RefusedRequest(429, "bodies", text, 1.0)
        self._num_bytes += num_bytes
        self._body.append(body.body)
        if body.end_of_stream or self._mode in _BUFFERED:
            return await self._on_end_of_body()
        return ()

    async def _on_end_of_body(self, *, has_trailers: bool = False) -> Sequence[pb.ProcessingResponse]:
        if self.pick is not None:
            return ()
        body = b"".join(self._body)
        self._body = []
        self.pick = await self._pick_for(self._asked(body, has_body=True))
        self._give_back()
        if self._mode in _BUFFERED:
            return [_with_endpoint(pb.ProcessingResponse(request_body=pb.BodyResponse()), self.pick)]
        headers = _with_endpoint(pb.ProcessingResponse(request_headers=pb.HeadersResponse()), self.pick)
        chunks = () if has_trailers and not body else _chunks(body)
        return [headers, *(self._same_request(chunk, is_end=is_end and not has_trailers) for chunk, is_end in chunks)]

    def _on_response(self, message: pb.ProcessingRequest) -> Sequence[pb.ProcessingResponse]:
        if self.pick is not None:
            self.pick.answered(_served(message.metadata_context))
        return [pb.ProcessingResponse(response_headers=pb.HeadersResponse())]

    def _same_request(self, chunk: bytes, *, is_end: bool) -> pb.ProcessingResponse:
        return pb.ProcessingResponse(request_body=_same(chunk, is_end, is_streamed=self._mode == _Mode.FULL_DUPLEX_STREAMED))

    def _same_body(self, body: pb.HttpBody) -> pb.ProcessingResponse:
        is_streamed = self._response_mode == _Mode.FULL_DUPLEX_STREAMED
        return pb.ProcessingResponse(response_body=_same(body.body, body.end_of_stream, is_streamed=is_streamed))

    def _asked(self, body: bytes, *, has_body: bool) -> Asked:
        config, headers = self._config, self._headers
        prompt = prompt_of(body, config.prefix_block_bytes, config.bytes_per_token) if has_body else NO_PROMPT
        return Asked(
            prompt=prompt,
            subset=self._subset,
            tenant=headers.get(FAIRNESS_ID, "")[:MAX_TENANT_CHARS],
            priority=self._priorities.get(headers.get(OBJECTIVE, ""), STANDARD),
            ttft_s=_seconds(headers, TTFT_MS),
            tpot_s=_seconds(headers, TPOT_MS),
            num_bytes=len(body),
        )


def refusal(error: RefusedRequest) -> pb.ProcessingResponse:
    """Return the response that the client gets instead of the endpoint's, in the form of OpenAI's errors."""
    kind = _TYPES.get(error.status, "server_error")
    body = json.dumps({"error": {"message": error.message, "type": kind, "param": None, "code": error.code or None}})
    headers = [_header("content-type", "application/json")]
    if error.retry_delay_s is not None:
        headers.append(_header("retry-after", str(max(1, math.ceil(error.retry_delay_s)))))
    answer = pb.ImmediateResponse(
        status=pb.HttpStatus(code=error.status), headers=pb.HeaderMutation(set_headers=headers), body=body.encode()
    )
    answer.details = "".join(c if c.isalnum() else "_" for c in error.code or "refused")
    return pb.ProcessingResponse(immediate_response=answer)


def _with_endpoint(answer: pb.ProcessingResponse, pick: Pick) -> pb.ProcessingResponse:
    """Return the answer to headers or a body with the endpoints in it, as a header and as metadata."""
    value = ",".join(pick.addresses)
    part = answer.request_headers if answer.WhichOneof("response") == "request_headers" else answer.request_body
    part.response.clear_route_cache = True
    part.response.header_mutation.set_headers.append(_header(DESTINATION, value))
    answer.dynamic_metadata.get_or_create_struct(SERVED_NAMESPACE)[DESTINATION] = value
    return answer


def _header(name: str, value: str) -> pb.HeaderValueOption:
    option = pb.HeaderValueOption(header=pb.HeaderValue(key=name, raw_value=value.encode()))
    option.append_action = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    return option


def _same(chunk: bytes, is_end: bool, *, is_streamed: bool) -> pb.BodyResponse:
    """Return the answer that leaves a body as it is; where it is streamed in both directions it has to be sent back."""
    if not is_streamed:
        return pb.BodyResponse()
    streamed = pb.StreamedBodyResponse(body=chunk, end_of_stream=is_end)
    return pb.BodyResponse(response=pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=streamed)))


def _chunks(body: bytes) -> Iterator[tuple[bytes, bool]]:
    for start in range(0, max(1, len(body)), MAX_CHUNK):
        yield body[start : start + MAX_CHUNK], start + MAX_CHUNK >= len(body)


def _text(header: pb.HeaderValue) -> str:
    return header.value or header.raw_value.decode("utf-8", "replace")


def _seconds(headers: Mapping[str, str], name: str) -> float | None:
    text = headers.get(name, "").strip()
    if not text:
        return None
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = math.nan
    if not 0 < milliseconds <= MAX_GOAL_S * 1000:
        raise RefusedRequest(400, "invalid_header", f"{name}: {text[:40]!r} is not a number of milliseconds above 0")
    return milliseconds / 1000


def _subset(metadata: pb.Metadata) -> frozenset[str] | None:
    """Return the endpoints that the gateway allows: a list of addresses, or one text with commas; None: it allows all."""
    if SUBSET_NAMESPACE not in metadata.filter_metadata:
        return None
    fields = metadata.filter_metadata[SUBSET_NAMESPACE].fields
    if SUBSET not in fields:
        return None
    value = fields[SUBSET]
    listed = [each.string_value for each in value.list_value.values] if value.HasField("list_value") else [value.string_value]
    return frozenset(part.strip() for text in listed for part in text.split(",") if is_endpoint(part.strip()))


def _served(metadata: pb.Metadata) -> str:
    if SERVED_NAMESPACE not in metadata.filter_metadata:
        return ""
    fields = metadata.filter_metadata[SERVED_NAMESPACE].fields
    return fields[SERVED].string_value if SERVED in fields else ""


# What it counts.

_PICK_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0)

REQUESTS = counter("pdmesh.picker.requests", "HTTP requests: picked, or the status of the refusal", ("result",))
PICK_TIME = histogram(
    "pdmesh.picker.pick", "From the end of the body to the choice, waiting for admission included", _PICK_S, unit="s"
)
PROMPT_TOKENS = counter(
    "pdmesh.picker.prompt.tokens",
    "Prompt tokens, estimated: all, and those that the endpoint is likely to have cached",
    ("type",),
)
ENDPOINTS = gauge("pdmesh.picker.endpoints", "Endpoints of the pool: ready, or not", ("state",))
INFLIGHT = gauge("pdmesh.picker.inflight", "Requests at endpoints")
QUEUED = gauge("pdmesh.picker.queued", "Requests that wait for admission")
PREFIX_BLOCKS = gauge("pdmesh.picker.prefix.index.blocks", "Prompt blocks in the prefix index, of all endpoints")

ALL = (REQUESTS, PICK_TIME, PROMPT_TOKENS, ENDPOINTS, INFLIGHT, QUEUED, PREFIX_BLOCKS)


class PickerReader:
    """Read one picker on its event loop."""

    def __init__(self, picker: Picker) -> None:
        self._picker = picker

    def read(self, readings: Readings) -> None:
        """Put all values; `Metrics.read_by` calls it."""
        endpoints: Endpoints = self._picker.endpoints
        readings.put(ENDPOINTS, endpoints.num_ready, "ready")
        readings.put(ENDPOINTS, len(endpoints) - endpoints.num_ready, "not_ready")
        admission = self._picker.flow.admission
        readings.put(INFLIGHT, admission.num_inflight)
        readings.put(QUEUED, admission.num_queued)
        readings.put(PREFIX_BLOCKS, len(endpoints.blocks))


SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"


class ExternalProcessor(pb_grpc.ExternalProcessorServicer):
    """Serve Process. On one event loop."""

    def __init__(self, config: PickerConfig, picker: Picker, instruments: Metrics = OFF) -> None:
        self._config, self._picker, self._metrics = config, picker, instruments
        self._priorities: Mapping[str, int] = config.priorities()
        self._held = HeldBytes(config.max_queued_bytes)

    async def Process(
        self, request_iterator: _MaybeAsyncIterator[pb.ProcessingRequest], context: _ServicerContext
    ) -> AsyncIterator[pb.ProcessingResponse]:
        """Answer one HTTP request's messages until its stream ends. A request that is refused gets its response from here."""
        exchange = Exchange(self._config, self._priorities, self._pick, self._held)
        try:
            async for message in request_iterator:
                for answer in await exchange.answers(message):
                    yield answer
        except RefusedRequest as refused:
            self._metrics.add(REQUESTS, 1, str(refused.status))
            yield refusal(refused)
        finally:
            exchange.end()

    async def _pick(self, asked: Asked) -> Pick:
        began = time.perf_counter()
        try:
            pick = await self._picker.pick(asked)
        except MeshError as error:
            raise refused_by(error) from None
        self._metrics.observe(PICK_TIME, time.perf_counter() - began)
        self._metrics.add(REQUESTS, 1, "picked")
        self._metrics.add(PROMPT_TOKENS, asked.prompt.num_tokens, "all")
        self._metrics.add(PROMPT_TOKENS, min(pick.cached_tokens, asked.prompt.num_tokens), "cached")
        return pick
