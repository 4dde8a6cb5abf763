"""From bodies to messages of `pdmesh.v1`: turns, blocks, origins, tools and what the template is told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdmesh.runtime.errors import InvalidArgument
from pdmesh.v1 import mesh_pb2
from router.api.anthropic.requests import Call, parse_count, parse_message

HELLO: Any = [{"role": "user", "content": "hello"}]
BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=71fea;"


def parsed(**body: Any) -> Call:
    asked = {"max_tokens": 3, "messages": HELLO, **body}
    call = parse_message(asked, mesh_pb2.RequestOptions(tenant="me"))
    of_prompt = {name: value for name, value in asked.items() if name not in ("max_tokens", "stream", "stop_sequences")}
    counted = parse_count(of_prompt, mesh_pb2.RequestOptions(tenant="me")).request
    same = mesh_pb2.ChatRequest()
    same.CopyFrom(call.request)
    same.ClearField("sampling")
    same.options.clip_max_tokens = False
    assert counted == same, "a count is that of the same prompt"
    return call


def turns(**body: Any) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in parsed(**body).request.messages]


def text(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": each} for each in texts]


def result(call: str, content: Any = "") -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call, "content": content}


@pytest.mark.parametrize(
    ("system", "said"),
    [
        ("", []),
        ([], []),
        ("Be brief.", ["Be brief."]),
        (text("Be brief.", "Be kind."), ["Be brief.\nBe kind."]),
        (f"{BILLING}\nBe brief.", ["Be brief."]),
        (text(BILLING, "Be brief."), ["Be brief."]),
        (BILLING, []),
        (f"Mind {BILLING}", [f"Mind {BILLING}"]),
    ],
)
def test_the_system_prompt(system: Any, said: list[str]) -> None:
    assert turns(system=system) == [*(("system", each) for each in said), ("user", "hello")]


def test_consecutive_messages_of_a_role_are_one_turn() -> None:
    messages = [
        *HELLO, {"role": "user", "content": text("a", "b")}, {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": text("d")}, {"role": "user", "content": []}, {"role": "user", "content": "e"},
    ]  # fmt: skip
    assert turns(messages=messages) == [("user", "hello\na\nb"), ("assistant", "c\nd"), ("user", "e")]


def test_results_are_messages_of_their_own_in_their_order() -> None:
    use = [{"type": "tool_use", "id": each, "name": "weather", "input": {"city": each}} for each in "ab"]
    content = [*text("first"), result("a", "1"), result("b", text("2", "3")), *text("then", "last")]
    call = parsed(messages=[*HELLO, {"role": "assistant", "content": use}, {"role": "user", "content": content}])
    assert [(each.role, each.content, each.tool_call_id) for each in call.request.messages[1:]] == [
        ("assistant", "", ""), ("user", "first", ""), ("tool", "1", "a"), ("tool", "2\n3", "b"), ("user", "then\nlast", ""),
    ]  # fmt: skip
    assert [json.loads(each.arguments) for each in call.request.messages[1].tool_calls] == [{"city": "a"}, {"city": "b"}]
    assert call.origins == (
        "messages[0]", "messages[1]", "messages[2]", "messages[2].content[1]", "messages[2].content[2]", "messages[2]",
    )  # fmt: skip
    assert call.names_of(0)["messages[3]"] == "messages[2].content[1]"


@pytest.mark.parametrize(
    ("content", "said"),
    [("No such file", "Error: No such file"), ("Error: no", "Error: no"), (text("a"), "Error: a"), ("", "Error: ")],
)
def test_a_result_that_is_an_error_says_so(content: Any, said: str) -> None:
    assert turns(messages=[{"role": "user", "content": [{**result("a", content), "is_error": True}]}]) == [("tool", said)]


def test_thoughts_are_reasoning_and_redacted_ones_are_left_out() -> None:
    content = [
        {"type": "thinking", "thinking": "Hm.", "signature": "abc"}, {"type": "redacted_thinking", "data": "abc"},
        {"type": "thinking", "thinking": "So."}, *text("Yes."),
    ]  # fmt: skip
    message = parsed(messages=[*HELLO, {"role": "assistant", "content": content}, *HELLO]).request.messages[1]
    assert (message.reasoning, message.content) == ("Hm.\nSo.", "Yes.")


def test_the_last_message_of_the_assistant_goes_on() -> None:
    assert parsed(messages=[*HELLO, {"role": "assistant", "content": "It is"}]).request.continue_final_message
    assert not parsed(messages=[*HELLO, {"role": "assistant", "content": "It is"}, *HELLO]).request.continue_final_message
    assert not parsed().request.continue_final_message


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        (None, (mesh_pb2.TOOL_CHOICE_UNSPECIFIED, [], False)),
        ({"type": "auto"}, (mesh_pb2.TOOL_CHOICE_AUTO, [], True)),
        ({"type": "auto", "disable_parallel_tool_use": True}, (mesh_pb2.TOOL_CHOICE_AUTO, [], False)),
        ({"type": "any"}, (mesh_pb2.TOOL_CHOICE_REQUIRED, [], True)),
        ({"type": "tool", "name": "a"}, (mesh_pb2.TOOL_CHOICE_REQUIRED, ["a"], True)),
        ({"type": "none"}, (mesh_pb2.TOOL_CHOICE_NONE, [], True)),
    ],
)
def test_choices_of_tools(choice: Any, wanted: tuple[Any, list[str], bool]) -> None:
    request = parsed(tools=[{"name": "a", "input_schema": {}}], tool_choice=choice).request
    assert (request.tool_choice, list(request.tool_names), request.parallel_tool_calls) == wanted


@pytest.mark.parametrize(
    ("more", "variables"),
    [
        ({}, {"enable_thinking": False, "thinking": False}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 9}},
            {"enable_thinking": True, "thinking": True, "thinking_budget": 9},
        ),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"thinking": {"type": "between_tools"}, "output_config": {"effort": "max"}}, {"reasoning_effort": "high"}),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
    ],
)
def test_what_the_template_is_told(more: dict[str, Any], variables: dict[str, Any]) -> None:
    assert json.loads(parsed(**more).request.chat_template_kwargs or "{}") == variables


def test_two_forms_of_the_answer_are_one_too_many() -> None:
    form = {"type": "json_schema", "schema": {}}
    assert parsed(output_format=form).request.sampling.constraint.json_schema == "{}"
    with pytest.raises(InvalidArgument, match="output_format: excludes"):
        parsed(output_format=form, output_config={"format": form})
