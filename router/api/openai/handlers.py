"""The HTTP endpoints: they read a request, run its prompts through the frontend, and send the output whole or as events."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping, MutableMapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdmesh.runtime.errors import Cancelled, MeshError, NotFound, as_mesh_error
from pdmesh.runtime.work_threads import WorkThreads
from pdmesh.v1 import common_pb2, mesh_pb2
from router.api.frontend import Frontend, fill_options
from router.api.openai import requests
from router.api.openai.errors import HttpError, answer_to, as_told, renamed
from router.api.openai.fields import JsonObject
from router.api.openai.responses import Answer, Call, MeshRequest, Numbered, PromptError, merged
from router.api.openai.sampling import set_parameters
from router.api.validation import check_tokens, refuse
from router.auth import identity
from router.auth.api_keys import KeyStore
from router.telemetry.request_trace import CHAT, COMPLETION

# One client's connection during a response: whether the client is still connected, and whether it reads what it is sent.

T = TypeVar("T")
ABORT = "pdmesh.abort"
"""Key of an ASGI scope: a function that ends the connection at once and drops unsent data (see `router.api.openai.server`)."""

RECEIVED_NS = "pdmesh.received_ns"
"""Key of an ASGI scope: monotonic nanoseconds when the last bytes of the request arrived, before they were parsed."""

STALLED_S = 30.0
"""A client that has made no room for the next event for this long counts as gone, whatever the state of its socket."""

logger = logging.getLogger(__name__)


async def while_connected(receive: Receive, work: Coroutine[object, object, T]) -> T:
    """Return the result of `work`, which is cancelled when the client leaves: then Cancelled is raised. The body must have been
    read."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Cancelled("the client has left")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Send server-sent events: each item of `events` is one complete event. `events` is closed at the end, or when the client
    leaves."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        # The last header tells proxies (nginx) to forward each event at once.
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self.raw_headers = [header for header in self.raw_headers if header[0] != b"content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events. Raises nothing when the client has left."""
        async with aclosing(self._events):
            try:
                await while_connected(receive, self._send_all(send))
            except Cancelled:
                return
            except TimeoutError:
                logger.warning("a client took nothing for %g s: its connection is closed", STALLED_S)
                cast("Callable[[], None]", scope[ABORT])()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await _in_time(send({"type": "http.response.body", "body": event, "more_body": True}))
        await _in_time(send({"type": "http.response.body", "body": b"", "more_body": False}))


async def _in_time(sending: Awaitable[None]) -> None:
    async with asyncio.timeout(STALLED_S):
        await sending


# Every response names its request: by the client's own X-Request-Id where that is valid, else by an id that is made here.

HEADER = "X-Request-Id"
_KEY = "pdmesh.request_id"
_VALID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def new_id() -> str:
    """Return an id for a request that has none."""
    return secrets.token_hex(12)


def request_id_of(scope: MutableMapping[str, Any]) -> str:
    """Return the request's id; the same on every call."""
    if _KEY not in scope:
        given = Headers(scope=scope).get(HEADER, "")
        scope[_KEY] = given if _VALID.fullmatch(given) else new_id()
    return str(scope[_KEY])


class WithRequestId:
    """Wrap an application so that all its responses have the header X-Request-Id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one call; only HTTP responses get the header."""
        name = HEADER.lower().encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                others = [header for header in message["headers"] if header[0].lower() != name]
                message = {**message, "headers": [*others, (name, request_id_of(scope).encode())]}
            await send(message)

        await self._app(scope, receive, send_with_id)


# Request options in HTTP headers: tenant, priority, mode, time limit.

REQUEST_ID, TENANT, PRIORITY, MODE, TIMEOUT = HEADER, "X-Tenant", "X-Priority", "X-Prefill-Mode", "X-Request-Timeout-Ms"
MAX_TIMEOUT_MS = 10**9
HEADER_NAMES = {"options.request_id": REQUEST_ID, "options.tenant": TENANT, "options.cache_salt": "cache_salt"}

_PRIORITIES = {
    "": common_pb2.PRIORITY_UNSPECIFIED,
    "interactive": common_pb2.PRIORITY_INTERACTIVE,
    "standard": common_pb2.PRIORITY_STANDARD,
    "batch": common_pb2.PRIORITY_BATCH,
}
_MODES = {
    "": mesh_pb2.PREFILL_MODE_UNSPECIFIED,
    "local": mesh_pb2.PREFILL_MODE_LOCAL,
    "remote": mesh_pb2.PREFILL_MODE_REMOTE,
}
_DIGITS = re.compile(r"[0-9]{1,10}")


def options_of(headers: Mapping[str, str], request_id: str) -> mesh_pb2.RequestOptions:
    """Return the options that headers set. `request_id`: see `request_id_of`. Raises InvalidArgument that names the header."""
    said = mesh_pb2.RequestOptions(
        request_id=request_id,
        tenant=headers.get(TENANT, ""),
        priority=_PRIORITIES[_one_of(headers, PRIORITY, _PRIORITIES)],
        mode=_MODES[_one_of(headers, MODE, _MODES)],
    )
    fill_options(said, headers.items())
    return said


def requested_time_left_s(headers: Mapping[str, str]) -> float | None:
    """Return how long the client waits from now on; None without a limit. Raises InvalidArgument."""
    text = headers.get(TIMEOUT)
    if text is None:
        return None
    if not _DIGITS.fullmatch(text) or not 1 <= int(text) <= MAX_TIMEOUT_MS:
        refuse(TIMEOUT, f"{text[:40]!r} is not a number of milliseconds from 1 to {MAX_TIMEOUT_MS}")
    return int(text) / 1000


def _one_of(headers: Mapping[str, str], name: str, known: Mapping[str, object]) -> str:
    value = headers.get(name, "").lower()
    if value not in known:
        refuse(name, f"{value[:40]!r} is none of {', '.join(filter(None, known))}")
    return value


DONE = b"data: [DONE]\n\n"
Parse = Callable[[JsonObject, mesh_pb2.RequestOptions], Call]


@dataclass(frozen=True)
class HttpSettings:
    """Hold the limits of the gateway, and the keys that clients must present; None: no keys are required."""

    max_body_bytes: int
    keys: KeyStore | None = None


LARGE_BODY_BYTES = 64 << 10
"""Longer bodies are parsed in a thread, one after the other, so that they do not block the streams on the event loop."""
PARSE_TIMEOUT_S = 30.0
_threads = WorkThreads("HTTP body", num_threads=1, max_waiting=64, timeout_s=PARSE_TIMEOUT_S)


class Handlers:
    """Handle the endpoints of one router."""

    def __init__(self, frontend: Frontend, settings: HttpSettings) -> None:
        self._frontend = frontend
        self._settings = settings
        self._created = int(time.time())

    async def chat(self, request: Request) -> Response:
        """Handle POST /v1/chat/completions."""
        return await self._answer(request, requests.parse_chat)

    async def complete(self, request: Request) -> Response:
        """Handle POST /v1/completions."""
        return await self._answer(request, requests.parse_completion)

    async def tokenize(self, request: Request) -> Response:
        """Handle POST /tokenize, as vLLM has it."""
        identity.authenticate(self._settings.keys, request.headers.get("authorization"))
        wanted = await parsed(requests.parse_tokenize, await requests.read(request, self._settings.max_body_bytes))
        try:
            found = await self._frontend.tokenize(
                wanted.message,
                requested_time_left_s(request.headers),
                add_special_tokens=wanted.add_special_tokens,
            )
        except MeshError as error:
            raise renamed(error, {"text": "prompt", **wanted.names}) from error
        tokens = list(found.token_ids)
        spelling_of = self._frontend.model_of(wanted.message.model).tokenizer.token_text
        spelled = [spelling_of(token_id) for token_id in tokens] if wanted.with_strings else None
        return json_response({"count": len(tokens), "max_model_len": found.max_context, "tokens": tokens, "token_strs": spelled})

    async def detokenize(self, request: Request) -> Response:
        """Handle POST /detokenize, as vLLM has it: special tokens by name."""
        identity.authenticate(self._settings.keys, request.headers.get("authorization"))
        sent = await requests.read(request, self._settings.max_body_bytes)
        name, tokens = await parsed(requests.parse_detokenize, sent)
        tokenizer = self._frontend.model_of(name).tokenizer
        check_tokens("tokens", tokens, tokenizer.vocab_size)
        return json_response({"prompt": tokenizer.decode(tokens, skip_special_tokens=False)})

    async def list_models(self, request: Request) -> Response:
        """Handle GET /v1/models."""
        identity.authenticate(self._settings.keys, request.headers.get("authorization"))
        return json_response({"object": "list", "data": list(self._models())})

    async def get_model(self, request: Request) -> Response:
        """Handle GET /v1/models/{model}."""
        identity.authenticate(self._settings.keys, request.headers.get("authorization"))
        name = request.path_params["model"]
        for model in self._models():
            if model["id"] == name:
                return json_response(model)
        raise NotFound(f"model: {name[:100]!r} is not served here", field="model")

    async def live(self, request: Request) -> Response:
        """Handle GET /health/live: 200, as long as this process answers."""
        return json_response({"status": "live"})

    async def ready(self, request: Request) -> Response:
        """Handle GET /health and /health/ready: 200 while some decode worker can take a request, else 503."""
        if self._frontend.is_ready:
            return json_response({"status": "ready"})
        return json_response({"status": "not ready"}, 503)

    async def _answer(self, request: Request, parse: Parse) -> Response:
        identity.authenticate(self._settings.keys, request.headers.get("authorization"))
        sent_headers = request.headers.items()
        try:
            call, time_left_s = await self._read(request, parse)
        except (HttpError, MeshError) as error:
            operation = CHAT if parse is requests.parse_chat else COMPLETION
            self._frontend.refused(operation, as_told(error), request.scope[RECEIVED_NS], sent_headers)
            raise
        received_ns: int = request.scope[RECEIVED_NS]  # when its last byte arrived
        answer = Answer(call, request_id_of(request.scope), int(time.time()), self._echo(call), self._spelling_of)
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
        """Return the call, and how many seconds are left for it; None: no limit. Raises HttpError, MeshError."""
        loop = asyncio.get_running_loop()
        options, limit_s = options_of(request.headers, request_id_of(request.scope)), requested_time_left_s(request.headers)
        deadline = None if limit_s is None else loop.time() + limit_s
        sent = await requests.read(request, self._settings.max_body_bytes)
        call = await parsed(lambda body: parse(body, options), sent)
        return call, None if deadline is None else deadline - loop.time()

    def _open(
        self, wanted: MeshRequest, time_left_s: float | None, received_ns: int, sent_headers: list[tuple[str, str]]
    ) -> AsyncGenerator[mesh_pb2.GenerateResponse, None]:
        if not wanted.sampling.HasField("seed"):
            wanted.sampling.seed = secrets.randbits(53)  # a number that clients in JavaScript can repeat
        if isinstance(wanted, mesh_pb2.ChatRequest):
            return self._frontend.chat(wanted, time_left_s, received_ns, sent_headers)
        return self._frontend.generate(wanted, time_left_s, received_ns, sent_headers)

    def _echo(self, call: Call) -> Callable[[int, str], str]:
        def echo(number: int, model: str) -> str:
            wanted = call.requests[number]
            if not call.echo or isinstance(wanted, mesh_pb2.ChatRequest):
                return ""
            return wanted.text or self._frontend.model_of(model).tokenizer.decode(wanted.tokens.ids)

        return echo

    def _spelling_of(self, model: str, token_id: int) -> bytes:
        return self._frontend.model_of(model).tokenizer.single_token_bytes(token_id)

    def _models(self) -> Iterable[JsonObject]:
        for model in self._frontend.models().models:
            yield {
                "id": model.name,
                "object": "model",
                "created": self._created,
                "owned_by": "pdmesh",
                "max_model_len": model.max_context,
                **({"sampling_defaults": defaults} if (defaults := set_parameters(model.sampling_defaults)) else {}),
                **({"parent": model.base_model} if model.base_model else {}),
            }


async def _whole(answer: Answer, stream: AsyncGenerator[Numbered, None]) -> JsonObject:
    async with aclosing(stream):
        async for number, response in stream:
            answer.add(number, response)
    return answer.body()


async def _begin(call: Call, stream: AsyncGenerator[Numbered, None]) -> list[Numbered]:
    """Return the first responses: until every prompt has been admitted, or one of them has output. An error before that is the
    HTTP status; a later one can only be an event. Closes `stream` unless it succeeds."""
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
    """Yield chunks, usage and [DONE]; or chunks and an error."""
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
    """Return one event. It is ASCII only, because some clients split events at Unicode's other line ends."""
    return b"data: %b\n\n" % _dumped(value)


def json_response(value: JsonObject, status: int = 200, *, headers: dict[str, str] | None = None) -> Response:
    """Return a response with a JSON body."""
    return Response(_dumped(value), status, headers=headers, media_type="application/json")


def error_response(error: HttpError | MeshError) -> Response:
    """Return a response with an error's status, body and headers."""
    answer = answer_to(error)
    return json_response(answer.body, answer.status, headers=dict(answer.headers))


def _dumped(value: JsonObject) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


async def parsed(parse: Callable[[JsonObject], T], sent: bytes) -> T:
    """Return what `parse` makes of a body. Raises HttpError, InvalidArgument; ResourceExhausted when too many large bodies
    wait."""
    if len(sent) <= LARGE_BODY_BYTES:
        return parse(requests.parse(sent))
    try:
        return await _threads.run(lambda: parse(requests.parse(sent)))
    except TimeoutError:
        raise HttpError(408, f"the body took more than {PARSE_TIMEOUT_S:g} s to read; send less") from None


def _as_client_knows(call: Call, error: PromptError) -> MeshError:
    cause = error.__cause__
    assert cause is not None
    return renamed(as_mesh_error(cause), {**HEADER_NAMES, **call.names_of(error.number)})
