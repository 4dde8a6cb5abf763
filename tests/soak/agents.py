"""Agents over Anthropic's Messages and OpenAI's Responses: a tool that must be called, then an answer to what it told. Half of
them are streamed; a turn's answer is compared with the first one to it. Embeddings, too."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from pdmesh.loadtest.targets.http import BaseUrl, HttpClient
from pdmesh.loadtest.targets.openai import SseParser
from tests.soak.ledger import Ledger

MAX_BYTES = 4 << 20
MODEL_NAME = "smollm2"
NUM_QUESTIONS = 60
NAMES = ("anthropic", "responses", "embeddings")
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}, "unit": {"enum": ["C", "F"]}},
    "required": ["days", "unit"],
    "additionalProperties": False,
}
_TOOL = {"name": "weather", "description": "Tells the weather of the next days."}
_MAX_TOKENS = 60


class Agents:
    """They ask one router over HTTP, and wait until `may_ask` before each turn."""

    def __init__(self, url: str, ledger: Ledger, may_ask: asyncio.Event, rng: random.Random) -> None:
        self._http = HttpClient(BaseUrl.parse(url), {"Content-Type": "application/json"})
        self._ledger, self._may_ask, self._rng = ledger, may_ask, rng
        self._first: dict[str, object] = {}

    async def act(self) -> None:
        """Hold one conversation, or ask for an embedding."""
        name = self._rng.choice(NAMES)
        number = self._rng.randrange(NUM_QUESTIONS)
        acts: dict[str, Callable[[int], Any]] = {
            "anthropic": self._messages,
            "responses": self._responses,
            "embeddings": self._embedding,
        }
        try:
            await acts[name](number)
        except Exception as error:  # noqa: BLE001  # whatever it is goes into the ledger
            self._ledger.failed(name, f"question {number}", error)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def _messages(self, number: int) -> None:
        body: dict[str, Any] = {"max_tokens": _MAX_TOKENS, "temperature": 0}
        body["tools"] = [_TOOL | {"input_schema": _SCHEMA}]
        asked: dict[str, Any] = {"role": "user", "content": _question(number)}
        choice = {"type": "any", "disable_parallel_tool_use": True}
        called = await self._message(number, 0, {**body, "messages": [asked], "tool_choice": choice})
        (call,) = (block for block in called if block["type"] == "tool_use")
        self._check_arguments("anthropic", number, call["input"])
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "Sunny."}
        told = [asked, {"role": "assistant", "content": called}, {"role": "user", "content": [result]}]
        await self._message(number, 1, {**body, "messages": told, "tool_choice": {"type": "none"}})

    async def _message(self, number: int, turn: int, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the blocks of the answer."""
        blocks: list[dict[str, Any]] = []
        texts: list[str] = []
        ended = ""
        async for event in self._events("anthropic", "/v1/messages", body):
            if event.get("type") == "message":  # not streamed
                blocks, ended = event["content"], event["stop_reason"]
            elif event["type"] == "content_block_start":
                blocks.append(event["content_block"])
                texts.append("")
            elif event["type"] == "content_block_delta":
                texts[event["index"]] += event["delta"].get("text") or event["delta"].get("partial_json") or ""
            elif event["type"] == "message_delta":
                ended = event["delta"]["stop_reason"] or ended
        for block, text in zip(blocks if texts else (), texts, strict=True):
            block |= {"input": json.loads(text)} if block["type"] == "tool_use" else {"text": text}
        if ended not in ("end_turn", "tool_use", "max_tokens", "stop_sequence"):
            self._ledger.problem("anthropic", f"question {number} ended with {ended!r}")
        self._compare("anthropic", number, turn, [block.get("input") or block.get("text") for block in blocks])
        return blocks

    async def _responses(self, number: int) -> None:
        body: dict[str, Any] = {"max_output_tokens": _MAX_TOKENS, "temperature": 0, "parallel_tool_calls": False}
        body["tools"] = [{"type": "function", **_TOOL, "parameters": _SCHEMA, "strict": True}]
        first = await self._response(number, 0, {**body, "input": _question(number), "tool_choice": "required"})
        (call,) = (item for item in first["output"] if item["type"] == "function_call")
        self._check_arguments("responses", number, json.loads(call["arguments"]))
        told = {"type": "function_call_output", "call_id": call["call_id"], "output": "Sunny."}
        more = {"input": [told], "previous_response_id": first["id"], "tool_choice": "none"}
        await self._response(number, 1, {**body, **more, "store": False})

    async def _response(self, number: int, turn: int, body: dict[str, Any]) -> dict[str, Any]:
        ended: dict[str, Any] = {}
        async for event in self._events("responses", "/v1/responses", body):
            if event.get("object") == "response":  # not streamed
                ended = event
            elif event["type"] in ("response.completed", "response.incomplete", "response.failed"):
                ended = event["response"]
        if ended.get("status") not in ("completed", "incomplete"):
            self._ledger.problem("responses", f"question {number} ended with {ended.get('status')!r}: {ended.get('error')}")
        told = [item.get("arguments") or [part.get("text") for part in item.get("content", ())] for item in ended["output"]]
        self._compare("responses", number, turn, told)
        return ended

    async def _embedding(self, number: int) -> None:
        (event,) = [event async for event in self._events("embeddings", "/v1/embeddings", {"input": _question(number)})]
        (entry,) = event["data"]
        # Rows of another number are computed in another order, so the last digits may differ.
        self._compare("embeddings", number, 0, [len(entry["embedding"]), *(round(value, 1) for value in entry["embedding"][:4])])

    async def _events(self, name: str, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of a stream, or the one answer. Raises AssertionError for anything but 200."""
        await self._may_ask.wait()
        self._ledger.sent(name)
        body = {"model": MODEL_NAME, **body}
        if name != "embeddings":
            body["stream"] = self._rng.random() < 0.5
        async with self._http.request("POST", path, json.dumps(body).encode()) as response:
            if response.status != 200:
                raise AssertionError(f"HTTP {response.status}: {(await response.read(MAX_BYTES))[:300]!r}")
            if not body.get("stream"):
                yield json.loads(await response.read(MAX_BYTES))
            else:
                parser = SseParser()
                async with aclosing(response.pieces()) as pieces:
                    async for piece in pieces:
                        for data in parser.feed(piece):
                            if data != b"[DONE]":
                                yield json.loads(data)
        self._ledger.count("complete")

    def _check_arguments(self, name: str, number: int, arguments: Any) -> None:
        keeps = set(arguments) == {"days", "unit"} and arguments["days"] in range(1, 10) and arguments["unit"] in ("C", "F")
        if not keeps:
            self._ledger.problem(name, f"question {number}: arguments {arguments!r} break the schema")

    def _compare(self, name: str, number: int, turn: int, told: object) -> None:
        first = self._first.setdefault(f"{name} {number} {turn}", told)
        self._ledger.num_compared += 1
        if told != first:
            self._ledger.problem(name, f"question {number}, turn {turn}: {told!r}, at first it was {first!r}")


def _question(number: int) -> str:
    return f"What is the weather in {number + 1} days?"
