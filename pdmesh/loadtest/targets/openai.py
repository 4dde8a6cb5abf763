"""Sends requests to any server with OpenAI's protocol: /completions with token ids (or words), or /chat/completions, streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

from pdmesh.loadtest.record import Outcome
from pdmesh.loadtest.targets.http import BaseUrl, HttpClient, HttpError, Response
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
    words,
)
from pdmesh.runtime.rpc.tls import TlsConfig

# Validation of an OpenAI server's answers: bytes in, values out, or a TargetError that says what is wrong. Pure.
#
# An invalid answer is one request's error: it must not end the run.


_REFUSALS = (429, 503)
_MAX_COUNT = 1 << 40
_MAX_MESSAGE = 200


@dataclass(frozen=True, slots=True)
class Chunk:
    """Hold one event of a stream: the text of its first choice, reasoning included, and the counts if it has them. `token_ids`:
    the new ones of that choice, of servers that report them when asked."""

    text: str
    done: Done | None
    token_ids: tuple[int, ...] = ()


def malformed(what: str) -> TargetError:
    """Return the error for an invalid answer."""
    return TargetError(Outcome.ERROR, f"malformed answer: {what}")


def read_chunk(data: bytes) -> Chunk:
    """Read the data of one event."""
    value = _object(data)
    if value.get("error"):
        raise TargetError(Outcome.ERROR, read_message(data))
    usage = _member(value, "usage", dict, "an object")
    return Chunk(_text(value), _done(usage) if usage else None, _token_ids(value))


def read_models(body: bytes) -> dict[str, TargetInfo]:
    """Return the models in /models, with the context where the server reports it."""
    found = {}
    for model in _member(_object(body), "data", list, "a list") or []:
        if isinstance(model, dict) and isinstance(name := model.get("id"), str):
            context = model.get("max_model_len")
            found[name] = TargetInfo(name, context if isinstance(context, int) and context > 0 else None)
    return found


def read_refusal(status: int, body: bytes) -> TargetError:
    """Return the error for an answer that is not 200."""
    outcome = Outcome.REFUSED if status in _REFUSALS else Outcome.ERROR
    return TargetError(outcome, f"HTTP {status}: {read_message(body)}")


def read_message(body: bytes) -> str:
    """Return the server's error message, in one line of at most 200 characters that a terminal can show."""
    try:
        value = json.loads(body)
        error = value.get("error", value)
        text = error.get("message", "") if isinstance(error, dict) else error
    except (ValueError, AttributeError, RecursionError):
        text = body[: 4 * _MAX_MESSAGE].decode(errors="replace")
    line = " ".join(str(text).split())[:_MAX_MESSAGE]
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in line)


def _text(value: Mapping[str, Any]) -> str:
    choices = _member(value, "choices", list, "a list")
    if not choices:
        return ""
    choice = choices[0]
    if not isinstance(choice, dict):
        raise malformed("choices[0] is not an object")
    delta = _member(choice, "delta", dict, "an object", "choices[0].")
    if delta is None:
        return _member(choice, "text", str, "a text", "choices[0].") or ""
    pieces = (_member(delta, name, str, "a text", "choices[0].delta.") for name in ("content", "reasoning_content"))
    return next((piece for piece in pieces if piece), "")


def _token_ids(value: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids of the first choice; `_text` has checked that it is an object."""
    choices = value.get("choices")
    ids = _member(choices[0], "token_ids", list, "a list", "choices[0].") if choices else None
    if ids and not all(type(token) is int and 0 <= token < _MAX_COUNT for token in ids):
        raise malformed("choices[0].token_ids holds something else than token ids")
    return tuple(ids or ())


def _done(usage: Mapping[str, Any]) -> Done:
    details = _member(usage, "prompt_tokens_details", dict, "an object", "usage.") or {}
    cached = _count(details, "cached_tokens", "usage.prompt_tokens_details.")
    return Done(_count(usage, "prompt_tokens", "usage."), _count(usage, "completion_tokens", "usage."), cached or 0)


def _count(value: Mapping[str, Any], name: str, where: str) -> int | None:
    found = value.get(name)
    if found is None:
        return None
    if type(found) is not int or not 0 <= found < _MAX_COUNT:
        raise malformed(f"{where}{name} is not a count")
    return found


def _member(value: Mapping[str, Any], name: str, kind: type, called: str, where: str = "") -> Any:
    """Return the value of `name`, of this kind; None where it is absent or null."""
    found = value.get(name)
    if found is not None and not isinstance(found, kind):
        raise malformed(f"{where}{name} is not {called}")
    return found


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise malformed("not a JSON object")
    return value


# Server-sent events: bytes in pieces of any size in, the data of complete events out (WHATWG HTML, section 9.2.6).


MAX_EVENT_BYTES = 1 << 20


class EventTooLarge(ValueError):
    """Raised for an event, or a line, of more than MAX_EVENT_BYTES: such a stream may never end."""


class SseParser:
    """Parse events; incomplete ones are kept. Fields other than `data` are not needed and dropped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._num_bytes = 0  # of _data

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of each event that this piece completes. Lines may end in LF or CR LF. Raises EventTooLarge."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
                self._num_bytes += len(line)
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data, self._num_bytes = [], 0
        if len(self._rest) + self._num_bytes > MAX_EVENT_BYTES:
            raise EventTooLarge(f"an event of more than {MAX_EVENT_BYTES >> 20} MiB")
        return events


Endpoint = Literal["completions", "chat"]
_MAX_BODY_BYTES = 1 << 20
_CHECK_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class OpenAiSettings:
    """Configure the requests. `prompt`: token ids (of /completions only) or words; chat takes words in any case.
    `priority_header` and `tenant_header` name headers that carry them, for gateways that read such; empty: none.
    `return_token_ids`: ask /completions for the ids of answers, which are part of the next turn's prompt (vLLM has that)."""

    model: str = ""
    endpoint: Endpoint = "completions"
    prompt: PromptKind = "tokens"
    vocab_size: int = 32_000
    temperature: float = 0.0
    ignore_eos: bool = True
    api_key: str = ""
    priority_header: str = ""
    tenant_header: str = ""
    return_token_ids: bool = False
    tls: TlsConfig | None = None


@dataclass(frozen=True, slots=True)
class _Prepared:
    body: bytes
    headers: Mapping[str, str]


class OpenAiTarget:
    """Send to a server at http(s)://HOST:PORT/v1."""

    def __init__(self, url: str, settings: OpenAiSettings) -> None:
        self._settings = settings
        self._model = settings.model
        headers = {"Accept": "text/event-stream", "Content-Type": "application/json", "User-Agent": "pdmesh-loadtest"}
        if settings.api_key:
            headers["Authorization"] = f"Bearer {settings.api_key}"
        self._http = HttpClient(BaseUrl.parse(url), headers, settings.tls)
        self._path = "/chat/completions" if settings.endpoint == "chat" else "/completions"

    async def check(self) -> TargetInfo:
        """Return the model, from /models; the only one if none was named. The context where the server reports it (vLLM does)."""
        try:
            async with asyncio.timeout(_CHECK_TIMEOUT_S), self._http.request("GET", "/models") as response:
                body = await response.read(_MAX_BODY_BYTES)
                if response.status != 200:
                    raise TargetError(Outcome.ERROR, f"GET /models: HTTP {response.status}: {read_message(body)}")
        except TimeoutError:
            raise TargetError(Outcome.TIMEOUT, f"GET /models: no answer within {_CHECK_TIMEOUT_S:g} s") from None
        except HttpError as error:
            raise TargetError(Outcome.ERROR, str(error)) from error
        models = read_models(body)
        if not self._model and len(models) == 1:
            self._model = next(iter(models))
        if self._model not in models:
            raise TargetError(Outcome.ERROR, f"model {self._model!r} is not served; there are: {', '.join(models) or 'none'}")
        return models[self._model]

    def prepare(self, ask: Ask) -> _Prepared:
        """Return the request's body and headers."""
        settings, traffic = self._settings, ask.traffic
        body: dict[str, object] = {
            "model": self._model,
            "max_tokens": ask.output_tokens,
            "temperature": settings.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if settings.ignore_eos else {}),
            **({"return_token_ids": True} if settings.return_token_ids else {}),
            **({"messages": self._messages(ask)} if settings.endpoint == "chat" else {"prompt": self._prompt(ask)}),
        }
        named = {
            "X-Request-Id": ask.request_id,
            settings.priority_header: traffic.priority,
            settings.tenant_header: traffic.tenant,
        }
        return _Prepared(json.dumps(body).encode(), {name: value for name, value in named.items() if name and value})

    async def stream(self, prepared: object) -> AsyncGenerator[Event, None]:
        """See Target.stream."""
        assert isinstance(prepared, _Prepared)
        try:
            async with self._http.request("POST", self._path, prepared.body, prepared.headers) as response:
                if response.status != 200:
                    raise read_refusal(response.status, await response.read(_MAX_BODY_BYTES))
                has_ids = not self._settings.return_token_ids
                async with aclosing(_events(response)) as events:
                    async for event in events:
                        has_ids = has_ids or (isinstance(event, Tokens) and bool(event.token_ids))
                        yield event
                if not has_ids:
                    raise malformed("no token_ids, which return_token_ids asks for; leave out --return-token-ids")
        except HttpError as error:
            raise TargetError(Outcome.ERROR, str(error)) from error

    async def fleet(self) -> Fleet | None:
        """Return None: the protocol does not report it."""
        return None

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    def _messages(self, ask: Ask) -> list[dict[str, str]]:
        messages = []
        for said in ask.said:
            messages.append({"role": "user", "content": words(said.segments, ask.seed)})
            if said.answer is not None:
                messages.append({"role": "assistant", "content": said.answer.text})
        return messages

    def _prompt(self, ask: Ask) -> list[int] | str:
        """Return the ids of the segments and of the answers between them (without `return_token_ids` an answer has none, and is
        left out), or the words of both."""
        settings = self._settings
        if settings.prompt == "words":
            return conversation(ask.said, ask.seed)
        return conversation_ids(ask.said, ask.seed, settings.vocab_size)


async def _events(response: Response) -> AsyncGenerator[Event, None]:
    parser, done, ended = SseParser(), Done(), False
    async with aclosing(response.pieces()) as pieces:
        async for piece in pieces:
            for data in _fed(parser, piece):
                if data == b"[DONE]":
                    ended = True
                    continue
                chunk = read_chunk(data)
                if chunk.done is not None:
                    done = chunk.done
                if chunk.text or chunk.token_ids:
                    yield Tokens(len(chunk.token_ids) or 1, chunk.token_ids, chunk.text)
    if not ended:
        raise TargetError(Outcome.ERROR, "the stream ended without [DONE]")
    yield done


def _fed(parser: SseParser, piece: bytes) -> list[bytes]:
    try:
        return parser.feed(piece)
    except EventTooLarge as error:
        raise malformed(str(error)) from error
