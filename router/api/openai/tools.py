"""Tools of chat completions, as OpenAI and vLLM write them: offered, chosen, called in the history; variables of templates."""

from __future__ import annotations

import json
from typing import Any

from pdmesh.v1 import mesh_pb2
from router.api.http.fields import Fields, as_fields, json_text
from router.api.validation import refuse

_CHOICES = {
    "auto": mesh_pb2.TOOL_CHOICE_AUTO,
    "none": mesh_pb2.TOOL_CHOICE_NONE,
    "required": mesh_pb2.TOOL_CHOICE_REQUIRED,
}
_NO_THOUGHTS = {"enable_thinking": False, "thinking": False}
"""What templates of several families ask for."""


def read_tools(fields: Fields, request: mesh_pb2.ChatRequest) -> dict[str, str]:
    """Read `tools`, `tool_choice` and `parallel_tool_calls` into a request; return names for `errors.renamed`.

    Raises InvalidArgument naming the field."""
    names: dict[str, str] = {}
    for number, item in enumerate(fields.items("tools") or []):
        tool = as_fields(f"tools[{number}]", item)
        _check_kind(tool)
        request.tools.append(_tool(_function(tool)))
        tool.finish({"cache_control"}, {})
        names[f"tools[{number}]"] = f"tools[{number}].function"
    _read_choice(fields, request)
    if fields.has("parallel_tool_calls"):
        request.parallel_tool_calls = fields.flag("parallel_tool_calls")
    return names


def read_template(fields: Fields, request: mesh_pb2.ChatRequest) -> None:
    """Read what the chat template gets: `chat_template_kwargs`, `enable_thinking`, `reasoning_effort`, and how the prompt ends.

    Raises InvalidArgument naming the field."""
    variables: dict[str, Any] = {}
    effort = fields.text("reasoning_effort")
    if effort is not None:
        variables |= _NO_THOUGHTS if effort == "none" else {"reasoning_effort": effort}
    if fields.has("enable_thinking"):
        variables["enable_thinking"] = fields.flag("enable_thinking")
    given = fields.value("chat_template_kwargs")
    if fields.inner("chat_template_kwargs") is not None and isinstance(given, dict):
        variables |= given
    if variables:
        request.chat_template_kwargs = json_text("chat_template_kwargs", variables)
    if fields.has("add_generation_prompt"):
        request.add_generation_prompt = fields.flag("add_generation_prompt")
    request.continue_final_message = fields.flag("continue_final_message")


def read_calls(fields: Fields, message: mesh_pb2.ChatMessage) -> None:
    """Read an assistant's calls and reasoning into a message. Raises InvalidArgument naming the field."""
    reasoning = fields.text("reasoning_content"), fields.text("reasoning")
    message.reasoning = reasoning[0] or reasoning[1] or ""
    for number, item in enumerate(fields.items("tool_calls") or []):
        call = as_fields(f"{fields.param('tool_calls')}[{number}]", item)
        _check_kind(call)
        function = _function(call)
        message.tool_calls.add(id=call.text("id") or "", name=_name(function), arguments=_arguments(function))
        function.finish((), {})
        call.finish({"index"}, {})


def read_answer(fields: Fields, message: mesh_pb2.ChatMessage) -> None:
    """Read which call a tool's message answers. Raises InvalidArgument naming the field."""
    message.tool_call_id, message.name = fields.text("tool_call_id") or "", fields.text("name") or ""
    if not message.tool_call_id:
        refuse(fields.param("tool_call_id"), "is missing; give the id of the call that this message answers")


def _read_choice(fields: Fields, request: mesh_pb2.ChatRequest) -> None:
    value = fields.value("tool_choice")
    if value is None:
        return
    if isinstance(value, str):
        _set_mode(request, "tool_choice", value)
        return
    choice = as_fields("tool_choice", value)
    if choice.text("type") == "allowed_tools":
        _read_allowed(choice, request)
        return
    _check_kind(choice)
    function = _function(choice)
    request.tool_choice = mesh_pb2.TOOL_CHOICE_REQUIRED
    request.tool_names.append(_name(function))
    function.finish((), {})
    choice.finish((), {})


def _read_allowed(choice: Fields, request: mesh_pb2.ChatRequest) -> None:
    """Read `{"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}`."""
    allowed = choice.inner("allowed_tools")
    if allowed is None:
        refuse("tool_choice.allowed_tools", "is missing")
    _set_mode(request, allowed.param("mode"), allowed.text("mode") or "auto")
    for number, item in enumerate(allowed.items("tools") or []):
        tool = as_fields(f"{allowed.param('tools')}[{number}]", item)
        _check_kind(tool)
        request.tool_names.append(_name(_function(tool)))
    allowed.finish((), {})
    choice.finish((), {})


def _set_mode(request: mesh_pb2.ChatRequest, param: str, mode: str) -> None:
    if mode not in _CHOICES:
        refuse(param, f"is none of {', '.join(_CHOICES)}, and no named function")
    request.tool_choice = _CHOICES[mode]


def _check_kind(fields: Fields) -> None:
    if fields.text("type") not in (None, "function"):
        refuse(fields.param("type"), 'only "function" is supported')


def _function(fields: Fields) -> Fields:
    function = fields.inner("function")
    if function is None:
        refuse(fields.param("function"), 'is missing; send an object such as {"name": ...}')
    return function


def _name(fields: Fields) -> str:
    name = fields.text("name")
    if not name:
        refuse(fields.param("name"), "is missing; give the tool's name")
    return name


def _tool(fields: Fields) -> mesh_pb2.Tool:
    tool = mesh_pb2.Tool(name=_name(fields), description=fields.text("description") or "", strict=fields.flag("strict"))
    parameters = fields.value("parameters")
    if fields.inner("parameters") is not None:
        tool.parameters = json_text(fields.param("parameters"), parameters)
    fields.finish((), {})
    return tool


def _arguments(fields: Fields) -> str:
    """Return JSON text of an object; some programs send the object itself."""
    value, param = fields.value("arguments"), fields.param("arguments")
    if isinstance(value, dict):
        return json_text(param, value)
    text = fields.text("arguments") or ""
    try:
        is_object = not text.strip() or isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        refuse(param, "is no JSON object as text")
    return text.strip()
