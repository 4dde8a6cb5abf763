"""From the body of an HTTP request to a message of `pdmesh.v1`.

A turn of Anthropic's API holds text, calls and their results as blocks; chat templates know one message for each result. So a
turn may become several messages. Consecutive turns of one role become one turn, as in Anthropic's own API.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from pdmesh.sampling_params import LEAST_TOP_P, MIN_TEMPERATURE
from pdmesh.v1 import common_pb2, mesh_pb2
from router.api.anthropic.bodies import (
    Block,
    CustomTool,
    Message,
    MessageBody,
    OutputFormat,
    PromptBody,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from router.api.http.errors import Names
from router.api.http.fields import JsonObject, json_text
from router.api.http.sessions import NO_SESSION, SessionBody
from router.api.http.types import checked
from router.api.validation import refuse

BILLING = "x-anthropic-billing-header:"
"""Begins a line that coding agents put before their system prompt: accounting, which differs in every request. It would keep the
prefix cache from finding anything."""


@dataclass(frozen=True)
class Call:
    """Hold one request. `origins`: the client's name of each message of `pdmesh.v1`. `hides_thoughts`: thinking blocks come
    empty."""

    request: mesh_pb2.ChatRequest
    origins: tuple[str, ...]
    is_streamed: bool = False
    stop_sequences: tuple[str, ...] = ()
    hides_thoughts: bool = False
    session: SessionBody = NO_SESSION

    @property
    def requests(self) -> tuple[mesh_pb2.ChatRequest]:
        """Return its one message of `pdmesh.v1`."""
        return (self.request,)

    def names_of(self, number: int) -> Names:
        """Return the client's names of fields, for errors."""
        messages = {f"messages[{at}]": origin for at, origin in enumerate(self.origins)}
        schemas = {f"tools[{at}].parameters": f"tools[{at}].input_schema" for at in range(len(self.request.tools))}
        return {**_NAMES, **messages, **schemas}


_NAMES = {
    "prompt": "messages",
    "sampling.stop": "stop_sequences",
    "sampling.constraint": "output_config.format.schema",
    "sampling.constraint.json_schema": "output_config.format.schema",
    "chat_template_kwargs": "thinking",
    "continue_final_message": "messages",
}


def parse_message(body: JsonObject, options: mesh_pb2.RequestOptions) -> Call:
    """Return the call for the body of `/v1/messages`. Raises InvalidArgument that names the field as the client does."""
    message = checked(MessageBody, body)
    request, origins = _prompt(message, options)
    request.sampling.CopyFrom(_sampling(message))
    request.options.clip_max_tokens = True  # agents ask for what Anthropic's models could write, whatever the context
    hides_thoughts = message.thinking is not None and message.thinking.display == "omitted"
    return Call(request, origins, message.stream, tuple(message.stop_sequences), hides_thoughts, message)


def parse_count(body: JsonObject, options: mesh_pb2.RequestOptions) -> Call:
    """Return the prompt in the body of `/v1/messages/count_tokens`, as a call that is not run. Raises InvalidArgument that names
    the field."""
    return Call(*_prompt(checked(PromptBody, body), options))


def _prompt(body: PromptBody, options: mesh_pb2.RequestOptions) -> tuple[mesh_pb2.ChatRequest, tuple[str, ...]]:
    """Return the request with all that its prompt is made of, and the origins of its messages."""
    sourced = list(_conversation(body))
    request = mesh_pb2.ChatRequest(
        model=body.model,
        options=options,
        messages=[message for message, _ in sourced],
        tools=[_tool(number, tool) for number, tool in enumerate(body.tools) if isinstance(tool, CustomTool)],
        continue_final_message=_continues(body.messages),
    )
    if variables := _template_variables(body):
        request.chat_template_kwargs = json.dumps(variables)
    if body.tool_choice is not None:
        _choose(body.tool_choice, request)
    return request, tuple(origin for _, origin in sourced)


# The conversation.


class _Sourced(NamedTuple):
    """Hold a message of `pdmesh.v1`, and the field of the request that it comes from."""

    message: mesh_pb2.ChatMessage
    origin: str


class _Located(NamedTuple):
    """Hold a block and the field that it is in."""

    block: Block
    param: str


def _conversation(body: PromptBody) -> Iterator[_Sourced]:
    system = _joined(_without_billing([body.system] if isinstance(body.system, str) else _texts(body.system)))
    if system:
        yield _Sourced(mesh_pb2.ChatMessage(role="system", content=system), "system")
    for role, turns in groupby(enumerate(body.messages), key=lambda turn: turn[1].role):
        blocks = [located for number, message in turns for located in _blocks(number, message)]
        yield from _assistant(blocks) if role == "assistant" else _said(role, blocks)


def _blocks(number: int, message: Message) -> Iterable[_Located]:
    """Return the blocks of a message; a string is one block."""
    param = f"messages[{number}]"
    if isinstance(message.content, str):
        return [_Located(TextBlock(type="text", text=message.content), param)]
    return [_Located(block, f"{param}.content[{at}]") for at, block in enumerate(message.content)]


def _said(role: str, blocks: Iterable[_Located]) -> Iterator[_Sourced]:
    """Yield the messages of a turn of a user or of the system: one for each tool's result, and one for consecutive texts."""
    for is_result, group in groupby(blocks, key=lambda located: isinstance(located.block, ToolResultBlock)):
        located = list(group)
        origin = _message_of(located[0].param)
        if is_result and role == "user":
            yield from (_Sourced(_result(each.block), each.param) for each in located if isinstance(each.block, ToolResultBlock))
        else:
            texts = [_text_of(each, role) for each in located]
            said = _joined(_without_billing(texts) if role == "system" else texts)
            yield _Sourced(mesh_pb2.ChatMessage(role=role, content=said), origin)


def _text_of(located: _Located, role: str) -> str:
    if not isinstance(located.block, TextBlock):
        refuse(f"{located.param}.type", f"{located.block.type!r} is no block of a message whose role is {role!r}")
    return located.block.text


def _assistant(blocks: Sequence[_Located]) -> Iterator[_Sourced]:
    """Yield the one message of an assistant's turn; the model's template decides where its thoughts and calls stand."""
    message = mesh_pb2.ChatMessage(role="assistant")
    for block, param in blocks:
        if isinstance(block, ToolUseBlock):
            message.tool_calls.add(id=block.id, name=block.name, arguments=json_text(f"{param}.input", block.input))
        elif isinstance(block, ToolResultBlock):
            refuse(f"{param}.type", "'tool_result' is no block of a message whose role is 'assistant'; send it as the user's")
    message.content = _joined(block.text for block, _ in blocks if isinstance(block, TextBlock))
    message.reasoning = _joined(block.thinking for block, _ in blocks if isinstance(block, ThinkingBlock))
    if blocks:
        yield _Sourced(message, _message_of(blocks[0].param))


def _result(block: ToolResultBlock) -> mesh_pb2.ChatMessage:
    """Return a tool's answer. Templates have no place for `is_error`, so the text says it."""
    text = block.content if isinstance(block.content, str) else _joined(_texts(block.content))
    if block.is_error and not text.lower().startswith("error"):
        text = f"Error: {text}"
    return mesh_pb2.ChatMessage(role="tool", content=text, tool_call_id=block.tool_use_id)


def _continues(messages: Sequence[Message]) -> bool:
    """Return whether the output goes on with the last message: one of the assistant. Raises InvalidArgument where it holds no
    text, or a call."""
    if not messages or messages[-1].role != "assistant":
        return False
    blocks = list(_blocks(len(messages) - 1, messages[-1]))
    if not blocks or not isinstance(blocks[-1].block, TextBlock) or not blocks[-1].block.text.strip():
        refuse(
            f"messages[{len(messages) - 1}].content",
            "the last message is the assistant's, and has no text at its end to go on with; leave it out, or add the user's next",
        )
    return True


def _texts(blocks: Iterable[object]) -> list[str]:
    return [block.text for block in blocks if isinstance(block, TextBlock)]


def _without_billing(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        if not text.startswith(BILLING):
            yield text
        elif rest := text.partition("\n")[2]:
            yield rest


def _joined(texts: Iterable[str]) -> str:
    return "\n".join(texts)


def _message_of(param: str) -> str:
    return param.partition(".")[0]


# Tools, thinking and the form of the answer.


def _tool(number: int, tool: CustomTool) -> mesh_pb2.Tool:
    description = tool.description
    if tool.input_examples:
        examples = "\n".join(json_text(f"tools[{number}].input_examples", example) for example in tool.input_examples)
        description = f"{description}\n\nExamples of its input:\n{examples}".strip()
    parameters = json_text(f"tools[{number}].input_schema", tool.input_schema)
    return mesh_pb2.Tool(name=tool.name, description=description, parameters=parameters, strict=tool.strict)


_CHOICES = {
    "auto": mesh_pb2.TOOL_CHOICE_AUTO,
    "none": mesh_pb2.TOOL_CHOICE_NONE,
    "any": mesh_pb2.TOOL_CHOICE_REQUIRED,
    "tool": mesh_pb2.TOOL_CHOICE_REQUIRED,
}


def _choose(choice: ToolChoice, request: mesh_pb2.ChatRequest) -> None:
    request.tool_choice = _CHOICES[choice.type]
    request.parallel_tool_calls = not choice.disable_parallel_tool_use
    if choice.type != "tool":
        return
    if not choice.name:
        refuse("tool_choice.name", "is missing; name the tool to call")
    request.tool_names.append(choice.name)


_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""The names that templates know."""


def _template_variables(body: PromptBody) -> dict[str, Any]:
    """Return variables of the model's chat template: names that the templates of several families read. Without `thinking` the
    model is asked not to think, as with Anthropic; with "adaptive" its template decides."""
    thinking = body.thinking
    variables: dict[str, Any] = {}
    if thinking is None or thinking.type in ("enabled", "disabled"):
        thinks = thinking is not None and thinking.type == "enabled"
        variables = {"enable_thinking": thinks, "thinking": thinks}
    if thinking is not None and thinking.budget_tokens is not None:
        variables["thinking_budget"] = thinking.budget_tokens
    effort = body.output_config and body.output_config.effort
    return variables | ({"reasoning_effort": _EFFORTS[effort]} if effort else {})


def _sampling(body: MessageBody) -> common_pb2.SamplingParams:
    """Return the parameters; the router checks their ranges. Both ends of Anthropic's ranges are taken: the lowest temperatures
    are greedy, and with the lowest top_p the likeliest token stays."""
    sampling = common_pb2.SamplingParams(max_tokens=body.max_tokens, stop=body.stop_sequences)
    if body.temperature is not None:
        sampling.temperature = 0 if 0 < body.temperature < MIN_TEMPERATURE else body.temperature
    if body.top_p is not None:
        sampling.top_p = body.top_p or LEAST_TOP_P
    if body.top_k is not None:
        sampling.top_k = body.top_k
    if body.seed is not None:
        sampling.seed = body.seed % 2**64
    wanted = _format(body)
    if wanted is not None:
        sampling.constraint.json_schema = json_text("output_config.format.schema", wanted.json_schema)
    return sampling


def _format(body: PromptBody) -> OutputFormat | None:
    newer = body.output_config.format if body.output_config else None
    if newer and body.output_format:
        refuse("output_format", "excludes output_config.format, its newer name; give one of them")
    return newer or body.output_format
