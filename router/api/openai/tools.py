"""Tools of chat completions, as OpenAI and vLLM write them: offered and chosen; variables of templates."""

from __future__ import annotations

from pdmesh.v1 import mesh_pb2
from router.api.http.fields import json_text
from router.api.openai.bodies import ChatPrompt
from router.api.openai.messages import AllowedChoice, Choice, Function

_CHOICES = {
    "auto": mesh_pb2.TOOL_CHOICE_AUTO,
    "none": mesh_pb2.TOOL_CHOICE_NONE,
    "required": mesh_pb2.TOOL_CHOICE_REQUIRED,
}
_NO_THOUGHTS = {"enable_thinking": False, "thinking": False}
"""What templates of several families ask for."""


def read_tools(wanted: ChatPrompt, request: mesh_pb2.ChatRequest) -> dict[str, str]:
    """Put `tools`, `tool_choice` and `parallel_tool_calls` into a request; return names for `errors.renamed`."""
    request.tools.extend(_tool(tool.function) for tool in wanted.tools)
    if wanted.tool_choice is not None:
        _choose(wanted.tool_choice, request)
    if wanted.parallel_tool_calls is not None:
        request.parallel_tool_calls = wanted.parallel_tool_calls
    return {f"tools[{number}]": f"tools[{number}].function" for number in range(len(wanted.tools))}


def read_template(wanted: ChatPrompt, request: mesh_pb2.ChatRequest) -> None:
    """Put what the chat template gets into a request: its variables, and how the prompt ends.

    Raises InvalidArgument naming the field."""
    variables: dict[str, object] = {}
    if wanted.reasoning_effort is not None:
        is_off = wanted.reasoning_effort == "none"
        variables |= _NO_THOUGHTS if is_off else {"reasoning_effort": wanted.reasoning_effort}
    if wanted.enable_thinking is not None:
        variables["enable_thinking"] = wanted.enable_thinking
    variables |= wanted.chat_template_kwargs or {}
    if variables:
        request.chat_template_kwargs = json_text("chat_template_kwargs", variables)
    if wanted.add_generation_prompt is not None:
        request.add_generation_prompt = wanted.add_generation_prompt
    request.continue_final_message = wanted.continue_final_message


def read_shown(wanted: ChatPrompt, message: mesh_pb2.TokenizeRequest) -> dict[str, str]:
    """Put what a chat with the messages to tokenize would show besides into `message`; return names as `read_tools` does.

    Raises InvalidArgument naming the field."""
    chat = mesh_pb2.ChatRequest()
    names = read_tools(wanted, chat)
    read_template(wanted, chat)
    if chat.tool_choice != mesh_pb2.TOOL_CHOICE_NONE:
        message.tools.extend(chat.tools)
    message.chat_template_kwargs, message.continue_final_message = chat.chat_template_kwargs, chat.continue_final_message
    if chat.HasField("add_generation_prompt"):
        message.add_generation_prompt = chat.add_generation_prompt
    return names


def _tool(function: Function) -> mesh_pb2.Tool:
    return mesh_pb2.Tool(
        name=function.name,
        description=function.description or "",
        strict=function.strict,
        parameters=function.parameters or "",
    )


def _choose(choice: Choice, request: mesh_pb2.ChatRequest) -> None:
    if isinstance(choice, str):
        request.tool_choice = _CHOICES[choice]
    elif isinstance(choice, AllowedChoice):
        request.tool_choice = _CHOICES[choice.allowed_tools.mode]
        request.tool_names.extend(tool.function.name for tool in choice.allowed_tools.tools)
    else:
        request.tool_choice = mesh_pb2.TOOL_CHOICE_REQUIRED
        request.tool_names.append(choice.function.name)
