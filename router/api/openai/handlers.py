"""The endpoints: a request is read, its prompts run as any other of the router's, and the answer goes out whole or as events."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from pdmesh.runtime.errors import MeshError, NotFound, as_mesh_error
from pdmesh.runtime.work_threads import WorkThreads
from pdmesh.v1 import mesh_pb2
from router.api.frontend import Frontend
from router.api.openai import chat_request, completion_request, headers, request_id, requests
from router.api.openai.call import Call, MeshRequest
from router.api.openai.connection import RECEIVED_NS, EventStream, while_connected
from router.api.openai.errors import HttpError, answer_to, as_told, renamed
from router.api.openai.fields import JsonObject
from router.api.openai.merge import Numbered, PromptError, merged
from router.api.openai.responses import Answer
from router.auth import identity
from router.auth.key_store import KeyStore
from router.telemetry.request_trace import CHAT, COMPLETION

DONE = b"data: [DONE]\n\n"
Parse = Callable[[JsonObject, mesh_pb2.RequestOptions], Call]


@dataclass(frozen=True)
class HttpSettings:
    """Limits of the gateway, and the keys of which its clients show one; None: they show none."""

    max_body_bytes: int
    keys: KeyStore | None = None


LARGE_BODY_BYTES = 64 << 10
"""Longer bodies are read in a thread, one after the other: the event loop has streams to serve, which get their turns."""
PARSE_TIMEOUT_S = 30.0
_threads = WorkThreads("HTTP body", num_threads=1, max_waiting=64, timeout_s=PARSE_TIMEOUT_S)


class Handlers:
    """One router's endpoints."""

    def __init__(self, frontend: Frontend, settings: HttpSettings) -> None:
        self._frontend = frontend
        self._settings = settings
        self._created = int(time.time())

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._answer(request, chat_request.parse_chat)

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._answer(request, completion_request.parse_completion)

    async def list_models(self, request: Request) -> Response:
        """GET /v1/models."""
        identity.authenticate(self._settings.keys, request.headers.get("authorization"))
        return json_response({"object": "list", "data": list(self._models())})

    async def get_model(self, request: Request) -> Response:
        """GET /v1/models/{model}."""
        identity.authenticate(self._settings.keys, request.headers.get("authorization"))
        name = request.path_params["model"]
        for model in self._models():
            if model["id"] == name:
                return json_response(model)
        raise NotFound(f"model: {name[:100]!r} is not served here", field="model")

    async def live(self, request: Request) -> Response:
        """GET /health/live: this process answers."""
        return json_response({"status": "live"})

    async def ready(self, request: Request) -> Response:
        """GET /health and /health/ready: 200 while a request can be owned by somebody, else 503."""
        if self._frontend.is_ready:
            return json_response({"status": "ready"})
        return json_response({"status": "not ready"}, 503)

    async def _answer(self, request: Request, parse: Parse) -> Response:
        identity.authenticate(self._settings.keys, request.headers.get("authorization"))
        sent_headers = request.headers.items()
        try:
            call, time_left_s = await self._read(request, parse)
        except (HttpError, MeshError) as error:
            operation = CHAT if parse is chat_request.parse_chat else COMPLETION
            self._frontend.refused(operation, as_told(error), request.scope[RECEIVED_NS], sent_headers)
            raise
        received_ns: int = request.scope[RECEIVED_NS]  # of its last byte
        answer = Answer(call, request_id.request_id_of(request.scope), int(time.time()), self._echo(call))
        stream = merged([partial(self._open, wanted, time_left_s, received_ns, sent_headers) for wanted in call.requests])
        try:
            if call.streaming is None:
                whole = await while_connected(request.receive, _whole(answer, stream))
                return json_response(whole)
            begun = await while_connected(request.receive, _begin(call, stream))
        except PromptError as error:
            raise _as_client_knows(call, error) from error
        return EventStream(_events(call, answer, begun, stream))

    async def _read(self, request: Request, parse: Parse) -> tuple[Call, float | None]:
        """What is asked for, and how many seconds are left for it, None: any. Raises HttpError, MeshError."""
        loop = asyncio.get_running_loop()
        options, limit_s = headers.options_of(request.headers, request_id.request_id_of(request.scope)), headers.requested_time_left_s(request.headers)
        deadline = None if limit_s is None else loop.time() + limit_s
        sent = await requests.read(request, self._settings.max_body_bytes)
        call = await parsed(parse, sent, options)
        return call, None if deadline is None else deadline - loop.time()

    def _open(
        self, wanted: MeshRequest, time_left_s: float | None, received_ns: int, sent_headers: list[tuple[str, str]]
    ) -> AsyncGenerator[mesh_pb2.GenerateResponse, None]:
        if not wanted.sampling.HasField("seed"):
            wanted.sampling.seed = secrets.randbits(53)  # a number that JavaScript's clients can repeat
        if isinstance(wanted, mesh_pb2.ChatRequest):
            return self._frontend.chat(wanted, time_left_s, received_ns, sent_headers)
        return self._frontend.generate(wanted, time_left_s, received_ns, sent_headers)

    def _echo(self, call: Call) -> Callable[[int, str], str]:
        def echo(number: int, model: str) -> str:
            wanted = call.requests[number]
            if not call.echo or isinstance(wanted, mesh_pb2.ChatRequest):
                return ""
            return wanted.text or self._frontend.core.models[model].tokenizer.decode(wanted.tokens.ids)

        return echo

    def _models(self) -> Iterable[JsonObject]:
        for model in self._frontend.models().models:
            yield {
                "id": model.name,
                "object": "model",
                "created": self._created,
                "owned_by": "pdmesh",
                "max_model_len": model.max_context,
            }


async def _whole(answer: Answer, stream: AsyncGenerator[Numbered, None]) -> JsonObject:
    async with aclosing(stream):
        async for number, response in stream:
            answer.add(number, response)
    return answer.body()


async def _begin(call: Call, stream: AsyncGenerator[Numbered, None]) -> list[Numbered]:
    """The first responses: until every prompt has been admitted, or one of them has output. What is refused before has a status
    of its own; afterwards it can only be an event. Closes `stream` unless it succeeds."""
    begun: list[Numbered] = []
    try:
        async for item in stream:
            begun.append(item)
            if len(begun) == len(call.requests) or item[1].WhichOneof("event") != "started":
                return begun
    except BaseException:
        await stream.aclose()
        raise
    return begun


async def _events(
    call: Call, answer: Answer, begun: list[Numbered], stream: AsyncGenerator[Numbered, None]
) -> AsyncGenerator[bytes, None]:
    """Chunks, usage, [DONE]; or chunks and an error."""
    async with aclosing(stream):
        try:
            for number, response in begun:
                for event in _event(answer.chunk(number, response)):
                    yield event
            async for number, response in stream:
                for event in _event(answer.chunk(number, response)):
                    yield event
        except PromptError as error:
            yield from_json(answer_to(_as_client_knows(call, error)).body)
            return
    for event in _event(answer.last_chunk()):
        yield event
    yield DONE


def _event(chunk: JsonObject | None) -> tuple[bytes, ...]:
    return () if chunk is None else (from_json(chunk),)


def from_json(value: JsonObject) -> bytes:
    """One event. ASCII only: there are clients that take other line ends of Unicode for the end of an event's line."""
    return b"data: %b\n\n" % _dumped(value)


def json_response(value: JsonObject, status: int = 200, *, headers: dict[str, str] | None = None) -> Response:
    """A body of JSON."""
    return Response(_dumped(value), status, headers=headers, media_type="application/json")


def error_response(error: HttpError | MeshError) -> Response:
    """An error's status, body and headers."""
    answer = answer_to(error)
    return json_response(answer.body, answer.status, headers=dict(answer.headers))


def _dumped(value: JsonObject) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


async def parsed(parse: Parse, sent: bytes, options: mesh_pb2.RequestOptions) -> Call:
    """What a body asks for. Raises HttpError, InvalidArgument; ResourceExhausted when too many large bodies wait."""
    if len(sent) <= LARGE_BODY_BYTES:
        return parse(requests.parse(sent), options)
    try:
        return await _threads.run(lambda: parse(requests.parse(sent), options))
    except TimeoutError:
        raise HttpError(408, f"the body took more than {PARSE_TIMEOUT_S:g} s to read; send less") from None


def _as_client_knows(call: Call, error: PromptError) -> MeshError:
    cause = error.__cause__
    assert cause is not None
    return renamed(as_mesh_error(cause), {**headers.HEADER_NAMES, **call.names_of(error.number)})
