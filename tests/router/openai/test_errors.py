"""What is wrong is said as OpenAI says it: status, field, type, code; no worker hears of it."""

from __future__ import annotations

import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.router.mesh import PROMPT, Mesh, running_mesh
from tests.router.openai.conftest import client_of, url
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
HELLO = [{"role": "user", "content": "hello"}]
TEXT = {"model": "tiny", "prompt": "abc", "max_tokens": 2}
CHAT = {"model": "tiny", "messages": HELLO, "max_tokens": 2}
OVERFLOW = "This model's maximum context length is"

WRONG_TEXT: list[tuple[dict[str, object], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": ["a", 3]}, "prompt[1]"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": [1, 400]}, "prompt[1]"),
    ({"prompt": [[1], [1, 400]]}, "prompt[1][1]"),
    ({"prompt": [1, 2**32]}, "prompt[1]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": "a\ud800"}, "prompt"),
    ({"prompt": [70] * 2048}, "prompt"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"model": 3}, "model"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"max_tokens": 2100}, "max_tokens"),
    ({"max_tokens": 10**40}, "max_tokens"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"n": 17}, "n"),
    ({"n": 4_000_000_000}, "n"),
    ({"stop": ["x"] * 100_000}, "stop"),
    ({"n": 0}, "n"),
    ({"best_of": 0}, "best_of"),
    ({"best_of": 17}, "best_of"),
    ({"n": 2, "best_of": 1}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"echo": True, "suffix": "a"}, "echo"),
    ({"stop": 3}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a", None]}, "stop[1]"),
    ({"stop_token_ids": [3, 500]}, "stop_token_ids[1]"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"seed": 2**64}, "seed"),
    ({"stream": "yes"}, "stream"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
    ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
    ({"suffix": "end"}, "suffix"),
    ({"logit_bias": {"50": -101}}, "logit_bias.50"),
    ({"logit_bias": {"50": "1"}}, "logit_bias.50"),
    ({"logit_bias": {"a": 1}}, "logit_bias.a"),
    ({"logit_bias": {"05": 1}}, "logit_bias.05"),
    ({"logit_bias": {str(2**32): 1}}, f"logit_bias.{2**32}"),
    ({"logit_bias": {"400": 1}}, "logit_bias"),
    ({"logit_bias": [[50, 1]]}, "logit_bias"),
    ({"logit_bias": {str(number): 1 for number in range(1025)}}, "logit_bias"),
    ({"max_token": 3}, "max_token"),
    ({"guided_regex": 3}, "guided_regex"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_choice": ["a", 1]}, "guided_choice[1]"),
    ({"structured_outputs": {"json": [1]}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {"const": 2**63}}}, "structured_outputs.json"),
    ({"guided_json": '{"type": "integer", "minimum": -9223372036854775808}'}, "guided_json"),
]
TOOL = {"type": "function", "function": {"name": "weather"}}
STRICT = {"type": "function", "function": {"name": "a", "strict": True, "parameters": {"properties": {"b": {"type": "none"}}}}}
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
WRONG_CHAT: list[tuple[dict[str, object], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [3]}, "messages[0]"),
    ({"messages": [{"content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "function", "content": "a", "name": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
    ({"messages": [*HELLO, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL | {"type": "custom"}]}]}, "messages[0].tool_calls[0].type"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages[0].tool_calls[0].function.name"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[1]"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": "a" * 3000}]}, "messages"),
    ({"tools": 3}, "tools"),
    ({"tools": [3]}, "tools[0]"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
    ({"tools": [{"function": {"description": "a"}}]}, "tools[0].function.name"),
    ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
    ({"tools": [{"function": {"name": "a", "parameters": []}}]}, "tools[0].function.parameters"),
    ({"tools": [{"function": {"name": "a", "parameters": {"type": "string"}}}]}, "tools[0].function.parameters"),
    ({"tools": [{"function": {"name": "a", "parameters": {"properties": 3}}}]}, "tools[0].function.parameters.properties"),
    ({"tools": [{"function": {"name": "a", "parameters": {"required": 3}}}]}, "tools[0].function.parameters.required"),
    ({"tools": [TOOL, STRICT]}, "tools[1].function.parameters"),
    ({"tools": [{"function": {"name": "a", "other": 1}}]}, "tools[0].function.other"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "x"}}},
        "tool_choice.allowed_tools.mode",
    ),
    ({"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
    ({"tools": [TOOL], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"chat_template_kwargs": 3}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"enable_thinking": 3}, "enable_thinking"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"reasoning_effort": 3}, "reasoning_effort"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 2}, "logprobs"),
    ({"max_completion_tokens": 2100}, "max_completion_tokens"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, "response_format.json_schema.schema"),
]
WRONG_NAMES = sorted({name for wrong, _ in (*WRONG_TEXT, *WRONG_CHAT) for name in wrong})


@pytest.mark.parametrize(("path", "base", "cases"), [("completions", TEXT, WRONG_TEXT), ("chat/completions", CHAT, WRONG_CHAT)])
@pytest.mark.parametrize("stream", [False, True])
async def test_every_field_is_named(
    served: Mesh, path: str, base: dict[str, object], cases: list[tuple[dict[str, object], str]], stream: bool
) -> None:
    submits, before = served["d0"].submits, len(served["d0"].submits)
    async with httpx.AsyncClient() as http:
        for wrong, param in cases:
            content = json.dumps({**base, "stream": stream, **wrong})
            response = await http.post(url(served, f"/v1/{path}"), content=content, headers={"content-type": "application/json"})
            error = response.json()["error"]
            assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), (wrong, error)
            assert error["message"].startswith(OVERFLOW if error["code"] else f"{param}: ")
            # Of several prompts a good one may be on its way before a bad one is found; it is cancelled then.
            assert len(submits) == before or param.startswith("prompt[1]")
            before = len(submits)
    await served.until_whole()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "wrong", "param", "words"),
    [
        ("completions", {"prompt": [70] * 3000}, "prompt", "3002 tokens (3000 in the prompt, 2 in the completion)"),
        ("completions", {"max_tokens": 2100}, "max_tokens", "2103 tokens (3 in the prompt, 2100 in the completion)"),
        ("completions", {"prompt": ["a", [70] * 3000]}, "prompt[1]", "3002 tokens (3000 in the prompt, 2 in the completion)"),
        ("completions", {"prompt": "é" * 40_000}, "prompt", "at least "),
        (
            "chat/completions",
            {"max_completion_tokens": 2100},
            "max_completion_tokens",
            " in the messages, 2100 in the completion)",
        ),
        ("chat/completions", {"messages": [{"role": "user", "content": "a" * 3000}]}, "messages", " in the messages, 2 in"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a" * 60_000}]}, "messages", "at least "),
    ],
)
async def test_what_exceeds_the_context_is_said_as_clients_know_it(
    served: Mesh, path: str, wrong: dict[str, object], param: str, words: str, stream: bool
) -> None:
    base = TEXT if path == "completions" else CHAT
    async with httpx.AsyncClient() as http:
        response = await http.post(url(served, f"/v1/{path}"), json={**base, "stream": stream, **wrong})
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith(f"{OVERFLOW} 2048 tokens. However, you requested ") and words in error["message"]
    assert error["message"].endswith(f"reduce the length of the {'prompt' if base is TEXT else 'messages'} or completion.")
    await served.until_whole()


async def test_text_beyond_what_the_router_takes_is_too_long_as_well(model_folder: Path) -> None:
    async with running_mesh(model_folder, http_port=0, max_prompt_bytes=100) as mesh, httpx.AsyncClient() as http:
        for path, body, param in (
            ("completions", {**TEXT, "prompt": "a" * 101}, "prompt"),
            ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": "a" * 101}]}, "messages"),
        ):
            error = (await http.post(url(mesh, f"/v1/{path}"), json=body)).json()["error"]
            assert (error["code"], error["param"]) == ("context_length_exceeded", param)
            assert "max_prompt_bytes" in error["message"]


VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 3, 10**30, 0.5, -0.0, 1e308, "", "a", "\x00é\ud83d\ude00", "\ud800", [], [1], ["a"], [[1]],
    [None], {}, {"a": 1},
    {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {}}}, {"include_usage": True}, {"choice": ["a"]},
    [{"role": "user", "content": "a"}], [{"role": "a", "content": []}],
    [{"role": "user", "content": [{"type": "text", "text": ""}]}],
]  # fmt: skip


@pytest.mark.parametrize(("path", "base"), [("completions", TEXT), ("chat/completions", CHAT)])
async def test_strange_values_are_answered_or_named_and_never_a_bug(served: Mesh, path: str, base: dict[str, object]) -> None:
    draw = random.Random(path)
    names = [*WRONG_NAMES, *base]
    async with httpx.AsyncClient() as http:
        for _ in range(100):
            body = {**base, **{draw.choice(names): draw.choice(VALUES) for _ in range(draw.randint(1, 3))}}
            sent = json.dumps({**body, "max_tokens": 2})
            response = await http.post(url(served, f"/v1/{path}"), content=sent, headers={"content-type": "application/json"})
            assert response.status_code in (200, 400, 404), (body, response.text)
            if response.status_code != 200:
                assert response.json()["error"]["param"], (body, response.text)
    await served.until_whole()


async def test_fields_that_ask_for_nothing_are_taken(served: Mesh) -> None:
    nothing: dict[str, Any] = {
        "user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "tools": [], "tool_choice": "auto",
        "modalities": ["text"], "logit_bias": {}, "audio": None, "functions": None, "response_format": {"type": "text"},
        "parallel_tool_calls": True, "prediction": {"type": "content", "content": "x"}, "verbosity": "medium",
    }  # fmt: skip
    async with httpx.AsyncClient() as http:
        response = await http.post(url(served, "/v1/chat/completions"), json={**CHAT, **nothing})
        assert response.status_code == 200
        response = await http.post(url(served, "/v1/completions"), json={**TEXT, "suffix": None, "best_of": 1, "logit_bias": {}})
        assert response.status_code == 200


@pytest.mark.parametrize(
    ("content", "kind", "status", "words"),
    [
        (b"{", "application/json", 400, "line 1"),
        (b"", "application/json", 400, "not JSON"),
        (b"[1]", "application/json", 400, "JSON object"),
        (b'{"model": "\xff"}', "application/json", 400, "UTF-8"),
        (b"[" * 100_000, "application/json", 400, "deeply"),
        (b'{"temperature": NaN}', "application/json", 400, "NaN"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "application/json", 400, "many digits"),
        (b"{}", "text/plain", 415, "application/json"),
        (b"{}", "application/x-www-form-urlencoded", 415, "application/json"),
        (b'{"prompt": "' + b"a" * (1 << 20) + b'"}', "application/json", 413, "http_max_body_bytes"),
    ],
    ids=["cut", "empty", "array", "latin", "deep", "nan", "digits", "text", "form", "large"],
)
async def test_bodies_that_cannot_be_read(limited: Mesh, content: bytes, kind: str, status: int, words: str) -> None:
    async with httpx.AsyncClient(headers={"authorization": "bearer key-1"}) as http:
        for chunked in (False, True):
            sent = _in_pieces(content) if chunked else content
            response = await http.post(url(limited, "/v1/completions"), content=sent, headers={"content-type": kind})
            assert response.status_code == status
            assert words in response.json()["error"]["message"]
        response = await http.post(url(limited, "/v1/completions"), content=b"{}", headers={"content-encoding": "gzip"})
        assert response.status_code == 415


async def _in_pieces(content: bytes) -> Any:
    for start in range(0, max(1, len(content)), 65536):
        yield content[start : start + 65536]


async def test_paths_and_methods(limited: Mesh) -> None:
    async with httpx.AsyncClient() as http:
        missing = await http.get(url(limited, "/v1/images/generations"))
        assert missing.status_code == 404 and "/v1/chat/completions" in missing.json()["error"]["message"]
        wrong = await http.get(url(limited, "/v1/completions"))
        assert wrong.status_code == 405 and wrong.headers["allow"] == "POST" and wrong.json()["error"]["type"]


async def test_headers_are_checked(limited: Mesh) -> None:
    wrong = {
        "X-Tenant": "t" * 200,
        "X-Priority": "high",
        "x-pdmesh-slo-ttft-ms": "soon",
        "X-Request-Timeout-Ms": "1s",
        "X-Prefill-Mode": "x",
    }
    async with httpx.AsyncClient(headers={"authorization": "Bearer key-2"}) as http:
        for name, value in (*wrong.items(), ("X-Request-Timeout-Ms", "1s"), ("X-Request-Timeout-Ms", "0")):
            response = await http.post(url(limited, "/v1/completions"), json=TEXT, headers={name: value})
            assert (response.status_code, response.json()["error"]["param"]) == (400, name)


async def test_keys(limited: Mesh) -> None:
    for key in ("key-1", "key-2"):
        async with client_of(limited, api_key=key) as client:
            assert (await client.completions.create(model="tiny", prompt="abc", max_tokens=2)).choices
            assert [model.id async for model in client.models.list()] == ["tiny"]
    async with client_of(limited, api_key="key-3") as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            await client.completions.create(model="tiny", prompt="abc")
        assert (refused.value.code, refused.value.type) == ("invalid_api_key", "authentication_error")
        assert refused.value.response.headers["www-authenticate"] == "Bearer"
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
    async with httpx.AsyncClient() as http:
        assert (await http.post(url(limited, "/v1/completions"), json=TEXT)).status_code == 401
        assert (await http.get(url(limited, "/health/live"))).status_code == 200  # probes have no key


async def test_a_key_belongs_to_its_tenant(limited: Mesh) -> None:
    async with httpx.AsyncClient(headers={"authorization": "Bearer key-1"}) as http:
        mine = await http.post(url(limited, "/v1/completions"), json=TEXT, headers={"X-Tenant": "tenant-1"})
        assert mine.status_code == 200
        other = await http.post(url(limited, "/v1/completions"), json=TEXT, headers={"X-Tenant": "tenant-2"})
        assert (other.status_code, other.json()["error"]["param"]) == (403, "X-Tenant")


async def test_an_unknown_model(served: Mesh, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.completions.create(model="gpt-5", prompt="abc", stream=True)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")


async def test_overload_is_429_with_a_delay(model_folder: Path) -> None:
    async with running_mesh(model_folder, http_port=0, max_inflight=1, max_queued=0) as mesh, client_of(mesh) as client:
        mesh["d0"].pause_at = 3
        running = await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=9, stream=True)
        with pytest.raises(openai.RateLimitError) as refused:
            await client.completions.create(model="tiny", prompt=PROMPT, stream=True)
        assert refused.value.code == "rate_limit_exceeded" and "max_inflight" in refused.value.message
        assert int(refused.value.response.headers["retry-after"]) >= 1
        async with client_of(mesh, max_retries=3) as patient:
            mesh["d0"].resume.set()
            assert (await patient.completions.create(model="tiny", prompt=PROMPT, max_tokens=2)).choices
        assert len([chunk async for chunk in running])
        await mesh.until_whole()


async def test_the_deadline_of_a_header(model_folder: Path) -> None:
    async with running_mesh(model_folder, http_port=0) as mesh, client_of(mesh, max_retries=2) as client:
        mesh["d0"].pause_at = 3
        with pytest.raises(openai.InternalServerError) as late:
            await client.completions.create(
                model="tiny", prompt=PROMPT, max_tokens=9, extra_headers={"X-Request-Timeout-Ms": "300"}
            )
        assert late.value.status_code == 504 and late.value.code == "deadline_exceeded"
        assert len(mesh["d0"].submits) == 1  # openai has not tried again by itself
        stream = await client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=9, stream=True, extra_headers={"X-Request-Timeout-Ms": "300"}
        )
        with pytest.raises(openai.APIError) as broken:
            assert [chunk async for chunk in stream]
        assert broken.value.code == "deadline_exceeded"
        await mesh.until_whole()


async def test_no_worker_is_503(model_folder: Path) -> None:
    async with running_mesh(model_folder, http_port=0, place_timeout_s=0.1) as mesh, client_of(mesh) as client:
        await mesh["d0"].kill()
        await eventually(lambda: not mesh.router.core.fleet.ready())
        with pytest.raises(openai.InternalServerError) as refused:
            await client.completions.create(model="tiny", prompt=PROMPT)
        assert refused.value.status_code == 503 and refused.value.code == "service_unavailable"
        async with httpx.AsyncClient() as http:
            assert (await http.get(url(mesh, "/health"))).status_code == 503
            assert (await http.get(url(mesh, "/health/ready"))).status_code == 503
            assert (await http.get(url(mesh, "/health/live"))).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/nowhere", None, 404),
        ("GET", "/v1/completions", None, 405),
        ("POST", "/v1/completions", b"{", 400),
        ("POST", "/v1/completions", b'{"model": "gpt-5", "prompt": "a"}', 404),
        ("POST", "/v1/completions", b'{"model": "tiny", "prompt": "a", "temperature": -1, "stream": true}', 400),
        ("POST", "/v1/completions", b'{"model": "tiny", "prompt": "abc", "max_tokens": 2}', 200),
        ("POST", "/v1/completions", b'{"model": "tiny", "prompt": "abc", "max_tokens": 2, "stream": true}', 200),
        ("GET", "/v1/models", None, 200),
        ("GET", "/health/live", None, 200),
    ],
)
async def test_every_answer_names_its_request(served: Mesh, method: str, path: str, body: bytes | None, status: int) -> None:
    async with httpx.AsyncClient(headers={"content-type": "application/json"}) as http:
        for given in ("mine-7", "", "a b", "x" * 65):
            answer = await http.request(method, url(served, path), content=body, headers={"X-Request-Id": given} if given else {})
            [shown] = answer.headers.get_list("x-request-id")
            assert shown == given if given == "mine-7" else re.fullmatch("[0-9a-f]{24}", shown)
            assert answer.status_code == status
            if answer.status_code >= 400:
                assert list(answer.json()) == ["error"]
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_no_key_and_no_http_have_an_id_too(limited: Mesh) -> None:
    async with httpx.AsyncClient() as http:
        answer = await http.get(url(limited, "/v1/models"), headers={"X-Request-Id": "mine"})
        assert (answer.status_code, answer.headers["x-request-id"]) == (401, "mine")
    assert limited.router.http is not None
    host, port = limited.router.http.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"what is this\r\n\r\n")
    head, _, body = (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n\r\n")
    writer.close()
    assert head.startswith(b"HTTP/1.1 400 ") and b"x-request-id: " in head.lower()
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
