"""The page's prompt box: a request through the client library, whose trace id is sent to the page at once."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdmesh.client.client import AsyncClient
from pdmesh.client.types import Completed, Delta, GenerateOptions
from pdmesh.errors import MeshError
from pdmesh.runtime.rpc.tls import TlsConfig
from pdmesh.runtime.telemetry.propagation import Metadata, SpanContext, inject

MAX_PROMPT_CHARS = 16_000
MAX_TOKENS = 1024
DEFAULT_TOKENS = 128
TIMEOUT_S = 300.0


class BadPrompt(ValueError):
    """Raised for an invalid request of the page or another client."""


@dataclass(frozen=True)
class Prompt:
    """Hold a prompt. `repr` and logs never show it."""

    text: str
    model: str
    max_tokens: int
    temperature: float
    is_chat: bool

    def __repr__(self) -> str:
        return f"Prompt({len(self.text)} characters)"


@dataclass(frozen=True)
class Mesh:
    """Name the mesh that prompts are sent to."""

    routers: Sequence[str]
    tls: TlsConfig | None
    api_key: str


class _TracedClient(AsyncClient):
    """Put all calls into one trace."""

    def __init__(self, mesh: Mesh, trace: Metadata) -> None:
        super().__init__(mesh.routers, resume_timeout_s=5.0, tls=mesh.tls, api_key=mesh.api_key)
        self._metadata = (*(self._metadata or ()), *trace)


def read_prompt(body: bytes) -> Prompt:
    """Read JSON {"prompt", "model", "max_tokens", "temperature", "chat"}; all but the first may be absent. Raises BadPrompt."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):  # the second: thousands of brackets
        raise BadPrompt("the body is not JSON") from None
    if not isinstance(given, dict):
        raise BadPrompt("the body is not a JSON object")
    text = given.get("prompt")
    if not isinstance(text, str) or not text.strip():
        raise BadPrompt("prompt: write something")
    if len(text) > MAX_PROMPT_CHARS:
        raise BadPrompt(f"prompt: has {len(text)} characters, more than {MAX_PROMPT_CHARS}")
    return Prompt(
        text=text,
        model=_model(given),
        max_tokens=int(_number(given, "max_tokens", DEFAULT_TOKENS, 1, MAX_TOKENS)),
        temperature=_number(given, "temperature", 0.0, 0.0, 2.0),
        is_chat=given.get("chat") is not False,
    )


def _model(given: Mapping[str, object]) -> str:
    model = given.get("model", "")
    if not isinstance(model, str) or len(model) > 200:
        raise BadPrompt("model: must be a name")
    return model


def _number(given: Mapping[str, object], name: str, default: float, least: float, most: float) -> float:
    value = given.get(name, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value <= most:
        raise BadPrompt(f"{name}: must be a number from {least:g} to {most:g}")
    return float(value)


async def answer(mesh: Mesh, prompt: Prompt) -> AsyncGenerator[str]:
    """Yield lines of JSON: {"trace_id"}, {"text"} …, then {"done": figures} or {"error": words}. Closing it cancels the
    request."""
    context = SpanContext(secrets.randbits(128) | 1, secrets.randbits(64) | 1)
    yield _line({"trace_id": context.trace_name})
    try:
        async with _TracedClient(mesh, inject(context)) as client:
            options = GenerateOptions(max_tokens=prompt.max_tokens, temperature=prompt.temperature)
            if prompt.is_chat:
                stream = client.chat_stream([("user", prompt.text)], model=prompt.model, timeout=TIMEOUT_S, **options)
            else:
                stream = client.generate_stream(prompt.text, model=prompt.model, timeout=TIMEOUT_S, **options)
            async with stream:
                async for event in stream:
                    if isinstance(event, Delta):
                        yield _line({"text": event.reasoning + event.text})
                    elif isinstance(event, Completed):
                        yield _line({"done": _figures(event)})
    except MeshError as error:
        yield _line({"error": error.message or error.code.name})


def _figures(completed: Completed) -> dict[str, Any]:
    timings, usage = completed.timings, completed.usage
    return {
        "ttft_ms": timings.ttft_ns / 1e6,
        "tpot_ms": timings.tpot_ns / 1e6,
        "total_ms": timings.total_ns / 1e6,
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
    }


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value) + "\n"
