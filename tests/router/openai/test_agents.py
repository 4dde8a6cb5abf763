"""openai's helpers of chats, with tools and types; and what agents send to chat completions, in small."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.router.mesh import Mesh
from tests.router.openai.conftest import url
from tests.router.stub_texts import Say, prompt_of, sayer

pytestmark = pytest.mark.asyncio(loop_scope="module")
HELLO: Any = [{"role": "user", "content": "hello"}]


class Weather(BaseModel):
    city: str
    degrees: int


class GetWeather(BaseModel):
    """Tells the weather."""

    city: str


CALL = '<tool_call>\n{"name": "GetWeather", "arguments": {"city": "Lyon"}}\n</tool_call>'


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Say:
    return sayer(monkeypatch)


async def test_parse_of_an_answer(client: Any, served: Mesh, says: Say) -> None:
    says(served, '{"city": "Lyon", "degrees": 25}')
    done = await client.chat.completions.parse(model="tiny", messages=HELLO, response_format=Weather, max_tokens=60)
    assert done.choices[0].message.parsed == Weather(city="Lyon", degrees=25) and done.choices[0].finish_reason == "stop"
    sent = json.loads(served["d0"].submits[-1].request.sampling.constraint.json_schema)
    assert sent["properties"]["degrees"]["type"] == "integer" and sent["additionalProperties"] is False


async def test_parse_of_calls(client: Any, served: Mesh, says: Say) -> None:
    says(served, CALL)
    tools = [openai.pydantic_function_tool(GetWeather)]
    done = await client.chat.completions.parse(model="tiny", messages=HELLO, tools=tools, max_tokens=90)
    (call,) = done.choices[0].message.tool_calls
    assert call.function.parsed_arguments == GetWeather(city="Lyon") and done.choices[0].finish_reason == "tool_calls"


async def test_parse_raises_for_an_answer_that_is_cut_off(client: Any, served: Mesh, says: Say) -> None:
    says(served, '{"city": "Lyon", "degrees": 25}')
    with pytest.raises(openai.LengthFinishReasonError) as cut:
        await client.chat.completions.parse(model="tiny", messages=HELLO, response_format=Weather, max_tokens=5)
    assert cut.value.completion.usage is not None and cut.value.completion.usage.completion_tokens == 5


async def test_the_helper_of_streams_with_a_type(client: Any, served: Mesh, says: Say) -> None:
    says(served, '{"city": "Lyon", "degrees": 25}')
    options: Any = {"response_format": Weather, "max_tokens": 60, "stream_options": {"include_usage": True}}
    async with client.chat.completions.stream(model="tiny", messages=HELLO, **options) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_completion()
    deltas = [event.delta for event in events if event.type == "content.delta"]
    (done,) = [event for event in events if event.type == "content.done"]
    assert "".join(deltas) == done.content and len(deltas) > 1
    assert done.parsed == final.choices[0].message.parsed == Weather(city="Lyon", degrees=25)
    assert final.usage.completion_tokens > 0


async def test_the_helper_of_streams_with_calls(client: Any, served: Mesh, says: Say) -> None:
    says(served, f"I look. {CALL}")
    tools = [openai.pydantic_function_tool(GetWeather)]
    async with client.chat.completions.stream(model="tiny", messages=HELLO, tools=tools, max_tokens=120) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_completion()
    (done,) = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert (done.name, done.index, done.parsed_arguments) == ("GetWeather", 0, GetWeather(city="Lyon"))
    message = final.choices[0].message
    assert message.tool_calls[0].function.parsed_arguments == GetWeather(city="Lyon")
    assert message.content.strip() == "I look." and final.choices[0].finish_reason == "tool_calls"


SCHEMA: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {"filePath": {"type": "string", "description": "Which file."}, "limit": {"type": "integer"}},
    "required": ["filePath"],
    "additionalProperties": False,
}
READ: dict[str, Any] = {"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": SCHEMA}}
TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": [{"type": "text", "text": "Be safe.", "cache_control": {"type": "ephemeral"}}]},
    {"role": "user", "content": [{"type": "text", "text": "Read a.py."}]},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "read", "arguments": '{"filePath":"a.py"}'}}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "print(1)"}]},
]
AGENTS: dict[str, dict[str, Any]] = {
    "OpenCode, by ai's provider for compatible servers": {
        "tools": [READ],
        "tool_choice": "auto",
        "max_tokens": 32,
        "stream": True,
        "stream_options": {"include_usage": True},
        "reasoning_effort": "medium",
    },
    "by ai's provider for OpenAI": {
        "tools": [READ],
        "parallel_tool_calls": True,
        "max_completion_tokens": 32,
        "store": False,
        "metadata": {"a": "b"},
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "service_tier": "auto",
        "safety_identifier": "s",
        "verbosity": "medium",
        "user": "u",
    },
    "aider, by litellm": {"temperature": 0, "stream": True, "max_tokens": 32},
    "litellm, with tools that Claude Code offers": {
        "tools": [{**READ, "cache_control": {"type": "ephemeral"}}],
        "tool_choice": "auto",
        "max_tokens": 32,
        "stream": False,
    },
}


@pytest.mark.parametrize("name", AGENTS)
async def test_what_agents_send_is_accepted(served: Mesh, says: Say, name: str) -> None:
    says(served, "Done.")
    async with httpx.AsyncClient() as http:
        body = {"model": "tiny", "messages": TURNS, **AGENTS[name]}
        answer = await http.post(url(served, "/v1/chat/completions"), json=body, headers={"authorization": "Bearer anything"})
    assert answer.status_code == 200, answer.text
    if AGENTS[name].get("stream"):
        chunks = [json.loads(event.removeprefix("data: ")) for event in answer.text.strip().split("\n\n")[:-1]]
        said = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    else:
        said = answer.json()["choices"][0]["message"]["content"]
    assert said == "Done." and "print(1)" in prompt_of(served)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "custom", "custom": {"name": "patch"}}]}, "tools[0].type"),
    ({"tools": [{"type": "web_search_preview"}]}, "tools[0].type"),
    ({"tools": [READ], "tool_choice": {"type": "function", "function": {"name": "write"}}}, "tool_choice"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    ({"max_tokens": 32_000}, "max_tokens"),
]


@pytest.mark.parametrize(("more", "param"), REFUSED)
async def test_what_is_not_served_is_refused_by_name(served: Mesh, more: dict[str, Any], param: str) -> None:
    async with httpx.AsyncClient() as http:
        answer = await http.post(url(served, "/v1/chat/completions"), json={"model": "tiny", "messages": HELLO, **more})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
