"""OpenAI's API over HTTP, whole answers and streams; the text only, its tokens are not told."""

from __future__ import annotations

import json
import random
from contextlib import aclosing
from typing import Any

import grpc

from pdmesh.errors import MeshError, Unavailable
from pdmesh.loadtest.targets.http import BaseUrl, HttpClient, HttpError, Response
from pdmesh.loadtest.targets.openai import SseParser
from tests.soak.cases import Case, renamed
from tests.soak.sides.base import Answer, new_answer

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT, 404: grpc.StatusCode.NOT_FOUND, 429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED, 503: grpc.StatusCode.UNAVAILABLE, 504: grpc.StatusCode.DEADLINE_EXCEEDED,
}  # fmt: skip
MAX_BYTES = 4 << 20
_NAMES = {"regex": "guided_regex", "json_schema": "guided_json"}
_CODES_IN_STREAMS = {"rate_limit_exceeded": 429, "service_unavailable": 503, "deadline_exceeded": 504}


class OpenAiSide:
    """/v1/completions for token ids, /v1/chat/completions for messages; every other answer is streamed."""

    name = "openai"

    def __init__(self, url: str, rng: random.Random) -> None:
        self._http = HttpClient(BaseUrl.parse(url), {"Content-Type": "application/json"})
        self._rng = rng

    def field_name(self, name: str) -> str:
        return _NAMES.get(name, name)

    async def ask(self, case: Case, *, timeout_s: float, leave_after: int | None = None) -> Answer:
        streamed = leave_after is not None or self._rng.random() < 0.5
        path = "/v1/chat/completions" if case.messages else "/v1/completions"
        headers = {"X-Request-Timeout-Ms": str(max(1, round(timeout_s * 1000)))}
        try:
            async with self._http.request("POST", path, _body(case, streamed), headers) as response:
                if response.status != 200:
                    raise _error(response.status, json.loads(await response.read(MAX_BYTES))["error"], response)
                answer = new_answer(case, has_tokens=False)
                if streamed:
                    await _follow(response, answer, leave_after)
                else:
                    _take_all(answer, json.loads(await response.read(MAX_BYTES)))
                return answer
        except HttpError as error:
            raise Unavailable(f"HTTP: {error}") from error

    async def close(self) -> None:
        await self._http.close()


def _body(case: Case, streamed: bool) -> bytes:
    options = renamed(case.options, _NAMES, without=("logprobs",) if case.messages else ())
    if case.messages:
        options["messages"] = [{"role": role, "content": content} for role, content in case.messages]
        if "logprobs" in case.options:
            options |= {"logprobs": True, "top_logprobs": case.options["logprobs"]}
    else:
        options["prompt"] = case.prompt
    return json.dumps({**options, "stream": streamed}).encode()


async def _follow(response: Response, answer: Answer, leave_after: int | None) -> None:
    parser, num_pieces = SseParser(), 0
    async with aclosing(response.pieces()) as pieces:
        async for piece in pieces:
            for data in parser.feed(piece):
                if data == b"[DONE]":
                    answer.ended = True
                    continue
                event = json.loads(data)
                if "error" in event:
                    status = _CODES_IN_STREAMS.get(event["error"]["code"], 500)
                    raise _error(status, event["error"], None)
                _take(answer, event)
                num_pieces += 1
            if leave_after is not None and num_pieces >= leave_after:
                answer.left = True
                return


def _take_all(answer: Answer, body: dict[str, Any]) -> None:
    _take(answer, body)
    answer.ended = len(body["choices"]) == len(answer.choices)


def _take(answer: Answer, body: dict[str, Any]) -> None:
    for entry in body["choices"]:
        choice = answer.choices[entry["index"]]
        message = entry.get("delta") or entry.get("message")
        choice.text += (message.get("content") or "") if message else entry.get("text", "")
        choice.finish = entry["finish_reason"] or choice.finish
        logprobs = entry.get("logprobs") or {}
        choice.num_logprobs += len(logprobs.get("tokens") or logprobs.get("content") or ())


def _error(status: int, error: dict[str, Any], response: Response | None) -> MeshError:
    delay = response.headers.get("retry-after-ms") if response is not None else None
    code = _CODES.get(status, grpc.StatusCode.UNKNOWN)
    message = f"HTTP {status}: {error['message']}"
    return MeshError(message, code=code, field=error["param"], retry_delay_s=int(delay) / 1000 if delay else None)
