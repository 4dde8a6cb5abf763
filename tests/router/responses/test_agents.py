"""What coding agents send to the Responses API, in small: Codex CLI (as version 0.171 did) and the `ai` package of npm (6.0)."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.router.mesh import Mesh
from tests.router.responses.conftest import url
from tests.router.stub_texts import Say, prompt_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SHELL: dict[str, Any] = {"type": "function", "name": "exec_command", "description": "Runs.", "strict": False, "parameters": CITY}
MAPS: dict[str, Any] = {
    "type": "namespace",
    "name": "mcp__maps",
    "description": "A server of maps.",
    "tools": [
        {"type": "function", "name": "weather", "description": "Tells the weather.", "strict": False, "parameters": CITY},
        {"type": "function", "name": "route", "description": "Finds a way.", "strict": False, "parameters": CITY},
    ],
}
CODEX: dict[str, Any] = {
    "model": "tiny",
    "tools": [SHELL, MAPS, {"type": "web_search", "external_web_access": False}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "thread-1",
    "client_metadata": {"thread_id": "thread-1", "turn_id": "turn-1"},
    "service_tier": "priority",
    "text": {"verbosity": "low"},
}
HEADERS = {
    "originator": "codex_exec",
    "session-id": "thread-1",
    "thread-id": "thread-1",
    "x-client-request-id": "thread-1",
    "x-codex-turn-metadata": json.dumps({"turn_id": "turn-1"}),
    "accept": "text/event-stream",
    "accept-encoding": "zstd,gzip",
}
ASKED: list[dict[str, Any]] = [
    {"type": "message", "id": "msg_a", "role": "developer", "content": [{"type": "input_text", "text": "Be safe."}]},
    {"type": "message", "id": "msg_b", "role": "user", "content": [{"type": "input_text", "text": "Weather in Lyon?"}]},
]
CALL = '<tool_call>\n{"name": "mcp__maps__weather", "arguments": {"city": "Lyon"}}\n</tool_call>'


async def codex(mesh: Mesh, items: list[dict[str, Any]], **more: Any) -> list[dict[str, Any]]:
    """The events of a turn."""
    async with httpx.AsyncClient() as http:
        body = {**CODEX, "input": items, "stream": True, **more}
        answer = await http.post(url(mesh, "/v1/responses"), json=body, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    return [json.loads(event.partition("data: ")[2]) for event in answer.text.strip().split("\n\n")]


async def test_functions_of_a_namespace_are_called_by_its_name_and_their_own(thinking: Mesh, says: Say) -> None:
    says(thinking, f"Hm.</think>{CALL}")
    events = await codex(thinking, ASKED)
    prompt = prompt_of(thinking)
    assert all(f'"name": "{name}"' in prompt for name in ("exec_command", "mcp__maps__weather", "mcp__maps__route"))
    assert prompt.count("A server of maps.") == 1 and "A server of maps.\\n\\nTells the weather." in prompt
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"] and [item["type"] for item in done] == ["reasoning", "function_call"]
    call = done[-1]
    assert (call["namespace"], call["name"], json.loads(call["arguments"])) == ("mcp__maps", "weather", {"city": "Lyon"})
    (ended,) = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert ended["name"] == "weather"

    says(thinking, "So.</think>It is sunny.")
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "Sunny."}
    last = (await codex(thinking, [*ASKED, *done, output]))[-1]["response"]
    assert f"<{call['call_id']} mcp__maps__weather Lyon>(Hm.)" in prompt_of(thinking)
    assert last["output"][-1]["content"][0]["text"] == "It is sunny." and last["prompt_cache_key"] == "thread-1"


async def test_a_response_repeats_its_namespaces_and_says_what_was_left_out(thinking: Mesh, says: Say) -> None:
    says(thinking, "Hm.</think>Yes.")
    (*_, last) = await codex(thinking, ASKED)
    assert last["response"]["tools"] == [SHELL, MAPS]
    assert last["response"]["warnings"] == ["tools[2]: 'web_search' is not run here and was left out"]
    assert "web_search" not in prompt_of(thinking)


@pytest.mark.parametrize("is_allowed", [False, True])
async def test_a_function_of_a_namespace_can_be_chosen(thinking: Mesh, says: Say, is_allowed: bool) -> None:
    says(thinking, f"Hm.</think>{CALL}")
    named = {"type": "function", "namespace": "mcp__maps", "name": "weather"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [named]} if is_allowed else named
    (*_, last) = await codex(thinking, ASKED, tool_choice=choice)
    grammar = thinking["d0"].submits[-1].request.sampling.constraint.grammar
    assert "mcp__maps__weather" in grammar and "mcp__maps__route" not in grammar and "exec_command" not in grammar
    assert last["response"]["tool_choice"] == choice


async def test_a_plain_function_has_no_namespace(thinking: Mesh, says: Say) -> None:
    says(thinking, f"Hm.</think>{CALL.replace('mcp__maps__weather', 'exec_command')}")
    (*_, last) = await codex(thinking, ASKED)
    call = last["response"]["output"][-1]
    assert call["name"] == "exec_command" and "namespace" not in call


async def test_ai_of_npm_refers_to_messages_of_earlier_turns_unless_nothing_is_stored(thinking: Mesh, says: Say) -> None:
    """Its provider sends calls whole and text by reference, also to a router that keeps nothing: the error says what helps."""
    says(thinking, "So.</think>It is sunny.")
    call = {"type": "function_call", "call_id": "call_1", "name": "exec_command", "arguments": '{"city":"Lyon"}'}
    turn: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        call,
        {"type": "function_call_output", "call_id": "call_1", "output": "Sunny."},
    ]
    again = {"role": "user", "content": [{"type": "input_text", "text": "And in Rome?"}]}
    said = {"role": "assistant", "id": "msg_1", "content": [{"type": "output_text", "text": "Sunny."}]}
    asked = {"model": "tiny", "tools": [SHELL], "tool_choice": "auto", "max_output_tokens": 50}
    async with httpx.AsyncClient(base_url=url(thinking)) as http:
        for items in (turn, [*turn, said, again]):
            answer = await http.post("/v1/responses", json={**asked, "input": items, "store": False})
            assert answer.json()["output"][-1]["content"][0]["text"] == "It is sunny."
        kept = [*turn, {"type": "item_reference", "id": "msg_1"}, again]
        refused = await http.post("/v1/responses", json={**asked, "input": kept})
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"] == "input[3].id"
    assert "store: false" in error["message"] and "--http-keep-responses-s" in error["message"]
