"""What is wrong is said as Anthropic says it: status, type, words; no worker hears of it."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from pdmesh.runtime.errors import MeshError, ResourceExhausted
from router.api.anthropic.errors import told
from router.api.http.errors import HttpError
from tests.router.anthropic.conftest import client_of, url
from tests.router.mesh import Mesh, running_mesh
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
HELLO: Any = [{"role": "user", "content": "hello"}]
BODY: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 2}
TOOL: dict[str, Any] = {"name": "weather", "input_schema": {"type": "object"}}
USE: dict[str, Any] = {"type": "tool_use", "id": "c", "name": "weather", "input": {}}
THOUGHT: dict[str, Any] = {"type": "thinking", "thinking": "a", "signature": ""}
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "c", "content": "Sunny."}
IMAGE: dict[str, Any] = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


def said(content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [3]}, "messages[0]"),
    ({"messages": [{"content": "a"}]}, "messages[0].role"),
    (said("a", "tool"), "messages[0].role"),
    (said(None), "messages[0].content"),
    (said(3), "messages[0].content"),
    (said([]), "messages"),
    (said(["a"]), "messages[0].content[0]"),
    (said([{}]), "messages[0].content[0].type"),
    (said([{"type": "text"}]), "messages[0].content[0].text"),
    (said([{"type": "text", "text": "a", "other": 1}]), "messages[0].content[0].other"),
    (said([{"type": "text", "text": "\ud800"}]), "messages[0].content[0].text"),
    (said([IMAGE]), "messages[0].content[0].type"),
    (said([{"type": "document", "source": {}}]), "messages[0].content[0].type"),
    (said([{"type": "server_tool_use", "id": "x", "name": "web_search", "input": {}}]), "messages[0].content[0].type"),
    (said([USE]), "messages[0].content[0].type"),
    (said([THOUGHT]), "messages[0].content[0].type"),
    (said([{**RESULT, "content": [IMAGE]}]), "messages[0].content[0].content[0].type"),
    (said([{**RESULT, "is_error": "yes"}]), "messages[0].content[0].is_error"),
    (said([{**RESULT, "tool_use_id": ""}]), "messages[0].content[0].tool_use_id"),
    ({"messages": [{"role": "assistant", "content": [RESULT]}, *HELLO]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "assistant", "content": [{**USE, "name": ""}]}, *HELLO]}, "messages[0].content[0].name"),
    ({"messages": [{"role": "assistant", "content": [{**USE, "input": "{}"}]}, *HELLO]}, "messages[0].content[0].input"),
    (
        {"messages": [{"role": "assistant", "content": [{**USE, "input": {"a": "\ud800"}}]}, *HELLO]},
        "messages[0].content[0].input",
    ),
    (
        {"messages": [*HELLO, {"role": "assistant", "content": [{**THOUGHT, "cache_control": {"type": "ephemeral"}}]}]},
        "messages[1].content[0].cache_control",
    ),
    ({"messages": [*HELLO, {"role": "assistant", "content": ""}]}, "messages[1].content"),
    ({"messages": [*HELLO, {"role": "assistant", "content": [USE]}]}, "messages[1].content"),
    ({"messages": [*HELLO, {"role": "assistant", "content": []}]}, "messages[1].content"),
    ({"system": 3}, "system"),
    ({"system": [IMAGE]}, "system[0].type"),
    ({"model": 3}, "model"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"max_tokens": 10**40}, "max_tokens"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"seed": 2**64}, "seed"),
    ({"stop_sequences": "a"}, "stop_sequences"),
    ({"stop_sequences": ["a", ""]}, "stop_sequences[1]"),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
    ({"stream": "yes"}, "stream"),
    ({"tools": 3}, "tools"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tools": [TOOL | {"input_schema": {"type": "string"}}]}, "tools[0].input_schema"),
    ({"tools": [TOOL | {"input_schema": {"properties": 3}}]}, "tools[0].input_schema.properties"),
    ({"tools": [TOOL | {"strict": True, "input_schema": {"properties": {"b": {"type": "none"}}}}]}, "tools[0].input_schema"),
    ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 3}]}, "tools[0].type"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": {"type": "required"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "fly"}}, "tool_choice"),
    ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    ({"output_config": {"effort": "some"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "none"}}}}, "output_config.format.schema"),
    ({"output_format": {"type": "xml", "schema": {}}}, "output_format.type"),
    ({"mcp_servers": [{"type": "url", "url": "x", "name": "y"}]}, "mcp_servers"),
    ({"container": "x"}, "container"),
    ({"thread": {"type": "create"}}, "thread"),
    ({"max_token": 3}, "max_token"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_every_field_is_named(served: Mesh, stream: bool) -> None:
    before = len(served["d0"].submits)
    async with httpx.AsyncClient() as http:
        for wrong, param in WRONG:
            content = json.dumps({**BODY, "stream": stream, **wrong})
            response = await http.post(url(served, "/v1/messages"), content=content, headers={"content-type": "application/json"})
            body = response.json()
            assert (response.status_code, body["type"]) == (400, "error"), (wrong, body)
            assert body["error"]["type"] == "invalid_request_error"
            assert body["error"]["message"].startswith(f"{param}: "), (wrong, body)
            assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    assert len(served["d0"].submits) == before


async def test_a_count_names_fields_as_well(served: Mesh, client: Any) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\].type: 'image' is not supported"):
        await client.messages.count_tokens(model="tiny", messages=[{"role": "user", "content": [IMAGE]}])
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\].input_schema"):
        await client.messages.count_tokens(model="tiny", messages=HELLO, tools=[TOOL | {"input_schema": {"type": "string"}}])
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.count_tokens(model="claude", messages=HELLO)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("size", "words"), [(3000, "prompt is too long: 3038 tokens > 2047 maximum"), (60_000, "at least")])
async def test_a_prompt_beyond_the_context(client: Any, size: int, words: str, stream: bool) -> None:
    """In the words by which agents know that they have to shorten what they send."""
    with pytest.raises(anthropic.BadRequestError) as refused:
        await client.messages.create(model="tiny", max_tokens=9, messages=said("a" * size)["messages"], stream=stream)
    assert refused.value.type == "invalid_request_error"
    assert str(refused.value.api_message).startswith("prompt is too long: ") and words in str(refused.value.api_message)


async def test_a_prompt_beyond_what_the_router_takes(model_folder: Path) -> None:
    async with running_mesh(model_folder, http_port=0, max_prompt_bytes=100) as mesh, client_of(mesh) as client:
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long: messages: they have 101 bytes"):
            await client.messages.create(model="tiny", max_tokens=9, messages=said("a" * 101)["messages"])


async def test_no_such_model(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError) as refused:
        await client.messages.create(**BODY | {"model": "claude-opus-9"})
    assert refused.value.type == "not_found_error" and "there is tiny" in str(refused.value.api_message)
    with pytest.raises(anthropic.NotFoundError):
        await client.models.retrieve("claude-opus-9")


async def test_a_body_that_is_none(served: Mesh, limited: Mesh) -> None:
    async with httpx.AsyncClient(headers={"content-type": "application/json", "x-api-key": "key-1"}) as http:
        for mesh, content, status, kind in (
            (served, b"{", 400, "invalid_request_error"),
            (served, b"[1]", 400, "invalid_request_error"),
            (limited, b" " * (1 << 17), 413, "request_too_large"),
        ):
            for path in ("/v1/messages", "/v1/messages/count_tokens"):
                answer = await http.post(url(mesh, path), content=content)
                assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
        answer = await http.post(url(served, "/v1/messages"), content=b"{}", headers={"content-type": "text/plain"})
        assert (answer.status_code, answer.json()["type"]) == (415, "error")


async def test_keys(limited: Mesh) -> None:
    asked: Any = {"model": "tiny", "max_tokens": 2, "messages": HELLO}
    async with client_of(limited, api_key="key-1") as client:
        await client.messages.create(**asked)
        assert limited["d0"].submits[-1].request.tenant == "tenant-1"
        assert (await client.messages.count_tokens(model="tiny", messages=HELLO)).input_tokens
        assert [model.id async for model in client.models.list()] == ["tiny"]
        with pytest.raises(anthropic.PermissionDeniedError) as denied:
            await client.messages.create(**asked, extra_headers={"X-Tenant": "tenant-2"})
        assert denied.value.type == "permission_error"
    async with anthropic.AsyncAnthropic(base_url=url(limited), auth_token="key-2", max_retries=0) as client:
        await client.messages.create(**asked, extra_headers={"X-Api-Key": "another's"})
        assert limited["d0"].submits[-1].request.tenant == "tenant-2"
    async with client_of(limited, api_key="wrong") as client:
        for call in (
            client.messages.create(**asked),
            client.messages.count_tokens(model="tiny", messages=HELLO),
            client.models.retrieve("tiny"),
        ):
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await call
            assert refused.value.type == "authentication_error"


def refusals(mesh: Mesh) -> int:
    """How often requests were refused so far."""
    return sum(refused.count for each in mesh.router.frontend.status().admission for refused in each.refused)


async def test_overload_is_529_with_a_delay(model_folder: Path) -> None:
    async with running_mesh(model_folder, http_port=0, max_inflight=1, max_queued=0) as mesh, client_of(mesh) as client:
        mesh["d0"].pause_at = 1
        first = asyncio.create_task(client.messages.create(**BODY | {"max_tokens": 5}))
        await eventually(lambda: mesh["d0"].held)
        with pytest.raises(anthropic.OverloadedError) as refused:
            await client.messages.create(**BODY)
        assert (refused.value.status_code, refused.value.type) == (529, "overloaded_error")
        assert int(refused.value.response.headers["retry-after"]) >= 1
        patient = asyncio.create_task(client.with_options(max_retries=5).messages.create(**BODY))
        await eventually(lambda: refusals(mesh) == 2)
        mesh["d0"].pause_at = None
        mesh["d0"].resume.set()
        assert (await first).stop_reason == (await patient).stop_reason == "max_tokens"  # the client has tried again by itself
        await mesh.until_whole()


async def test_the_callers_own_limit_is_429_and_what_never_fits_is_final() -> None:
    own = told(ResourceExhausted("too fast", retry_delay_s=2.5, reason="rate"), "id")
    assert (own.status, own.headers["retry-after"], own.headers["retry-after-ms"]) == (429, "3", "2500")
    never = told(ResourceExhausted("too large for every worker"), "id")
    assert (never.status, never.headers["x-should-retry"]) == (429, "false") and "retry-after" not in never.headers
    assert never.body["error"] == {"type": "rate_limit_error", "message": "too large for every worker"}
    bug = told(MeshError("internal error 1234"), "id")
    assert bug.status == 500 and bug.body == {
        "type": "error", "error": {"type": "api_error", "message": "internal error 1234"}, "request_id": "id",
    }  # fmt: skip
    assert told(HttpError(405, "no"), "id").body["error"] == {"type": "invalid_request_error", "message": "no"}


async def test_the_deadline(model_folder: Path) -> None:
    async with running_mesh(model_folder, http_port=0) as mesh, client_of(mesh, max_retries=2) as client:
        mesh["d0"].pause_at = 2
        asked: Any = {**BODY, "max_tokens": 9, "extra_headers": {"X-Request-Timeout-Ms": "300"}}
        with pytest.raises(anthropic.GatewayTimeoutError) as late:
            await client.messages.create(**asked)
        assert late.value.type == "timeout_error" and len(mesh["d0"].submits) == 1
        with pytest.raises(anthropic.APIStatusError) as broken:
            async with client.messages.stream(**asked) as stream:
                assert await stream.get_final_message()
        assert broken.value.type == "timeout_error"
        await mesh.until_whole()


async def test_an_error_after_the_beginning_is_an_event(model_folder: Path) -> None:
    async with running_mesh(model_folder, http_port=0) as mesh, httpx.AsyncClient() as http:
        mesh["d0"].pause_at = 2
        headers = {"X-Request-Timeout-Ms": "300"}
        answer = await http.post(url(mesh, "/v1/messages"), json={**BODY, "max_tokens": 9, "stream": True}, headers=headers)
        *_, last, end = answer.text.split("\n\n")
        kind, data = last.split("\n")
        assert (answer.status_code, kind, end) == (200, "event: error", "") and "message_stop" not in answer.text
        body = json.loads(data.removeprefix("data: "))
        assert (body["type"], body["error"]["type"], body["request_id"]) == (
            "error", "timeout_error", answer.headers["request-id"],
        )  # fmt: skip


async def test_no_worker_is_503(model_folder: Path) -> None:
    async with running_mesh(model_folder, http_port=0, place_timeout_s=0.1) as mesh, client_of(mesh) as client:
        await mesh["d0"].kill()
        await eventually(lambda: not mesh.router.core.fleet.ready())
        with pytest.raises(anthropic.ServiceUnavailableError) as refused:
            await client.messages.create(**BODY)
        assert refused.value.type == "overloaded_error"


VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 3, 10**30, 0.5, -0.0, 1e308, "", "a", "\x00é\ud83d\ude00", "\ud800", [], [1], ["a"], [[1]],
    [None], {}, {"a": 1}, HELLO, [{"role": "assistant", "content": "a"}], [USE], [RESULT], [{"type": "text", "text": ""}],
    [{"role": "user", "content": [RESULT, {"type": "text", "text": "a"}]}], [{"role": "system", "content": "a"}],
    [TOOL], {"type": "tool", "name": "weather"}, {"type": "any"}, {"type": "none"}, {"type": "adaptive"},
    {"type": "enabled", "budget_tokens": 5}, {"type": "json_schema", "schema": {"type": "object"}}, {"effort": "max"},
]  # fmt: skip


async def test_strange_values_are_answered_or_named_and_never_a_bug(served: Mesh) -> None:
    draw = random.Random("messages")
    names = [*sorted({name for wrong, _ in WRONG for name in wrong}), "metadata", "service_tier"]
    async with httpx.AsyncClient() as http:
        for _ in range(300):
            wrong = {draw.choice(names): draw.choice(VALUES) for _ in range(draw.randint(1, 3))}
            sent = json.dumps({**BODY, **wrong, "max_tokens": 2})
            headers = {"content-type": "application/json"}
            response = await http.post(url(served, "/v1/messages"), content=sent, headers=headers)
            assert response.status_code in (200, 400, 404), (wrong, response.text)
            if response.status_code != 200 or wrong.get("stream") is True:
                continue
            counted = {name: value for name, value in {**BODY, **wrong}.items() if name not in _NOT_OF_PROMPTS}
            count = await http.post(url(served, "/v1/messages/count_tokens"), content=json.dumps(counted), headers=headers)
            usage = response.json()["usage"]
            assert count.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}, (wrong, count.text)
    await served.until_whole()


_NOT_OF_PROMPTS = {
    "max_tokens", "stop_sequences", "temperature", "top_p", "top_k", "seed", "stream", "metadata", "service_tier", "container",
    "thread", "max_token",
}  # fmt: skip
