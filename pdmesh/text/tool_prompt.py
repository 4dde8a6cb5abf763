"""Tools for a model whose chat template knows none: described in the system message, with calls in the form of Hermes.

system      …, You may call functions. …, a function a line
assistant   …, <tool_call>{"name": …, "arguments": {…}}</tool_call>
tool        becomes a user's turn: <tool_response>…</tool_response>
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pdmesh.text.chat_template import Message, ToolCall
from pdmesh.text.exact_json import dumps

_SYSTEM = "system"
_RULES = (
    "You may call functions. To call one, write its name and its arguments like this, and then wait for the result:\n"
    '<tool_call>\n{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}\n</tool_call>\n'
    "The functions, with their arguments as JSON schemas:"
)


def with_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return a conversation of turns that every template knows, with the tools, if any, in its system message. Pure."""
    turns = [_plain(message) for message in messages]
    if not tools:
        return turns
    described = "\n".join([_RULES, *(dumps(_function(tool), ensure_ascii=False) for tool in tools)])
    if turns and turns[0].role == _SYSTEM:
        return [replace(turns[0], content=f"{turns[0].content}\n\n{described}".lstrip()), *turns[1:]]
    return [Message(_SYSTEM, described), *turns]


def _function(tool: Mapping[str, Any]) -> Any:
    return tool.get("function", tool)


def _plain(message: Message) -> Message:
    if message.role == "tool":
        return Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
    if not message.tool_calls:
        return Message(message.role, message.content)
    calls = "\n".join(map(_written, message.tool_calls))
    return Message(message.role, f"{message.content}\n{calls}".lstrip())


def _written(call: ToolCall) -> str:
    said = dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)
    return f"<tool_call>\n{said}\n</tool_call>"
