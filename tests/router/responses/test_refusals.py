"""Requests that are refused: by name, before any worker sees them; and errors after the beginning of a stream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest

from tests.router.mesh import Mesh, running_mesh
from tests.router.responses.conftest import client_of, url
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
USER: dict[str, Any] = {"role": "user", "content": "a"}
FUNCTION: dict[str, Any] = {"type": "function", "name": "f"}
GROUP: dict[str, Any] = {"type": "namespace", "name": "g", "description": "", "tools": [FUNCTION]}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [5]}, "input[0]"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{**USER, "name": "x"}]}, "input[0].name"),
    ({"input": [USER, {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[1].content[0].type"),
    ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input[0].type"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]}, "input[0].arguments"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "custom", "name": "apply_patch", "format": {"type": "text"}}]}, "tools[0].type"),
    ({"tools": [{**GROUP, "name": ""}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "g__f"}, GROUP]}, "tools[1].tools[0].name"),
    ({"tools": [{**GROUP, "tools": [{"type": "custom", "name": "f"}]}]}, "tools[0].tools[0].type"),
    ({"tools": [{**GROUP, "tools": [{**FUNCTION, "parameters": {"type": "array"}}]}]}, "tools[0].tools[0].parameters"),
    ({"tools": [{**GROUP, "tools": []}, {"type": "web_search"}]}, "tools[1].type"),
    ({"tools": [FUNCTION, {"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "array"}}]}, "tools[0].parameters"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}}}, "text.format.schema"),
    ({"text": {"verbosity": "loud"}}, "text.verbosity"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 100_000}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"include": ["everything"]}, "include[0]"),
    ({"truncation": "auto"}, "truncation"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"metadata": {"a": "b" * 513}}, "metadata"),
    ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
    ({"messages": [USER]}, "messages"),
    ({"user": "\ud800"}, "user"),
]


@pytest.mark.parametrize(("asked", "param"), REFUSED)
async def test_a_wrong_field_is_named(served: Mesh, asked: dict[str, Any], param: str) -> None:
    num_before = len(served["d0"].submits)
    body = json.dumps({"model": "tiny", "input": "a", **asked})  # the package itself cannot encode some of them
    async with httpx.AsyncClient() as http:
        answer = await http.post(url(served, "/v1/responses"), content=body, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and error["type"] == "invalid_request_error"
    assert error["message"].startswith((f"{param}: ", "This model's maximum context length"))
    assert len(served["d0"].submits) == num_before


async def test_what_changes_nothing_is_accepted(client: Any) -> None:
    await client.responses.create(
        model="tiny",
        input="a",
        store=True,
        background=False,
        service_tier="auto",
        truncation="disabled",
        metadata={},
        prompt_cache_retention="24h",
        include=["web_search_call.results"],
        reasoning={"summary": "auto", "effort": "low"},
        max_output_tokens=1,
        extra_body={"conversation": None, "prompt": None, "tools": None, "tool_choice": None, "text": None, "metadata": None},
    )


async def test_nothing_is_kept_unless_it_is_asked_for(client: Any) -> None:
    found = await client.responses.create(model="tiny", input="a", store=True, max_output_tokens=1)
    assert found.model_extra["store"] is False
    for call in (client.responses.retrieve(found.id), client.responses.delete(found.id)):
        with pytest.raises(openai.NotFoundError, match="http-keep-responses"):
            await call
    with pytest.raises(openai.BadRequestError, match="http-keep-responses"):
        await client.responses.create(model="tiny", input="a", previous_response_id=found.id)


async def test_an_unknown_model(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        await client.responses.create(model="huge", input="a")
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


async def test_an_error_within_a_stream_is_events(model_folder: Path) -> None:
    async with running_mesh(model_folder, http_port=0, max_resubmissions=0) as mesh, client_of(mesh) as client:
        mesh["d0"].pause_at = 5
        stream = await client.responses.create(model="tiny", input="a", max_output_tokens=20, stream=True)
        events: list[Any] = []
        async for event in stream:
            events.append(event)
            if event.type == "response.output_text.delta" and mesh["d0"].held:
                await eventually(lambda: any(held.is_paused for held in mesh["d0"].held.values()))
                for request_id in list(mesh["d0"].held):
                    mesh["d0"].fail(request_id, grpc.StatusCode.INTERNAL)
        failed = events[-1].response
        assert [event.type for event in events[-2:]] == ["error", "response.failed"]
        assert events[-2].message == failed.error.message and failed.error.code == "server_error" and failed.status == "failed"
        assert (
            failed.output[0].status == "incomplete"
            and failed.output_text
            and failed.output_text == "".join(event.delta for event in events if event.type == "response.output_text.delta")
        )
        assert [event.sequence_number for event in events] == list(range(len(events)))
