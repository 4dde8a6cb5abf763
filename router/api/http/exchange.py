"""An HTTP request from its body to its response: its prompts run through the frontend; the output is sent whole or as events.

Each API of HTTP gives two things: a parser from a JSON body to a `Call`, and an `Answer`, which forms the response from
messages of `pdmesh.v1`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from pdmesh.runtime.errors import MeshError, as_mesh_error
from pdmesh.v1 import mesh_pb2
from router.api.frontend import Frontend
from router.api.http.body import HttpSettings, json_response, parsed, read_body
from router.api.http.connection import RECEIVED_NS, EventStream, while_connected
from router.api.http.errors import HttpError, Names, as_told, renamed
from router.api.http.fields import JsonObject
from router.api.http.headers import HEADER_NAMES, authorization_of, options_of, request_id_of, requested_time_left_s
from router.api.http.sessions import SessionBody, settle
from router.auth import identity

MeshRequest = mesh_pb2.GenerateRequest | mesh_pb2.ChatRequest


class Call(Protocol):
    """A checked HTTP request."""

    @property
    def requests(self) -> Sequence[MeshRequest]:
        """Return its messages of `pdmesh.v1`: one for each prompt."""

    @property
    def is_streamed(self) -> bool:
        """Return whether the output is wanted as events."""

    @property
    def session(self) -> SessionBody:
        """Return what the body says of the session that the request is a part of."""

    def names_of(self, number: int) -> Names:
        """Return the names of fields for errors about the prompt `number`."""


class Answer(Protocol):
    """Forms one HTTP response from the messages of its prompts."""

    def add(self, number: int, response: mesh_pb2.GenerateResponse) -> None:
        """Take in a message of prompt `number`, for a whole body."""

    def body(self) -> JsonObject:
        """Return the whole body, after every stream has ended."""

    def events(self, number: int, response: mesh_pb2.GenerateResponse) -> Iterable[bytes]:
        """Return the events that show `response`, for a stream."""

    def last_events(self) -> Iterable[bytes]:
        """Return the events that end a stream."""

    def error_event(self, error: MeshError) -> bytes:
        """Return the event that ends a stream with an error."""


C = TypeVar("C", bound=Call)
A = TypeVar("A", bound=Answer)
Parse = Callable[[JsonObject, mesh_pb2.RequestOptions], C]
"""Maps a body and the options of its headers to a call. Raises InvalidArgument that names the field as the client does."""


class Exchange:
    """Answer HTTP requests by running them through the router's frontend."""

    def __init__(self, frontend: Frontend, settings: HttpSettings, ping: bytes = b"") -> None:
        """Create the exchange of one API. `ping`: its event for silences in streams; empty for none."""
        self._frontend = frontend
        self._settings = settings
        self._ping = ping

    async def run(
        self,
        request: Request,
        parse: Parse[C],
        make: Callable[[C, str], A],
        operation: str,
        *,
        complete: Callable[[C], Awaitable[C]] | None = None,
        at_end: Callable[[C, A], Awaitable[None]] | None = None,
    ) -> Response:
        """Return the response. `make` gets the call and the request's id; `operation`: what traces and metrics call the request.
        `complete` adds to a call what has to be looked up; `at_end` is awaited when all output is there, before the client is
        told that it is.

        Raises HttpError, MeshError: before any output."""
        identity.authenticate(self._settings.keys, authorization_of(request.headers))
        sent_headers = request.headers.items()
        try:
            call, time_left_s = await self._read(request, parse)
            call = call if complete is None else await complete(call)
        except (HttpError, MeshError) as error:
            self._frontend.refused(operation, as_told(error), request.scope[RECEIVED_NS], sent_headers)
            raise
        received_ns: int = request.scope[RECEIVED_NS]  # when its last byte arrived
        answer = make(call, request_id_of(request.scope))
        stream = merged([partial(self._open, wanted, time_left_s, received_ns, sent_headers) for wanted in call.requests])

        async def end() -> None:
            if at_end is not None:
                await at_end(call, answer)

        try:
            if not call.is_streamed:
                return json_response(await while_connected(request.receive, _whole(answer, stream, end)))
            begun = await while_connected(request.receive, _begin(call, stream))
        except PromptError as error:
            raise _as_client_knows(call, error) from error
        return EventStream(_events(call, answer, begun, stream, end), self._ping)

    async def _read(self, request: Request, parse: Parse[C]) -> tuple[C, float | None]:
        """Return the call, and how many seconds are left for it; None: no limit. Raises HttpError, MeshError."""
        loop = asyncio.get_running_loop()
        options, limit_s = options_of(request.headers, request_id_of(request.scope)), requested_time_left_s(request.headers)
        deadline = None if limit_s is None else loop.time() + limit_s
        sent = await read_body(request, self._settings.max_body_bytes)
        call = await parsed(lambda body: _with_session(parse(body, options), request.headers), sent)
        return call, None if deadline is None else deadline - loop.time()

    def _open(
        self, wanted: MeshRequest, time_left_s: float | None, received_ns: int, sent_headers: list[tuple[str, str]]
    ) -> AsyncGenerator[mesh_pb2.GenerateResponse, None]:
        if not wanted.sampling.HasField("seed"):
            wanted.sampling.seed = secrets.randbits(53)  # a number that clients in JavaScript can repeat
        if isinstance(wanted, mesh_pb2.ChatRequest):
            return self._frontend.chat(wanted, time_left_s, received_ns, sent_headers)
        return self._frontend.generate(wanted, time_left_s, received_ns, sent_headers)


def _with_session(call: C, headers: Mapping[str, str]) -> C:
    """Return the call, whose messages have what body and headers say of its session. Raises InvalidArgument."""
    for wanted in call.requests:
        settle(wanted.options, call.session, headers)
    return call


async def _whole(answer: Answer, stream: AsyncGenerator[Numbered, None], end: Callable[[], Awaitable[None]]) -> JsonObject:
    async with aclosing(stream):
        async for number, response in stream:
            answer.add(number, response)
    await end()
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
    call: Call,
    answer: Answer,
    begun: list[Numbered],
    stream: AsyncGenerator[Numbered, None],
    end: Callable[[], Awaitable[None]],
) -> AsyncGenerator[bytes, None]:
    """Yield the events of an answer; an error is the last of them."""
    async with aclosing(stream):
        try:
            for number, response in begun:
                for event in answer.events(number, response):
                    yield event
            async for number, response in stream:
                for event in answer.events(number, response):
                    yield event
        except PromptError as error:
            yield answer.error_event(_as_client_knows(call, error))
            return
    await end()
    for event in answer.last_events():
        yield event


def _as_client_knows(call: Call, error: PromptError) -> MeshError:
    cause = error.__cause__
    assert cause is not None
    return renamed(as_mesh_error(cause), {**HEADER_NAMES, **call.names_of(error.number)})


# The streams of several prompts as one. Nothing is buffered here: when a client does not read, the router's own buffers fill.

Open = Callable[[], AsyncGenerator[mesh_pb2.GenerateResponse, None]]
"""Begins the stream of a prompt."""

Numbered = tuple[int, mesh_pb2.GenerateResponse]


class PromptError(Exception):
    """Report an error of the stream of prompt `number`; `__cause__` is that error."""

    def __init__(self, number: int, cause: Exception) -> None:
        super().__init__(str(cause))
        self.number = number
        self.__cause__ = cause


async def merged(prompts: Sequence[Open]) -> AsyncGenerator[Numbered, None]:
    """Yield each response with the number of its prompt. Raises PromptError. Every stream is closed at the end, also after an
    error."""
    source = _alone(prompts[0]) if len(prompts) == 1 else _together(prompts)
    async with aclosing(source):
        async for item in source:
            yield item


async def _alone(prompt: Open) -> AsyncGenerator[Numbered, None]:
    async with aclosing(prompt()) as stream:
        try:
            async for response in stream:
                yield 0, response
        except Exception as error:
            raise PromptError(0, error) from error


async def _together(prompts: Sequence[Open]) -> AsyncGenerator[Numbered, None]:
    queue: asyncio.Queue[Numbered | PromptError | None] = asyncio.Queue(maxsize=1)
    pumps = [asyncio.create_task(_pump(number, prompt, queue)) for number, prompt in enumerate(prompts)]
    num_running = len(pumps)
    try:
        while num_running:
            item = await queue.get()
            if item is None:
                num_running -= 1
            elif isinstance(item, PromptError):
                raise item
            else:
                yield item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(number: int, prompt: Open, queue: asyncio.Queue[Numbered | PromptError | None]) -> None:
    """Put the responses of one prompt into `queue`, then None or the stream's error."""
    end: PromptError | None = None
    async with aclosing(prompt()) as stream:
        try:
            async for response in stream:
                await queue.put((number, response))
        except Exception as error:  # noqa: BLE001 - the reader raises it
            end = PromptError(number, error)
    await queue.put(end)
