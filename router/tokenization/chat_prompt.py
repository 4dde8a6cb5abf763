"""The conversation of a chat and its tools, checked, in the form that chat templates render."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdmesh.text.chat_template import Message, Rendering, ToolCall
from pdmesh.text.exact_json import number_of
from pdmesh.v1 import mesh_pb2
from router.api.validation import Messages, check_messages, refuse

MAX_TOOLS = 1024
MAX_CALLS = 1024
"""Of one message."""
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_ANY_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class OfferedTools:
    """The tools of a request. `schemas`: of the parameters, by name. `strict`: names of those whose schema must be followed.
    `names`: those that may be called. Without schemas nothing is to be called."""

    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    strict: frozenset[str] = frozenset()
    names: tuple[str, ...] = ()
    is_required: bool = False
    is_parallel: bool = True


@dataclass(frozen=True)
class ChatPrompt:
    """Hold a conversation and how it is rendered. `num_bytes`: of its text, and of what describes the tools."""

    turns: Sequence[Message]
    num_bytes: int
    how: Rendering = field(default_factory=Rendering)
    tools: OfferedTools = field(default_factory=OfferedTools)


def of_messages(messages: Messages, max_bytes: int) -> ChatPrompt:
    """Return messages alone. Raises InvalidArgument naming the field."""
    check_messages(messages, max_bytes)
    turns = [_turn(f"messages[{number}]", message) for number, message in enumerate(messages)]
    return ChatPrompt(_named(turns), sum(map(_num_bytes, messages)))


def of_request(request: mesh_pb2.ChatRequest, max_bytes: int) -> ChatPrompt:
    """Return the conversation of a request, with its tools. Raises InvalidArgument naming the field."""
    plain = of_messages(request.messages, max_bytes)
    num_bytes = plain.num_bytes + len(request.chat_template_kwargs.encode()) + sum(tool.ByteSize() for tool in request.tools)
    if num_bytes > max_bytes:
        refuse("tools", f"they and the messages have {num_bytes} bytes, {max_bytes} are allowed (max_prompt_bytes)")
    variables = json_object("chat_template_kwargs", request.chat_template_kwargs)
    offered = _offered(request)
    how = Rendering(
        tools=tuple(_described(tool, offered.schemas[tool.name]) for tool in request.tools if tool.name in offered.schemas),
        variables=variables,
        add_generation_prompt=request.add_generation_prompt if request.HasField("add_generation_prompt") else True,
        continues=request.continue_final_message,
    )
    if how.continues and request.add_generation_prompt:
        refuse("continue_final_message", "excludes add_generation_prompt: the last message goes on, or a new one begins")
    return ChatPrompt(plain.turns, num_bytes, how, offered)


def of_tokenize(request: mesh_pb2.TokenizeRequest, max_bytes: int) -> ChatPrompt:
    """As `of_request`, of messages whose tokens alone are wanted."""
    chat = mesh_pb2.ChatRequest(
        messages=request.messages,
        tools=request.tools,
        chat_template_kwargs=request.chat_template_kwargs,
        continue_final_message=request.continue_final_message,
    )
    if request.HasField("add_generation_prompt"):
        chat.add_generation_prompt = request.add_generation_prompt
    return of_request(chat, max_bytes)


def json_object(field: str, text: str) -> dict[str, Any]:
    """Return a JSON object that a field holds as text; empty for no text. Raises InvalidArgument."""
    if not text:
        return {}
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=number_of)
    except (ValueError, RecursionError):
        refuse(field, "is no JSON that can be read; send an object as text")
    if not isinstance(value, dict):
        refuse(field, 'is no JSON object; send one such as {"city": "Paris"}')
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _turn(path: str, message: mesh_pb2.ChatMessage) -> Message:
    if len(message.tool_calls) > MAX_CALLS:
        refuse(f"{path}.tool_calls", f"{len(message.tool_calls)} calls are more than {MAX_CALLS}")
    calls = [_call(f"{path}.tool_calls[{number}]", call) for number, call in enumerate(message.tool_calls)]
    return Message(message.role, message.content, tuple(calls), message.reasoning, message.tool_call_id, message.name)


def _call(path: str, call: mesh_pb2.ToolCall) -> ToolCall:
    if not call.name:
        refuse(f"{path}.name", "is missing; give the tool's name")
    return ToolCall(call.name, json_object(f"{path}.arguments", call.arguments), call.id)


def _named(turns: Sequence[Message]) -> list[Message]:
    """Return turns in which every answer of a tool has the tool's name, which some templates need. Pure."""
    names: dict[str, str] = {}
    found = []
    for turn in turns:
        names |= {call.call_id: call.name for call in turn.tool_calls if call.call_id}
        name = turn.name or names.get(turn.call_id, "") if turn.role == "tool" else turn.name
        found.append(Message(turn.role, turn.content, turn.tool_calls, turn.thoughts, turn.call_id, name))
    return found


def _num_bytes(message: mesh_pb2.ChatMessage) -> int:
    calls = sum(call.ByteSize() for call in message.tool_calls)
    return len(message.content.encode()) + len(message.reasoning.encode()) + calls


def _offered(request: mesh_pb2.ChatRequest) -> OfferedTools:
    if len(request.tools) > MAX_TOOLS:
        refuse("tools", f"{len(request.tools)} are more than {MAX_TOOLS}")
    if request.tool_choice not in mesh_pb2.ToolChoice.values():
        refuse("tool_choice", f"{request.tool_choice} is none of {', '.join(mesh_pb2.ToolChoice.keys())}")
    schemas = _schemas(request.tools)
    names = tuple(dict.fromkeys(request.tool_names)) or tuple(schemas)
    for name in names:
        if name not in schemas:
            refuse("tool_choice", f"{name[:80]!r} is none of the tools; name one of {', '.join(schemas)[:300] or 'them'}")
    is_required = request.tool_choice == mesh_pb2.TOOL_CHOICE_REQUIRED
    if is_required and not schemas:
        refuse("tool_choice", "requires a call, and there are no tools; send some")
    if request.tool_choice == mesh_pb2.TOOL_CHOICE_NONE:
        return OfferedTools()
    strict = frozenset(tool.name for tool in request.tools if tool.strict)
    is_parallel = request.parallel_tool_calls if request.HasField("parallel_tool_calls") else True
    is_named = is_required and len(request.tool_names) == 1
    return OfferedTools(schemas, strict, names, is_required, is_parallel and not is_named)


def _schemas(tools: Sequence[mesh_pb2.Tool]) -> dict[str, dict[str, Any]]:
    schemas: dict[str, dict[str, Any]] = {}
    for number, tool in enumerate(tools):
        if not _NAME.fullmatch(tool.name):
            refuse(f"tools[{number}].name", f"{tool.name[:80]!r} is not 1 to 128 of [A-Za-z0-9_.:/-]")
        if tool.name in schemas:
            refuse(f"tools[{number}].name", f"{tool.name!r} is the name of two tools")
        schemas[tool.name] = _schema(f"tools[{number}].parameters", tool)
    return schemas


def _schema(path: str, tool: mesh_pb2.Tool) -> dict[str, Any]:
    schema = json_object(path, tool.parameters)
    if schema.get("type", "object") != "object":
        refuse(path, 'describes no object; its type must be "object"')
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not all(isinstance(each, dict | bool) for each in properties.values()):
        refuse(f"{path}.properties", "is no object of schemas")
    if not isinstance(required, list) or not all(isinstance(each, str) for each in required):
        refuse(f"{path}.required", "is no array of names")
    return schema


def _described(tool: mesh_pb2.Tool, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool as templates see it: OpenAI's form."""
    described = {"description": tool.description} if tool.description else {}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": dict(schema or _ANY_PARAMETERS)}}
