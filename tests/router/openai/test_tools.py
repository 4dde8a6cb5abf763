"""Tools and reasoning over HTTP, in front of workers that say what a test has written: how it is rendered, how it is told."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from pdmesh.client import AsyncClient, Tool
from pdmesh.errors import InvalidArgument
from pdmesh.v1 import common_pb2, mesh_pb2
from tests.router.mesh import Answer, Mesh, running_mesh
from tests.router.openai.conftest import client_of, url
from tests.router.stub_texts import Say, model_with_template, prompt_of, sayer

pytestmark = pytest.mark.asyncio(loop_scope="module")
JSON = {"content-type": "application/json"}
HELLO: Any = [{"role": "user", "content": "hello"}]
WEATHER: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Tells the weather.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "stop"}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Lyon"}}\n</tool_call>'
TEMPLATE = (
    "{% if tools %}TOOLS {{ tools | tojson }} <tool_call>\n{% endif %}"
    "{% for m in messages %}[{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}] {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.id }} {{ c.function.name }} {{ c.function.arguments.city }}>{% endfor %}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}\n{% endfor %}"
    "{% if reasoning_effort %}effort {{ reasoning_effort }}\n{% endif %}"
    "{% if add_generation_prompt %}[assistant] {% if enable_thinking is not false %}<think>\n{% else %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def thinking_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template knows tools, and lets it think."""
    return model_with_template(tmp_path_factory.mktemp("thinking"), TEMPLATE)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def thinking(thinking_folder: Path) -> AsyncIterator[Mesh]:
    async with running_mesh(thinking_folder, http_port=0) as mesh:
        yield mesh
        await mesh.until_whole()


@pytest_asyncio.fixture(loop_scope="module")
async def thinker(thinking: Mesh) -> AsyncIterator[Any]:
    async with client_of(thinking) as client:
        yield client


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Say:
    """Sets what every choice says; returns the number of its tokens, at which a stub has to be stopped."""
    return sayer(monkeypatch)


def grammar_of(mesh: Mesh) -> str:
    return mesh["d0"].submits[-1].request.sampling.constraint.grammar


async def streamed(client: Any, **asked: Any) -> dict[str, Any]:
    """What the chunks of a stream add up to, in the form of a message."""
    found: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": [], "finish": None, "warnings": []}
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        piece = chunk.choices[0]
        assert (piece.delta.role == "assistant") == (found["finish"] is None and found.pop("first", True))
        found["first"] = False
        found["content"] += piece.delta.content or ""
        found["reasoning_content"] += (piece.delta.model_extra or {}).get("reasoning_content", "")
        found["warnings"] += (piece.model_extra or {}).get("warnings", [])
        found["finish"] = piece.finish_reason
        for call in piece.delta.tool_calls or []:
            if call.id is not None:
                found["calls"].append([call.id, call.function.name, ""])
            found["calls"][call.index][2] += call.function.arguments
    del found["first"]
    return found


async def answered(client: Any, messages: Any, size: int, **more: Any) -> dict[str, Any]:
    """The message of a whole answer, which the stream's chunks add up to."""
    asked = {"model": "tiny", "messages": messages, "max_tokens": size, "seed": 5, **more}
    (choice,) = (await client.chat.completions.create(**asked)).choices
    message = choice.message
    found = {
        "content": message.content or "",
        "reasoning_content": (message.model_extra or {}).get("reasoning_content", ""),
        "calls": [[call.id, call.function.name, call.function.arguments] for call in message.tool_calls or []],
        "finish": choice.finish_reason,
        "warnings": (choice.model_extra or {}).get("warnings", []),
    }
    assert found == await streamed(client, **asked)
    assert (message.content is None) == (bool(found["calls"]) and not found["content"])
    return found


async def test_a_call_that_the_model_chooses(served: Mesh, client: Any, says: Say) -> None:
    size = says(served, f"Let me see. {CALL}")
    found = await answered(client, HELLO, size, tools=TOOLS)
    ((call_id, name, arguments),) = found.pop("calls")
    assert (name, json.loads(arguments)) == ("weather", {"city": "Lyon"}) and call_id.startswith("call_")
    assert found == {"content": "Let me see.", "reasoning_content": "", "finish": "tool_calls", "warnings": []}
    assert '"name": "weather", "description": "Tells the weather."' in prompt_of(served) and "<tool_call>" in grammar_of(served)


async def test_text_alone(served: Mesh, client: Any, says: Say) -> None:
    size = says(served, "It is <b>sunny</b>.")
    found = await answered(client, HELLO, size, tools=TOOLS, tool_choice="auto")
    assert (found["content"], found["calls"], found["finish"]) == ("It is <b>sunny</b>.", [], "stop")


async def test_what_is_no_call_is_told(served: Mesh, client: Any, says: Say) -> None:
    size = says(served, "<tool_call>weather</tool_call>")
    found = await answered(client, HELLO, size, tools=TOOLS)
    assert found["content"] == "<tool_call>weather</tool_call>" and len(found["warnings"]) == 1 and found["finish"] == "stop"


async def test_without_tools_nothing_is_read(served: Mesh, client: Any, says: Say) -> None:
    size = says(served, CALL)
    offers: list[dict[str, Any]] = [{}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}]
    for more in offers:
        found = await answered(client, HELLO, size, **more)
        assert (found["content"], found["calls"], found["finish"]) == (CALL, [], "stop")
        assert not grammar_of(served) and "weather" not in prompt_of(served)


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({"tool_choice": "required"}, ["weather", "stop"]),
        ({"tool_choice": {"type": "function", "function": {"name": "stop"}}}, ["stop"]),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "stop"}}]},
                }
            },
            ["stop"],
        ),
    ],
)
async def test_required_calls_have_a_grammar(served: Mesh, client: Any, more: dict[str, Any], names: list[str]) -> None:
    await client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS, max_tokens=1, **more)
    written = [name for name in ("weather", "stop") if f'\\"name\\": \\"{name}\\"' in grammar_of(served)]
    assert written == names and all(f'"name": "{name}"' in prompt_of(served) for name in ("weather", "stop"))


@pytest.mark.parametrize("more", [{"response_format": {"type": "json_object"}}, {"extra_body": {"min_tokens": 1}}])
async def test_a_client_that_wants_another_constraint_gets_it(served: Mesh, client: Any, more: dict[str, Any]) -> None:
    await client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS, max_tokens=1, **more)
    assert not grammar_of(served)


async def test_a_schema_beyond_grammars_is_held_to_its_names(served: Mesh, client: Any) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 0.5, "not": {"const": 3}}}, "required": ["a"]}
    function = {"name": "odd", "parameters": odd}
    asked: Any = {"model": "tiny", "messages": HELLO, "tool_choice": "required", "max_tokens": 1}
    await client.chat.completions.create(**asked, tools=[{"type": "function", "function": function}])
    assert '"a": {"type": "integer"}' in grammar_of(served) and '"not"' not in grammar_of(served)
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(**asked, tools=[{"type": "function", "function": {**function, "strict": True}}])
    assert refused.value.param == "tools[0].function.parameters"


async def test_numbers_of_schemas_stay_as_they_are_written(served: Mesh, client: Any) -> None:
    """Sent as text: Python's own client would round them. The grammar cannot keep this one, so it is refused where it must."""
    number = "0.1234567890123456789"
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 1}
    tool = '{"type": "function", "function": {"name": "odd", "strict": %s, "parameters": {"properties": {"a": {"const": %s}}}}}'

    async def post(more: str) -> httpx.Response:
        async with httpx.AsyncClient() as http:
            return await http.post(
                url(served, "/v1/chat/completions"), headers=JSON, content=f"{json.dumps(body)[:-1]}, {more}}}"
            )

    answer = await post(f'"temperature": {number}, "tools": [{tool % ("false", number)}]')
    assert answer.status_code == 200 and f'"const": {number}' in prompt_of(served)
    answer = await post(f'"tools": [{tool % ("true", number)}]')
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools[0].function.parameters"
    assert f"const: {number} cannot be kept exactly" in answer.json()["error"]["message"]
    schema = f'{{"name": "n", "schema": {{"const": {number}}}}}'
    answer = await post(f'"response_format": {{"type": "json_schema", "json_schema": {schema}}}')
    assert answer.status_code == 400 and f"const: {number} cannot be kept" in answer.json()["error"]["message"]


async def test_a_history_is_rendered_with_its_calls(thinking: Mesh, thinker: Any, says: Say) -> None:
    size = says(thinking, "So.</think>Yes.")
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Lyon"}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "c1", "content": "Sunny."},
    ]
    found = await answered(thinker, messages, size, tools=TOOLS[:1], reasoning_effort="low")
    described = json.dumps([{"type": "function", "function": TOOLS[0]["function"]}])
    assert prompt_of(thinking) == (
        f"TOOLS {described} <tool_call>\n[user] hello[assistant] <c1 weather Lyon>(Hm.)[tool weather] Sunny.effort low\n"
        "[assistant] <think>\n"
    )
    assert (found["reasoning_content"], found["content"], found["finish"]) == ("So.", "Yes.", "stop")


async def test_reasoning_then_a_call(thinking: Mesh, thinker: Any, says: Say) -> None:
    size = says(thinking, f"I call.\n</think>\n\n{CALL}")
    found = await answered(thinker, HELLO, size, tools=TOOLS)
    assert (found["reasoning_content"], found["content"], found["finish"]) == ("I call.", "", "tool_calls")
    assert [call[1] for call in found["calls"]] == ["weather"]


async def test_tokens_of_reasoning_are_counted(thinking: Mesh, thinker: Any, says: Say) -> None:
    """Those of the closing mark included, each a character; the opening one stands in the prompt. Without an end all are."""
    for text, wanted in (("I call.\n</think>\n\nYes.", len("I call.\n</think>")), ("On and on", len("On and on") + 1)):
        asked = {"model": "tiny", "messages": HELLO, "max_tokens": says(thinking, text), "seed": 5}
        answer = await thinker.chat.completions.create(**asked)
        assert answer.usage.completion_tokens_details.reasoning_tokens == wanted
        stream = await thinker.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        usages = [chunk.usage async for chunk in stream if chunk.usage]
        assert [usage.completion_tokens_details.reasoning_tokens for usage in usages] == [wanted]
    off: Any = {**asked, "extra_body": {"enable_thinking": False}}
    assert (await thinker.chat.completions.create(**off)).usage.completion_tokens_details.reasoning_tokens == 0


async def tokenized(mesh: Mesh, body: dict[str, Any]) -> tuple[int, Any]:
    async with httpx.AsyncClient() as http:
        answer = await http.post(url(mesh, "/tokenize"), json=body)
        return answer.status_code, answer.json()


@pytest.mark.parametrize("more", [{}, {"chat_template_kwargs": {"enable_thinking": False}}, {"add_generation_prompt": False}])
async def test_tokenize_counts_what_a_chat_shows(thinking: Mesh, thinker: Any, says: Say, more: dict[str, Any]) -> None:
    size = says(thinking, "Yes.")
    for tools in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}):
        asked = {"model": "tiny", "messages": HELLO, **tools, **more}
        _, counted = await tokenized(thinking, asked)
        extra: Any = {"max_tokens": size, "extra_body": more}
        answer = await thinker.chat.completions.create(model="tiny", messages=HELLO, **tools, **extra)
        assert counted["count"] == answer.usage.prompt_tokens
        assert counted["tokens"] == thinking["d0"].submits[-1].request.prompt_token_ids


async def test_tokenize_names_what_is_wrong_with_tools(thinking: Mesh) -> None:
    function = {"name": "weather", "parameters": {"type": "array"}}
    for tool, param in (({"function": function}, "tools[0].function.parameters"), ({"function": {}}, "tools[0].function.name")):
        status, told = await tokenized(thinking, {"messages": HELLO, "tools": [tool]})
        assert (status, told["error"]["param"]) == (400, param)


async def test_the_client_library_tokenizes_with_tools(thinking: Mesh) -> None:
    tool = Tool("weather", "Tells the weather.", WEATHER)
    async with AsyncClient(thinking.router.server.address) as client:
        plain, shown = [
            await client.tokenize([("user", "hello")], tools=tools, chat_template_kwargs={"enable_thinking": False})
            for tools in ((), (tool,))
        ]
        text = thinking.router.core.models["tiny"].tokenizer.decode(shown.token_ids, skip_special_tokens=False)
        assert text.startswith("TOOLS [") and text.endswith("</think>\n\n") and len(plain.token_ids) < len(shown.token_ids)
        with pytest.raises(InvalidArgument, match="excludes tools"):
            await client.tokenize("hello", tools=[tool])


@pytest.mark.parametrize("off", [{"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}])
async def test_a_model_that_is_not_to_think_answers(thinking: Mesh, thinker: Any, says: Say, off: dict[str, Any]) -> None:
    size = says(thinking, "Yes.")
    found = await answered(thinker, HELLO, size, extra_body=off)
    assert (found["reasoning_content"], found["content"]) == ("", "Yes.") and prompt_of(thinking).endswith("</think>\n\n")
    found = await answered(thinker, HELLO, size, reasoning_effort="none")
    assert (found["reasoning_content"], found["content"]) == ("", "Yes.")


def constraint_of(mesh: Mesh) -> common_pb2.Constraint:
    return mesh["d0"].submits[-1].request.sampling.constraint


@pytest.mark.parametrize("text", ['{"a": 1}', '{"a": "</think> b"}'])
async def test_a_model_thinks_before_an_answer_with_a_constraint(thinking: Mesh, thinker: Any, says: Say, text: str) -> None:
    size = says(thinking, f"So.</think>\n\n{text}")
    found = await answered(thinker, HELLO, size, response_format={"type": "json_object"})
    assert (found["reasoning_content"], found["content"], found["warnings"]) == ("So.", text, [])
    grammars, written = thinking.router.core.models["tiny"].grammars, grammar_of(thinking)
    encode = thinking.router.core.models["tiny"].tokenizer.encode
    assert grammars.compile("grammar", written).first_stray(encode(f"So.</think>\n\n{text}")) is None
    assert grammars.compile("grammar", written).first_stray(encode("So.</think>\n\n[")) is not None


async def test_a_constraint_is_the_answer_from_its_first_token_where_nothing_is_thought(
    thinking: Mesh, thinker: Any, says: Say
) -> None:
    for text in ('{"a": 1}', '{"a": "</think> b"}'):
        size = says(thinking, text)
        for more in ({"extra_body": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
            found = await answered(thinker, HELLO, size, response_format={"type": "json_object"}, **more)
            assert (found["reasoning_content"], found["content"], found["warnings"]) == ("", text, [])
            assert constraint_of(thinking).WhichOneof("kind") == "json_schema"
    size = says(thinking, "ab")
    found = await answered(thinker, HELLO, size, extra_body={"guided_grammar": 'start: "ab"'})
    assert (found["reasoning_content"], found["content"]) == ("", "ab")  # a grammar describes the whole output
    assert grammar_of(thinking) == 'start: "ab"'


async def test_a_stream_is_resumed_within_thoughts_before_a_constraint(thinking: Mesh, says: Say) -> None:
    encode, text = thinking.router.core.models["tiny"].tokenizer.encode, 'So.</think>\n\n{"a": 1}'
    size = says(thinking, text)
    for at in (2, text.index("1")):
        request = mesh_pb2.ChatRequest(
            messages=[mesh_pb2.ChatMessage(role="user", content="hello")],
            sampling=common_pb2.SamplingParams(
                max_tokens=size, seed=5, constraint=common_pb2.Constraint(json_schema='{"type": "object"}')
            ),
            resume=mesh_pb2.Resume(seed=5, emitted=[common_pb2.EmittedChoice(token_ids=encode(text)[:at])]),
        )
        answer = Answer()
        async for message in thinking.stub.Chat(request, timeout=20):
            answer.take(message)
        assert "".join(delta.text for delta in answer.deltas) == ('{"a": 1}' if at == 2 else "1}")
        assert "".join(delta.reasoning for delta in answer.deltas) == ("." if at == 2 else "")
        assert grammar_of(thinking)


async def test_the_last_message_goes_on(thinking: Mesh, thinker: Any, says: Say) -> None:
    size = says(thinking, " and warm.")
    messages = [*HELLO, {"role": "assistant", "content": "It is sunny"}]
    found = await answered(thinker, messages, size, extra_body={"continue_final_message": True})
    assert prompt_of(thinking).endswith("[assistant] It is sunny") and found["content"] == " and warm."


async def test_a_stream_is_resumed_within_a_call_and_where_no_grammar_held_it(served: Mesh, says: Say) -> None:
    encode = served.router.core.models["tiny"].tokenizer.encode
    for text, at, is_held in ((CALL, CALL.index("city"), True), ("<tool_call> odd", 13, False)):
        size = says(served, text)
        request = mesh_pb2.ChatRequest(
            messages=[mesh_pb2.ChatMessage(role="user", content="hello")],
            tools=[mesh_pb2.Tool(name="weather", parameters=json.dumps(WEATHER))],
            sampling=common_pb2.SamplingParams(max_tokens=size, seed=5),
            resume=mesh_pb2.Resume(seed=5, emitted=[common_pb2.EmittedChoice(token_ids=encode(text)[:at])]),
        )
        answer = Answer()
        async for message in served.stub.Chat(request, timeout=20):
            answer.take(message)
        assert bool(grammar_of(served)) == is_held
        pieces = [piece for delta in answer.deltas for piece in delta.tool_calls]
        if is_held:  # its name, and the beginning of its arguments, were sent before
            assert "".join(piece.arguments for piece in pieces) == 'city": "Lyon"}' and not any(piece.id for piece in pieces)
            assert answer.last().finish_reason == common_pb2.FINISH_REASON_TOOL_CALLS
        else:
            assert not pieces and answer.text() == "dd"
