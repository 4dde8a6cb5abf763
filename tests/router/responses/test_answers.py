"""What OpenAI's own client gets of a router that keeps nothing: text, calls, reasoning, typed output, whole and as events."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from tests.router.mesh import Mesh
from tests.router.responses.conftest import url
from tests.router.stub_texts import Say, prompt_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
WEATHER: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "name": "weather", "description": "Tells the weather.", "parameters": WEATHER, "strict": False},
    {"type": "function", "name": "stop"},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Lyon"}}\n</tool_call>'


async def both(client: Any, **asked: Any) -> Any:
    """The whole response, which the stream's last event repeats."""
    whole = await client.responses.create(model="tiny", extra_body={"seed": 5}, **asked)
    async with client.responses.stream(model="tiny", extra_body={"seed": 5}, **asked) as stream:
        events = [event async for event in stream]
        last = await stream.get_final_response() if whole.status == "completed" else events[-1].response
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{whole.status}"
    assert said(last) == said(whole) and last.id != whole.id
    return whole


def said(response: Any) -> Any:
    """Everything that two responses to one request have in common."""
    shown = json.loads(response.model_dump_json(exclude={"pdmesh", "id", "created_at", "completed_at", "usage"}))
    items = [{name: value for name, value in item.items() if name not in ("id", "parsed_arguments")} for item in shown["output"]]
    for item in items:
        for part in item.get("content") or []:
            part.pop("parsed", None)
    return {**shown, "output": items, "tokens": (response.usage.input_tokens, response.usage.output_tokens)}


async def test_text_and_usage(client: Any, served: Mesh, says: Say) -> None:
    size = says(served, "It is <b>sunny</b>.")
    found = await both(client, input="hello", instructions="Be brief.", max_output_tokens=size)
    assert (found.status, found.output_text, found.incomplete_details) == ("completed", "It is <b>sunny</b>.", None)
    assert found.model == "tiny" and found.object == "response" and found.id.startswith("resp_")
    assert found.usage.output_tokens == size and found.usage.total_tokens == size + found.usage.input_tokens
    assert found.usage.output_tokens_details.reasoning_tokens == 0 and found.usage.input_tokens_details.cached_tokens >= 0
    assert found.model_extra["pdmesh"][0]["seed"] == 5 and found.model_extra["store"] is False


async def test_an_output_that_is_cut_off_is_incomplete(client: Any, served: Mesh, says: Say) -> None:
    says(served, "It is sunny.")
    found = await both(client, input="hello", max_output_tokens=5)
    assert (found.status, found.incomplete_details.reason, found.output_text) == ("incomplete", "max_output_tokens", "It is")
    assert found.output[0].status == "incomplete" and found.max_output_tokens == 5 and found.usage.output_tokens == 5


async def test_a_response_repeats_its_request(client: Any, served: Mesh, says: Say) -> None:
    says(served, "Yes.")
    asked: Any = {
        "instructions": "Be brief.",
        "max_output_tokens": 50,
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "temperature": 0.5,
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "stop"}]},
        "tools": TOOLS,
        "top_logprobs": 0,
        "top_p": 0.9,
        "truncation": "disabled",
        "user": "u",
    }
    found = await client.responses.create(model="tiny", input="hello", reasoning={"effort": "low"}, **asked)
    shown = json.loads(found.model_dump_json(exclude_unset=True))
    assert shown["tools"][1].pop("parameters") is None and shown["tools"][1].pop("description") is None
    assert shown["tools"][1].pop("strict") is None
    assert {name: shown[name] for name in asked} == asked
    assert shown["reasoning"] == {"effort": "low", "summary": None} and shown["service_tier"] == "default"
    bare = json.loads((await client.responses.create(model="tiny", input="hello")).model_dump_json(exclude_unset=True))
    assert (bare["temperature"], bare["top_p"], bare["tools"], bare["tool_choice"]) == (1, 1, [], "auto")
    assert bare["text"] == {"format": {"type": "text"}, "verbosity": "medium"} and bare["parallel_tool_calls"] is True


async def test_log_probabilities(client: Any, served: Mesh) -> None:
    found = await both(client, input="hi", max_output_tokens=3, top_logprobs=2, include=["message.output_text.logprobs"])
    entries = found.output[0].content[0].logprobs
    assert [entry.token for entry in entries] == list(found.output_text) and entries[0].bytes == [ord(found.output_text[0])]
    assert all(len(entry.top_logprobs) == 2 and entry.logprob == pytest.approx(-0.5) for entry in entries[1:])
    assert not (await both(client, input="hi", max_output_tokens=3)).output[0].content[0].logprobs


async def test_reasoning_text_and_a_call(thinker: Any, thinking: Mesh, says: Say) -> None:
    size = says(thinking, f"I call.\n</think>\n\nLet me see. {CALL}")
    found = await both(thinker, input="hello", tools=TOOLS, max_output_tokens=size, include=["reasoning.encrypted_content"])
    assert [item.type for item in found.output] == ["reasoning", "message", "function_call"]
    thought, message, call = found.output
    assert (thought.content[0].text, thought.summary, thought.encrypted_content) == ("I call.", [], None)
    assert message.content[0].text == found.output_text == "Let me see."
    assert (call.name, json.loads(call.arguments), call.status) == ("weather", {"city": "Lyon"}, "completed")
    assert call.call_id.startswith("call_") and call.id.startswith("fc_") and found.status == "completed"
    assert 0 < found.usage.output_tokens_details.reasoning_tokens < size


async def test_a_tool_loop_of_two_steps(thinker: Any, thinking: Mesh, says: Say) -> None:
    says(thinking, f"I call.</think>{CALL}")
    items: Any = [{"role": "user", "content": "hello"}]
    first = await thinker.responses.create(model="tiny", input=items, tools=TOOLS, max_output_tokens=200, store=False)
    items += first.output  # as the package's own documents do
    items.append({"type": "function_call_output", "call_id": first.output[1].call_id, "output": "Sunny."})
    says(thinking, "So.</think>It is sunny.")
    second = await thinker.responses.create(
        model="tiny", input=items, instructions="Be kind.", tools=TOOLS[:1], max_output_tokens=200, reasoning={"effort": "low"}
    )
    described = {"name": "weather", "description": "Tells the weather.", "parameters": WEATHER}
    assert prompt_of(thinking) == (
        f"TOOLS {json.dumps([{'type': 'function', 'function': described}])} <tool_call>\n"
        f"[system] Be kind.[user] hello[assistant] <{first.output[1].call_id} weather Lyon>(I call.)[tool weather] Sunny."
        "effort low\n[assistant] <think>\n"
    )
    assert second.output_text == "It is sunny."


async def test_items_become_turns(thinker: Any, thinking: Mesh, says: Say) -> None:
    says(thinking, "Yes.")
    items: Any = [
        {"role": "developer", "content": [{"type": "input_text", "text": "One."}, {"type": "input_text", "text": "Two."}]},
        {"type": "message", "role": "user", "content": "a"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": "gAAA"},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "content": [{"type": "output_text", "text": "b", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Lyon"}'},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": '{"city": "Nice"}'},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "Rain."}]},
        {"type": "function_call_output", "call_id": "c1", "output": "Sun."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "assistant", "content": "twice"},
        {"role": "system", "content": "late"},
    ]
    await thinker.responses.create(
        model="tiny", input=items, instructions="Zero.", reasoning={"effort": "none"}, max_output_tokens=9
    )
    assert prompt_of(thinking) == (
        "[system] Zero.\n\nOne.\nTwo.[user] a[assistant] b<c1 weather Lyon><c2 weather Nice>(Hm.)"
        "[tool weather] Rain.[tool weather] Sun.[assistant] no[assistant] twice[system] late"
        "[assistant] <think>\n\n</think>\n\n"
    )


async def test_verbosity_is_a_variable_of_the_template(thinker: Any, thinking: Mesh) -> None:
    await thinker.responses.create(model="tiny", input="a", text={"verbosity": "high"}, max_output_tokens=1)
    assert "verbosity high\n" in prompt_of(thinking)


class Weather(BaseModel):
    city: str
    degrees: int


async def test_typed_output(client: Any, served: Mesh, says: Say) -> None:
    size = says(served, '{"city": "Lyon", "degrees": 25}')
    parsed = await client.responses.parse(model="tiny", input="hello", text_format=Weather, max_output_tokens=size)
    assert parsed.output_parsed == Weather(city="Lyon", degrees=25) and parsed.status == "completed"
    sent = json.loads(served["d0"].submits[-1].request.sampling.constraint.json_schema)
    assert sent["properties"]["degrees"]["type"] == "integer"
    assert parsed.text.format.name == "Weather" and parsed.text.format.schema_ == sent
    async with client.responses.stream(model="tiny", input="hello", text_format=Weather, max_output_tokens=size) as stream:
        final = await stream.get_final_response()
    assert final.output_parsed == Weather(city="Lyon", degrees=25)
    await client.responses.create(model="tiny", input="hello", text={"format": {"type": "json_object"}}, max_output_tokens=1)
    assert json.loads(served["d0"].submits[-1].request.sampling.constraint.json_schema) == {"type": "object"}


async def test_a_model_thinks_before_typed_output(thinker: Any, thinking: Mesh, says: Say) -> None:
    size = says(thinking, 'Hm.</think>\n\n{"city": "Lyon", "degrees": 25}')
    parsed = await thinker.responses.parse(model="tiny", input="hello", text_format=Weather, max_output_tokens=size)
    assert [item.type for item in parsed.output] == ["reasoning", "message"]
    assert parsed.output[0].content[0].text == "Hm." and parsed.output_parsed == Weather(city="Lyon", degrees=25)
    assert thinking["d0"].submits[-1].request.sampling.constraint.WhichOneof("kind") == "grammar"


@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "name": "weather"}, {"type": "allowed_tools", "mode": "required", "tools": TOOLS[1:]}],
)
async def test_tool_choice(client: Any, served: Mesh, choice: Any) -> None:
    await client.responses.create(model="tiny", input="hello", tools=TOOLS, tool_choice=choice, max_output_tokens=1)
    grammar = served["d0"].submits[-1].request.sampling.constraint.grammar
    is_weather_possible = isinstance(choice, str) or choice.get("name") == "weather"
    assert ("weather" in grammar, "stop" in grammar) == (is_weather_possible, isinstance(choice, str) or "tools" in choice)


async def test_events_have_names_and_no_end_mark(served: Mesh, says: Say) -> None:
    says(served, "Yes.")
    async with httpx.AsyncClient() as http:
        answer = await http.post(url(served, "/v1/responses"), json={"model": "tiny", "input": "a", "stream": True})
    events = answer.text.strip().split("\n\n")
    assert answer.headers["content-type"].startswith("text/event-stream") and "[DONE]" not in answer.text
    for event in events:
        name, data = event.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert events[-1].startswith("event: response.completed\n")


async def test_sampling_as_vllm_has_it(client: Any, served: Mesh) -> None:
    more = {
        "seed": -1,
        "top_k": -1,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "stop": "x",
        "presence_penalty": 0.5,
        "cache_salt": "s",
    }
    await client.responses.create(model="tiny", input="a", temperature=0.00001, top_p=0, max_output_tokens=1, extra_body=more)
    sent = served["d0"].submits[-1].request.sampling
    assert (sent.seed, sent.top_k, sent.min_p, sent.repetition_penalty) == (2**64 - 1, 0, 0.1, 1.5)
    assert (sent.temperature, sent.presence_penalty) == (0, 0.5) and 0 < sent.top_p < 0.001
