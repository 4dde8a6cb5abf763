"""What the real `anthropic` client makes of our messages: prompts as templates get them, answers, streams, tools, counts."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import httpx
import pydantic
import pytest

from pdmesh.v1 import common_pb2
from router.api.http import connection
from tests.router.anthropic.conftest import both, sampling_of, url
from tests.router.mesh import Mesh
from tests.router.stub_texts import Say, prompt_of
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
HELLO: Any = [{"role": "user", "content": "hello"}]
WEATHER: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"name": "weather", "description": "Tells the weather.", "input_schema": WEATHER},
    {"name": "stop", "input_schema": {"type": "object"}},
]
ASKED: Any = {"model": "tiny", "messages": HELLO, "extra_body": {"seed": 5}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Lyon"}}\n</tool_call>'
NO_THOUGHTS = "[assistant] <think>\n\n</think>\n\n"


async def test_text(served: Mesh, client: Any, says: Say) -> None:
    size = says(served, "It is sunny.")
    message = await both(client, **ASKED, max_tokens=size)
    assert [block.text for block in message.content] == ["It is sunny."]
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.id == f"msg_{message._request_id}" and message.usage.output_tokens == size
    assert prompt_of(served) == f"[user] hello{NO_THOUGHTS}"


async def test_the_helpers_of_streams(served: Mesh, client: Any, says: Say) -> None:
    size = says(served, f"Let me see. {CALL}")
    kinds: list[str] = []
    async with client.messages.stream(**ASKED, max_tokens=size, tools=TOOLS) as stream:
        async for event in stream:
            kinds += [event.type] if event.type not in kinds[-1:] else []
    assert [kind for kind in kinds if kind not in ("text", "input_json", "content_block_delta")] == [
        "message_start", "content_block_start", "content_block_stop", "content_block_start", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    size = says(served, "It is sunny.")
    async with client.messages.stream(**ASKED, max_tokens=size) as stream:
        assert "".join([text async for text in stream.text_stream]) == "It is sunny." == await stream.get_final_text()


async def test_the_synchronous_client(served: Mesh, says: Say) -> None:
    asked = {**ASKED, "max_tokens": says(served, "It is sunny.")}

    def ask() -> tuple[str, str, int, list[str]]:
        with anthropic.Anthropic(base_url=url(served), api_key="none", max_retries=0) as client:
            said = client.messages.create(**asked).content[0].text
            with client.messages.stream(**asked) as stream:
                streamed = stream.get_final_text()
            count = client.messages.count_tokens(model="tiny", messages=HELLO).input_tokens
            return said, streamed, count, [model.id for model in client.models.list()]

    said, streamed, count, models = await asyncio.to_thread(ask)
    assert said == streamed == "It is sunny." and models == ["tiny"]
    assert count == len(served["d0"].submits[-1].request.prompt_token_ids)


async def test_sampling_parameters(served: Mesh, client: Any) -> None:
    """In the body: the package has no arguments of these names any more."""
    asked: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 3, "stop_sequences": ["Human:"]}
    await client.messages.create(**asked, extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 5})
    sampling = sampling_of(served)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.9, 7, 3)
    assert sampling.seed == 5
    await client.messages.create(**asked, extra_body={"temperature": 1e-9, "top_p": 0.0})
    assert sampling_of(served).temperature == 0 and 0 < sampling_of(served).top_p < 1e-5
    await client.messages.create(**asked, extra_body={"seed": -1})
    assert sampling_of(served).seed == 2**64 - 1


async def test_stop_sequences(served: Mesh, client: Any, says: Say) -> None:
    size = says(served, "One two three")
    message = await both(client, **ASKED, max_tokens=size, stop_sequences=["Human:", " two"])
    assert (message.stop_reason, message.stop_sequence, message.content[0].text) == ("stop_sequence", " two", "One")


async def test_max_tokens_ends_and_what_exceeds_the_context_is_clipped(served: Mesh, client: Any, says: Say) -> None:
    says(served, "a" * 3000)
    message = await both(client, **{**ASKED, "max_tokens": 4})
    assert (message.stop_reason, message.content[0].text, message.usage.output_tokens) == ("max_tokens", "aaaa", 4)
    message = await both(client, **{**ASKED, "max_tokens": 32_000})
    usage = message.usage
    assert message.stop_reason == "model_context_window_exceeded"
    assert usage.input_tokens + usage.cache_read_input_tokens + usage.output_tokens == 2048


async def test_thinking(served: Mesh, client: Any, says: Say) -> None:
    size = says(served, "Hm.</think>Yes.")
    message = await both(client, **ASKED, max_tokens=size, thinking={"type": "enabled", "budget_tokens": 1024})
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert (message.content[0].thinking, message.content[0].signature) == ("Hm.", "") and message.content[1].text == "Yes."
    assert message.usage.output_tokens == size
    assert prompt_of(served) == "[user] hellobudget 1024\n[assistant] <think>\n"
    hidden = await both(client, **ASKED, max_tokens=size, thinking={"type": "adaptive", "display": "omitted"})
    assert (hidden.content[0].thinking, hidden.content[1].text) == ("", "Yes.")
    assert prompt_of(served) == "[user] hello[assistant] <think>\n"


@pytest.mark.parametrize(
    ("more", "ends"),
    [
        ({"thinking": {"type": "disabled"}}, NO_THOUGHTS),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "xhigh"}}, "effort high\n[assistant] <think>\n"),
        ({"output_config": {"effort": "low"}}, f"effort low\n{NO_THOUGHTS}"),
    ],
)
async def test_what_the_template_is_told_of_thinking(served: Mesh, client: Any, more: dict[str, Any], ends: str) -> None:
    await client.messages.create(**{**ASKED, "max_tokens": 3}, **more)
    assert prompt_of(served) == f"[user] hello{ends}"


async def test_a_prefill_goes_on(served: Mesh, client: Any, says: Say) -> None:
    size = says(served, " and warm.")
    messages = [*HELLO, {"role": "assistant", "content": "It is sunny"}]
    message = await both(client, **{**ASKED, "max_tokens": size, "messages": messages})
    assert message.content[0].text == " and warm." and prompt_of(served) == "[user] hello[assistant] It is sunny"
    blocks = [{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "It is"}]
    await client.messages.create(**{**ASKED, "max_tokens": size, "messages": [*HELLO, {"role": "assistant", "content": blocks}]})
    assert prompt_of(served).endswith("[assistant] It is")


async def test_structured_outputs(served: Mesh, client: Any, says: Say) -> None:
    class Reading(pydantic.BaseModel):
        city: str
        degrees: int

    asked = {**ASKED, "max_tokens": says(served, '{"city": "Lyon", "degrees": 21}')}
    message = await client.messages.parse(**asked, output_format=Reading)
    assert message.parsed_output == Reading(city="Lyon", degrees=21)
    schema = json.loads(sampling_of(served).constraint.json_schema)
    assert schema["required"] == ["city", "degrees"] and schema["additionalProperties"] is False
    beta = {"format": {"type": "json_schema", "schema": WEATHER}}
    await client.beta.messages.create(**asked, output_config=beta, betas=["structured-outputs-2025-11-13", "unknown-2031-01-01"])
    assert json.loads(sampling_of(served).constraint.json_schema) == WEATHER
    await client.messages.create(**asked | {"extra_body": {"output_format": beta["format"]}})
    assert json.loads(sampling_of(served).constraint.json_schema) == WEATHER
    asked["max_tokens"] = says(served, 'Hm.</think>\n\n{"city": "Lyon", "degrees": 21}')
    message = await client.messages.parse(**asked, output_format=Reading, thinking={"type": "adaptive"})
    assert [block.type for block in message.content] == ["thinking", "text"] and message.content[0].thinking == "Hm."
    assert message.parsed_output == Reading(city="Lyon", degrees=21) and sampling_of(served).constraint.grammar


# Tools.


async def test_a_loop_with_tools(served: Mesh, client: Any, says: Say) -> None:
    """What the client's own example does: call, answer, and hand the blocks back as they came."""
    size = says(served, f"I look.</think>\n\nLet me see. {CALL}\n{CALL}")
    asked = {**ASKED, "max_tokens": size, "tools": TOOLS, "thinking": {"type": "enabled", "budget_tokens": 2000}}
    first = await both(client, **asked)
    assert first.stop_reason == "tool_use" and [block.type for block in first.content] == [
        "thinking", "text", "tool_use", "tool_use",
    ]  # fmt: skip
    one, two = first.content[2:]
    assert one.input == two.input == {"city": "Lyon"} and one.name == "weather"
    assert one.id != two.id and one.id.startswith("toolu_")
    results = [
        {
            "type": "tool_result",
            "tool_use_id": one.id,
            "content": [{"type": "text", "text": "Sunny."}, {"type": "text", "text": "21"}],
        },
        {"type": "tool_result", "tool_use_id": two.id, "content": "no such city", "is_error": True},
        {"type": "text", "text": "Go on."},
    ]
    size = says(served, "Enough.</think>It is sunny.")
    messages = [*HELLO, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second = await both(client, **{**asked, "max_tokens": size, "messages": messages})
    assert second.stop_reason == "end_turn" and second.content[-1].text == "It is sunny."
    said = '{"city": "Lyon"}'
    assert prompt_of(served).partition("<tool_call>\n")[2] == (
        f"[user] hello[assistant] Let me see.<{one.id} weather {said}><{two.id} weather {said}>(I look.)"
        "[tool weather] Sunny.\n21[tool weather] Error: no such city[user] Go on.budget 2000\n[assistant] <think>\n"
    )


async def test_the_tool_runner(served: Mesh, client: Any, says: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        """Tells the weather.

        Args:
            city: Where.
        """
        asked.append(city)
        says(served, "It is sunny.")
        return "Sunny."

    says(served, CALL)
    runner = client.beta.messages.tool_runner(**ASKED, max_tokens=300, tools=[weather])
    final = await runner.until_done()
    assert asked == ["Lyon"] and final.content[0].text == "It is sunny."
    assert "[tool weather] Sunny." in prompt_of(served) and '"description": "Where."' in prompt_of(served)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "any"}, ["weather", "stop"]),
        ({"type": "any", "disable_parallel_tool_use": True}, ["weather", "stop"]),
        ({"type": "tool", "name": "stop"}, ["stop"]),
    ],
)
async def test_required_calls_have_a_grammar(served: Mesh, client: Any, choice: dict[str, Any], names: list[str]) -> None:
    await client.messages.create(**{**ASKED, "max_tokens": 1}, tools=TOOLS, tool_choice=choice)
    grammar = sampling_of(served).constraint.grammar
    assert [name for name in ("weather", "stop") if f'\\"name\\": \\"{name}\\"' in grammar] == names


async def test_choices_that_require_nothing(served: Mesh, client: Any, says: Say) -> None:
    asked = {**ASKED, "max_tokens": says(served, f"{CALL}{CALL}")}
    once = await both(client, **asked, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in once.content] == ["tool_use"]
    none = await both(client, **asked, tools=TOOLS, tool_choice={"type": "none"})
    assert [block.type for block in none.content] == ["text"] and "TOOLS" not in prompt_of(served)


async def test_a_call_that_is_cut_off_keeps_the_members_that_had_come(served: Mesh, client: Any, says: Say) -> None:
    says(served, '<tool_call>\n{"name": "weather", "arguments": {"city": "Lyon", "of": "to-morrow"}}\n</tool_call>')
    message = await both(client, **{**ASKED, "max_tokens": 72}, tools=TOOLS)
    assert message.stop_reason == "max_tokens" and message.content[-1].type == "tool_use"
    assert message.content[-1].input == {"city": "Lyon"}


async def test_tools_are_described_with_examples_and_strictness(served: Mesh, client: Any) -> None:
    tool = {
        **TOOLS[0],
        "type": "custom",
        "strict": True,
        "input_examples": [{"city": "Köln"}],
        "cache_control": {"type": "ephemeral"},
    }
    await client.messages.create(**{**ASKED, "max_tokens": 1}, tools=[tool])
    assert 'Tells the weather.\\n\\nExamples of its input:\\n{\\"city\\": \\"Köln\\"}' in prompt_of(served)


# Prompts, counted and rendered.

AGENT: dict[str, Any] = {
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.117.48f; cc_entrypoint=cli; cch=71fea;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "<system-reminder>x</system-reminder>"}]},
        {"role": "user", "content": [{"type": "text", "text": "List.", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "I list.", "signature": "EqQBCgIYAhIM"},
            {"type": "redacted_thinking", "data": "EmwKAhgB"},
            {"type": "text", "text": "Listing."},
            {"type": "tool_use", "id": "toolu_01", "name": "Bash", "input": {"command": "ls"}, "caller": {"type": "direct"}},
            {"type": "tool_use", "id": "toolu_02", "name": "Read", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_01", "content": [{"type": "text", "text": "a.py"}], "is_error": False},
            {"type": "tool_result", "tool_use_id": "toolu_02", "content": "<tool_use_error>no file</tool_use_error>",
             "is_error": True, "cache_control": {"type": "ephemeral"}},
        ]},
        {"role": "system", "content": "The date has changed."},
    ],
    "tools": [
        {"name": name, "description": f"Does {name}.", "input_schema": {"$schema": "https://json-schema.org/draft/2020-12/schema",
         "type": "object", "properties": {"command": {"type": "string"}}, "additionalProperties": False},
         "eager_input_streaming": True}
        for name in ("Bash", "Read", *(f"mcp__server__tool_{number}" for number in range(3)))
    ],
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high"},
}  # fmt: skip
MORE: dict[str, Any] = {
    "metadata": {"user_id": '{"device_id":"x","session_id":"y"}'}, "service_tier": "auto", "temperature": 1,
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}  # fmt: skip
BETAS = "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,unheard-of-2030-01-01"


async def test_what_coding_agents_send(served: Mesh, client: Any, says: Say) -> None:
    says(served, "Done.</think>Done.")
    body = {"model": "tiny", "max_tokens": 32_000, "stream": True, **AGENT, **MORE}
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": BETAS, "x-app": "cli", "x-api-key": "anything"}
    async with httpx.AsyncClient() as http:
        answer = await http.post(url(served, "/v1/messages?beta=true"), json=body, headers=headers)
        counted = await http.post(
            url(served, "/v1/messages/count_tokens?beta=true"), json={"model": "tiny", **AGENT}, headers=headers
        )
    assert answer.status_code == counted.status_code == 200, (answer.text, counted.text)
    assert answer.text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')
    tools, _, conversation = prompt_of(served).partition("<tool_call>\n")
    assert conversation == (
        "[system] You are an agent.\nBe brief."
        "[user] <system-reminder>x</system-reminder>\nList."
        '[assistant] Listing.<toolu_01 Bash {"command": "ls"}><toolu_02 Read {}>(I list.)'
        "[tool Bash] a.py[tool Read] Error: <tool_use_error>no file</tool_use_error>"
        "[system] The date has changed.effort high\n[assistant] <think>\n"
    )
    assert "mcp__server__tool_2" in tools
    assert counted.json() == {"input_tokens": len(served["d0"].submits[-1].request.prompt_token_ids)}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"system": "Be brief."},
        {"system": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": {"type": "none"}},
        {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "stop"}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"messages": [*HELLO, {"role": "assistant", "content": "It is"}]},
        AGENT,
    ],
)
async def test_a_count_is_the_usage_of_the_same_request(served: Mesh, client: Any, more: dict[str, Any]) -> None:
    prompt = {"model": "tiny", "messages": HELLO, **more}
    counted = (await client.messages.count_tokens(**prompt)).input_tokens
    usage = (await client.messages.create(**prompt, max_tokens=2)).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    assert counted == len(served["d0"].submits[-1].request.prompt_token_ids)


async def test_a_count_may_exceed_the_context(client: Any) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "a" * 30_000}]}
    assert (await client.messages.count_tokens(**asked)).input_tokens > 30_000


async def test_the_usage_of_a_stream(served: Mesh, client: Any) -> None:
    """The counts of `message_start` are those of the prompt; the last ones tell what a cache served."""
    events = [event async for event in await client.messages.create(**{**ASKED, "max_tokens": 3}, stream=True)]
    num_prompt = len(served["d0"].submits[-1].request.prompt_token_ids)
    first, last = events[0].message.usage, events[-2].usage
    assert (first.input_tokens, first.output_tokens) == (num_prompt, 0)
    assert (last.input_tokens, last.cache_read_input_tokens, last.output_tokens) == (num_prompt - 16, 16, 3)


async def test_silences_are_filled_with_pings(served: Mesh, client: Any, says: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PING_S", 0.05)
    body = {"model": "tiny", "messages": HELLO, "max_tokens": says(served, "One two three"), "stream": True}
    served["d0"].pause_at = 5
    shown = b""
    async with httpx.AsyncClient() as http, http.stream("POST", url(served, "/v1/messages"), json=body) as answer:
        async for piece in answer.aiter_bytes():
            shown += piece
            if shown.count(b'event: ping\ndata: {"type":"ping"}\n\n') >= 3:
                served["d0"].pause_at = None
                served["d0"].resume.set()
    served["d0"].resume.clear()
    events = [json.loads(line.removeprefix("data: ")) for line in shown.decode().split("\n") if line.startswith("data: ")]
    assert "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta") == "One two three"
    assert events[-1] == {"type": "message_stop"}


async def test_a_client_that_leaves_frees_its_workers(served: Mesh, client: Any, says: Say) -> None:
    size, before = says(served, "One two three"), len(served["d0"].cancels)
    served["d0"].pause_at = 5
    stream = await client.messages.create(**ASKED, max_tokens=size, stream=True)
    async for event in stream:
        if event.type == "content_block_delta":
            break
    await stream.close()
    await eventually(lambda: len(served["d0"].cancels) > before)
    served["d0"].pause_at = None
    await served.until_whole()


async def test_models_are_anthropics_for_its_clients_alone(served: Mesh, client: Any) -> None:
    (model,) = [model async for model in client.models.list()]
    assert (model.id, model.type, model.max_input_tokens) == ("tiny", "model", 2048)
    assert (await client.models.retrieve("tiny")).display_name == "tiny"
    async with httpx.AsyncClient() as http:
        assert (await http.get(url(served, "/v1/models"))).json()["object"] == "list"
        assert (await http.get(url(served, "/v1/models/tiny"))).json()["object"] == "model"


async def test_it_is_one_chat_to_the_rest_of_the_router(served: Mesh, client: Any) -> None:
    """Options in headers hold, as on every path of this port."""
    message = await client.messages.create(
        **{**ASKED, "max_tokens": 2}, extra_headers={"X-Request-Id": "mine-7", "X-Tenant": "me", "X-Priority": "batch"}
    )
    submit = served["d0"].submits[-1].request
    assert (message.id, message._request_id) == ("msg_mine-7", "mine-7")
    assert submit.tenant == "me" and submit.priority == common_pb2.PRIORITY_BATCH
