"""Any server that speaks OpenAI's protocol: /completions with token ids (or words), or /chat/completions, streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

from pdmesh.loadtest.record import Outcome
from pdmesh.loadtest.targets import openai_answer
from pdmesh.loadtest.targets.http import BaseUrl, HttpClient, HttpError, Response
from pdmesh.loadtest.targets.prompts import PromptKind, conversation, token_ids, words
from pdmesh.loadtest.targets.sse import EventTooLarge, SseParser
from pdmesh.loadtest.targets.target import Ask, Done, Event, Fleet, TargetError, TargetInfo, Tokens
from pdmesh.runtime.rpc.tls import TlsConfig

Endpoint = Literal["completions", "chat"]
_MAX_BODY_BYTES = 1 << 20
_CHECK_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class OpenAiSettings:
    """How requests are put. `prompt`: token ids (of /completions only) or words; chat takes words in any case.
    `priority_header` and `tenant_header` name headers that carry them, for gateways that read such; empty: none."""

    model: str = ""
    endpoint: Endpoint = "completions"
    prompt: PromptKind = "tokens"
    vocab_size: int = 32_000
    temperature: float = 0.0
    ignore_eos: bool = True
    api_key: str = ""
    priority_header: str = ""
    tenant_header: str = ""
    tls: TlsConfig | None = None


@dataclass(frozen=True, slots=True)
class _Prepared:
    body: bytes
    headers: Mapping[str, str]


class OpenAiTarget:
    """A server at http(s)://HOST:PORT/v1."""

    def __init__(self, url: str, settings: OpenAiSettings) -> None:
        self._settings = settings
        self._model = settings.model
        headers = {"Accept": "text/event-stream", "Content-Type": "application/json", "User-Agent": "pdmesh-loadtest"}
        if settings.api_key:
            headers["Authorization"] = f"Bearer {settings.api_key}"
        self._http = HttpClient(BaseUrl.parse(url), headers, settings.tls)
        self._path = "/chat/completions" if settings.endpoint == "chat" else "/completions"

    async def check(self) -> TargetInfo:
        """The model, from /models; the only one if none was named. The context where the server tells it (vLLM does)."""
        try:
            async with asyncio.timeout(_CHECK_TIMEOUT_S), self._http.request("GET", "/models") as response:
                body = await response.read(_MAX_BODY_BYTES)
                if response.status != 200:
                    raise TargetError(Outcome.ERROR, f"GET /models: HTTP {response.status}: {openai_answer.read_message(body)}")
        except TimeoutError:
            raise TargetError(Outcome.TIMEOUT, f"GET /models: no answer within {_CHECK_TIMEOUT_S:g} s") from None
        except HttpError as error:
            raise TargetError(Outcome.ERROR, str(error)) from error
        models = openai_answer.read_models(body)
        if not self._model and len(models) == 1:
            self._model = next(iter(models))
        if self._model not in models:
            raise TargetError(Outcome.ERROR, f"model {self._model!r} is not served; there are: {', '.join(models) or 'none'}")
        return models[self._model]

    def prepare(self, ask: Ask) -> _Prepared:
        """The request's body and headers."""
        settings, traffic = self._settings, ask.traffic
        body: dict[str, object] = {
            "model": self._model,
            "max_tokens": ask.output_tokens,
            "temperature": settings.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if settings.ignore_eos else {}),
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
                    raise openai_answer.read_refusal(response.status, await response.read(_MAX_BODY_BYTES))
                async with aclosing(_events(response)) as events:
                    async for event in events:
                        yield event
        except HttpError as error:
            raise TargetError(Outcome.ERROR, str(error)) from error

    async def fleet(self) -> Fleet | None:
        """Unknown: the protocol says nothing of it."""
        return None

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.close()

    def _messages(self, ask: Ask) -> list[dict[str, str]]:
        messages = []
        for said in ask.said:
            messages.append({"role": "user", "content": words(said.segments, ask.seed)})
            if said.answer is not None:
                messages.append({"role": "assistant", "content": said.answer.text})
        return messages

    def _prompt(self, ask: Ask) -> list[int] | str:
        """Ids of the segments, or words and the answers between them: an answer comes as text, so with ids it is left out."""
        settings = self._settings
        if settings.prompt == "words":
            return conversation(ask.said, ask.seed)
        return [token for said in ask.said for token in token_ids(said.segments, ask.seed, settings.vocab_size)]


async def _events(response: Response) -> AsyncGenerator[Event, None]:
    parser, done, ended = SseParser(), Done(), False
    async with aclosing(response.pieces()) as pieces:
        async for piece in pieces:
            for data in _fed(parser, piece):
                if data == b"[DONE]":
                    ended = True
                    continue
                chunk = openai_answer.read_chunk(data)
                if chunk.done is not None:
                    done = chunk.done
                if chunk.text:
                    yield Tokens(1, (), chunk.text)
    if not ended:
        raise TargetError(Outcome.ERROR, "the stream ended without [DONE]")
    yield done


def _fed(parser: SseParser, piece: bytes) -> list[bytes]:
    try:
        return parser.feed(piece)
    except EventTooLarge as error:
        raise openai_answer.malformed(str(error)) from error
