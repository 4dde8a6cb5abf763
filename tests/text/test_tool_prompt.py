"""Tools and calls in conversations: as templates see them, and as plain turns for those that know none."""

from __future__ import annotations

from typing import Any

import pytest

from pdmesh.text.chat_template import ChatTemplate, Message, Rendering, ToolCall
from pdmesh.text.parsers.machine import parsed
from pdmesh.text.parsers.registry import PROMPTED, TOOL_FORMATS, begins_inside, may_think, reasoning_format_of, tool_format_of
from pdmesh.text.tool_prompt import with_tools

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
HISTORY = [
    Message("user", "And in Köln?"),
    Message("assistant", "", tool_calls=(ToolCall("weather", {"city": "Köln"}, "call-1"),), thoughts="Ask."),
    Message("tool", "rain", call_id="call-1", name="weather"),
]
# As templates of this family are built; the words are our own.
SOURCE = (
    "{%- if tools %}TOOLS\n{%- for tool in tools %}\n{{ tool | tojson }}{%- endfor %}\n{% endif %}"
    "{%- for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{%- if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}"
    "{%- for call in m.tool_calls or [] %}<call>{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}</call>{% endfor %}"
    "{%- if m.tool_call_id %}({{ m.tool_call_id }}, {{ m.name }}){% endif %}</end>\n{% endfor %}"
    "{%- if add_generation_prompt %}<assistant>{% if enable_thinking is defined and not enable_thinking %}-{% endif %}{% endif %}"
)


def render(messages: list[Message], how: Rendering) -> str:
    return ChatTemplate(SOURCE, {}).render(messages, how)


def by_transformers(messages: list[Message], how: Rendering) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(
        conversations=[[message.as_template() for message in messages]],
        tools=[dict(tool) for tool in how.tools] or None,
        chat_template=SOURCE,
        add_generation_prompt=how.add_generation_prompt and not how.continues,
        continue_final_message=how.continues,
        **how.variables,
    )
    return str(rendered[0])


@pytest.mark.parametrize(
    ("messages", "how"),
    [
        (HISTORY, Rendering(tools=(WEATHER,))),
        (HISTORY, Rendering(add_generation_prompt=False)),
        (HISTORY[:1], Rendering(variables={"enable_thinking": False})),
        ([*HISTORY, Message("assistant", "It rains, ")], Rendering(tools=(WEATHER,), continues=True)),
    ],
)
def test_conversations_are_rendered_as_transformers_does(messages: list[Message], how: Rendering) -> None:
    assert render(messages, how) == by_transformers(messages, how)


def test_a_message_that_goes_on_has_no_end() -> None:
    assert render([Message("user", "Hi"), Message("assistant", "Well,")], Rendering(continues=True)).endswith("<assistant>Well,")
    with pytest.raises(ValueError, match="continue_final_message"):
        ChatTemplate("nothing of it", {}).render([Message("assistant", "Well,")], Rendering(continues=True))
    with pytest.raises(ValueError, match="continue_final_message"):
        render([Message("assistant", " ")], Rendering(continues=True))


def test_variables_do_not_replace_what_a_request_sets() -> None:
    with pytest.raises(ValueError, match="chat_template_kwargs: messages, tools is set by the request itself"):
        render(HISTORY, Rendering(variables={"tools": [], "messages": []}))


def test_a_template_knows_tools_if_it_names_them() -> None:
    assert ChatTemplate(SOURCE, {}).knows_tools
    assert not ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %} tools", {}).knows_tools
    with pytest.raises(ValueError, match="template refused them"):
        _ = ChatTemplate("{% for %}", {}).knows_tools


def test_tools_for_a_template_that_knows_none() -> None:
    turns = with_tools([Message("system", "Be brief."), *HISTORY], [WEATHER])
    assert [turn.role for turn in turns] == ["system", "user", "assistant", "user"]
    assert turns[0].content.startswith("Be brief.\n\nYou may call functions.") and '"name": "weather"' in turns[0].content
    assert "rain" in turns[3].content and all(not turn.tool_calls and not turn.call_id for turn in turns)
    said = parsed(TOOL_FORMATS[PROMPTED].parse({}), [turns[2].content])
    assert [(call.name, call.arguments) for call in said.calls] == [("weather", '{"city": "Köln"}')]
    assert with_tools(HISTORY[:1], [WEATHER])[0].role == "system"
    assert with_tools(HISTORY[:1], []) == HISTORY[:1]


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("{{ '<tool_call>\\n' + call | tojson }}", "hermes"),
        ("<tool_call>\n<function=x>", "qwen_coder"),
        ("<tool_call>{{ name }}\n<arg_key>", "glm"),
        ("<|tool_calls_section_begin|>", "kimi"),
        ("<｜tool▁calls▁begin｜>", "deepseek"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|start|>assistant<|channel|>final<|message|>", "harmony"),
        ("<|start_of_role|>assistant<|end_of_role|><tool_call>", "granite"),
        ("<|tool|>{{ tools }}<|/tool|>", "phi"),
        ("<|start_header_id|>ipython", "llama"),
        ("<minimax:tool_call>", "minimax"),
        ("<start_function_call>", "gemma"),
        ("{{ message.content }}", "none"),
    ],
)
def test_a_template_shows_its_format(part: str, name: str) -> None:
    assert tool_format_of(part) == name


def test_a_template_shows_its_thoughts() -> None:
    assert reasoning_format_of("{{ '<think>\\n' }}") == "think" and reasoning_format_of("[THINK]") == "mistral"
    assert reasoning_format_of("plain") == "none"
    assert reasoning_format_of("{{ content.split('</think>')[-1] }}") == "deepseek_r1"
    assert begins_inside("<assistant><think>\n", "think") and not begins_inside("<assistant>", "think")
    assert not begins_inside("<think>", "none")
    assert begins_inside("<assistant>", "deepseek_r1") and not begins_inside("<think></think>\n", "deepseek_r1")
    assert may_think("<assistant>", "think") and not may_think("<think></think>\n", "think") and not may_think("", "none")
