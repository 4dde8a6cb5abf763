"""Tools through a mesh of real processes: a random model calls what it must, by its schema; streamed and whole are the same."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import pytest_asyncio

from pdmesh.client import AsyncClient, Message, Tool
from pdmesh.client.types import FinishReason
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
HELLO: Any = [{"role": "user", "content": "What is the weather in Lyon?"}]
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "set": {
        "type": "object",
        "properties": {"mode": {"enum": ["on", "off"]}},
        "required": ["mode"],
        "additionalProperties": False,
    },
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": f"It does {name}.", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
ASKED: Any = {"model": "tiny", "messages": HELLO, "tools": TOOLS, "max_tokens": 1000, "seed": 7}
NAMED: Any = {"type": "function", "function": {"name": "set"}}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(tiny: Path) -> AsyncIterator[LocalMesh]:
    """One prefill worker, one decode worker, a router with HTTP."""
    config = LocalMeshConfig(model=str(tiny), num_prefill=1, num_decode=1, port=0, http_port=0, num_threads=1)
    async with LocalMesh(config) as mesh:
        yield mesh


@pytest_asyncio.fixture(loop_scope="module")
async def client(served: LocalMesh) -> AsyncIterator[Any]:
    async with openai.AsyncOpenAI(base_url=f"{served.http_urls[0]}/v1", api_key="none", timeout=60) as client:
        yield client


async def streamed(client: Any, **asked: Any) -> dict[int, dict[str, Any]]:
    """What the chunks of a stream add up to, by choice."""
    found: dict[int, dict[str, Any]] = {}
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        piece = chunk.choices[0]
        choice = found.setdefault(piece.index, {"content": "", "calls": [], "finish": None})
        choice["content"] += piece.delta.content or ""
        choice["finish"] = piece.finish_reason or choice["finish"]
        for call in piece.delta.tool_calls or []:
            if call.function.name is not None:
                assert call.index == len(choice["calls"]) and call.type == "function"
                choice["calls"].append([call.id, call.function.name, ""])
            choice["calls"][call.index][2] += call.function.arguments
    return found


def whole(answer: Any) -> dict[int, dict[str, Any]]:
    return {
        choice.index: {
            "content": choice.message.content or "",
            "calls": [[call.id, call.function.name, call.function.arguments] for call in choice.message.tool_calls or []],
            "finish": choice.finish_reason,
        }
        for choice in answer.choices
    }


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("is_parallel", [True, False])
async def test_forced_calls(client: Any, choice: Any, is_parallel: bool) -> None:
    asked = {**ASKED, "tool_choice": choice, "parallel_tool_calls": is_parallel, "n": 3}
    answer = await client.chat.completions.create(**asked)
    said = whole(answer)
    assert len(said) == 3
    for one in said.values():
        assert one["finish"] == "tool_calls" and not one["content"]
        assert len(one["calls"]) >= 1 and ((is_parallel and choice == "required") or len(one["calls"]) == 1)
        for _, name, arguments in one["calls"]:
            assert choice == "required" or name == "set"
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    ids = [call[0] for one in said.values() for call in one["calls"]]
    assert len(set(ids)) == len(ids) and all(call_id.startswith("call_") for call_id in ids)
    assert await streamed(client, **asked) == said


async def test_a_history_with_calls_goes_on(client: Any) -> None:
    first = (await client.chat.completions.create(**ASKED, tool_choice="required")).choices[0].message
    answers = [{"role": "tool", "tool_call_id": call.id, "content": "Sunny."} for call in first.tool_calls]
    messages = [*HELLO, first.model_dump(), *answers]
    assert messages[1]["content"] is None
    answer = await client.chat.completions.create(**{**ASKED, "messages": messages, "max_tokens": 5})
    assert answer.usage.prompt_tokens > len("Sunny.")
    again = await client.chat.completions.create(**{**ASKED, "messages": messages, "tool_choice": "none", "max_tokens": 5})
    assert again.choices[0].message.tool_calls is None and again.usage.prompt_tokens < answer.usage.prompt_tokens


async def test_the_client_library_calls_as_http_does(served: LocalMesh, client: Any) -> None:
    answer = await client.chat.completions.create(**ASKED, tool_choice="required", n=2)
    wanted = [tuple(map(tuple, choice["calls"])) for choice in whole(answer).values()]
    options: Any = {
        "tools": [Tool(name, f"It does {name}.", schema) for name, schema in SCHEMAS.items()],
        "tool_choice": "required",
    }
    async with AsyncClient(served.router_addresses) as mesh:
        said = await mesh.chat([("user", HELLO[0]["content"])], **options, max_tokens=1000, seed=7, n=2, timeout=60)
        assert [tuple((call.id, call.name, call.arguments) for call in choice.tool_calls) for choice in said.choices] == wanted
        assert {choice.finish_reason for choice in said.choices} == {FinishReason.TOOL_CALLS}
        turns = [Message("user", "Hello"), said.choices[0].message]
        turns += [Message("tool", "Sunny.", tool_call_id=call.id) for call in said.tool_calls]
        assert (await mesh.chat(turns, **{**options, "tool_choice": "none"}, max_tokens=3, timeout=60)).token_ids


async def test_a_call_that_is_cut_off_is_told(client: Any) -> None:
    answer = await client.chat.completions.create(**{**ASKED, "tool_choice": "required", "max_tokens": 3})
    (choice,) = answer.choices
    assert choice.finish_reason == "length" and choice.message.tool_calls is None
    assert choice.message.content == "<to"
    answer = await client.chat.completions.create(**{**ASKED, "tool_choice": "required", "max_tokens": 13})
    assert answer.choices[0].message.content == "<tool_call>\n{" and answer.choices[0].model_extra["warnings"]
