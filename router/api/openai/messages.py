"""Bodies of OpenAI's chats as types: messages with their parts and calls, and the tools that a model may call."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)

from router.api.http.fields import dumped, shown
from router.api.http.types import FIRST_ERROR, Body, Hint, Only, Text, Unsupported, at_most, missing
from router.api.validation import MAX_MESSAGES

# Tools, and calls of them.


def _arguments(value: object) -> str:
    """Return JSON text of an object; some programs send the object itself."""
    if isinstance(value, dict):
        return dumped(value)
    if not isinstance(value, str):
        raise ValueError("is neither a JSON object as text nor an object")
    try:
        is_object = not value.strip() or isinstance(json.loads(value), dict)
        value.encode()
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise ValueError("is no JSON object as text")
    return value.strip()


def _dumped_object(value: object) -> str:
    if not isinstance(value, dict):
        raise ValueError(f"{shown(value)} is not an object")
    return dumped(value)


Arguments = Annotated[Any, AfterValidator(_arguments), WithJsonSchema({"type": ["string", "object"]})]
JsonText = Annotated[Any, AfterValidator(_dumped_object), WithJsonSchema({"type": "object"})]
"""Type of an object that goes on as JSON text."""
FunctionOnly = Annotated[Text | None, Only("function")]
Name = Annotated[Text, Field(min_length=1)]


class Function(Body):
    """A function that the model may call."""

    name: Name
    description: Text | None = None
    strict: bool = False
    """Refuses a schema that calls cannot be held to."""
    parameters: JsonText | None = None
    """A JSON Schema of an object."""


class Tool(Body):
    """A tool that the model may call."""

    type: FunctionOnly = None
    function: Function
    cache_control: Annotated[Any, Hint("prefixes of prompts are cached by themselves")] = None


class CalledFunction(Body):
    """Which function was called, with what."""

    name: Name
    arguments: Arguments = ""
    """A JSON object, as text or as it is."""


class ToolCall(Body):
    """A call that an assistant made."""

    type: FunctionOnly = None
    id: Text = ""
    function: CalledFunction
    index: Annotated[Any, Hint("of pieces of a stream")] = None


# Which tools are to be called.


class NamedFunction(Body):
    """A function by its name."""

    name: Name


class NamedTool(Body):
    """The one tool that is to be called."""

    type: FunctionOnly = None
    function: NamedFunction


class AllowedFunction(Body):
    """A function by its name; what else is said of it is known from `tools`."""

    model_config = ConfigDict(extra="ignore")
    name: Name


class AllowedTool(Body):
    """A tool among those that may be called."""

    model_config = ConfigDict(extra="ignore")
    type: FunctionOnly = None
    function: AllowedFunction


Mode = Literal["auto", "none", "required"]


class AllowedTools(Body):
    """The tools that may be called."""

    mode: Mode = "auto"
    tools: Annotated[list[AllowedTool], FIRST_ERROR] = Field(default_factory=list)


class AllowedChoice(Body):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _choice_tag(value: object) -> str:
    if isinstance(value, str | AllowedChoice | NamedTool):
        return {str: "<mode>", AllowedChoice: "<allowed>"}.get(type(value), "<named>")
    return "<allowed>" if isinstance(value, dict) and value.get("type") == "allowed_tools" else "<named>"


Choice = Annotated[
    Annotated[Mode, Tag("<mode>")] | Annotated[AllowedChoice, Tag("<allowed>")] | Annotated[NamedTool, Tag("<named>")],
    Discriminator(_choice_tag),
]


# Messages.


class TextPart(Body):
    """A piece of a message's text."""

    type: Annotated[Text, Only("text", why="the models read text")]
    text: Text
    cache_control: Annotated[Any, Hint("prefixes of prompts are cached by themselves")] = None
    prompt_cache_breakpoint: Annotated[Any, Hint("prefixes of prompts are cached by themselves")] = None


Content = Text | Annotated[list[TextPart], FIRST_ERROR]


class _AnyMessage(Body):
    name: Annotated[Any, Hint("of speakers templates do not read it")] = None
    annotations: Annotated[Any, Hint("of an answer that is sent back")] = None
    function_call: Annotated[Any, Unsupported(why="the older form of tool_calls")] = None
    audio: Annotated[Any, Unsupported(why="the models read text")] = None
    refusal: Annotated[Any, Unsupported("", why="the models have no refusals apart from text")] = None


class _WithoutCalls(_AnyMessage):
    tool_calls: Annotated[Any, Unsupported([], why="only an assistant calls tools")] = None
    reasoning_content: Annotated[Any, Unsupported("", why="only an assistant reasons")] = None
    reasoning: Annotated[Any, Unsupported("", why="only an assistant reasons")] = None


class AssistantMessage(_AnyMessage):
    """What the model wrote."""

    role: Literal["assistant"]
    tool_calls: Annotated[list[ToolCall], FIRST_ERROR] = Field(default_factory=list)
    """Of an assistant: what it called."""
    reasoning_content: Text = ""
    """Of an assistant: what it wrote before its answer."""
    reasoning: Text = ""
    """As reasoning_content."""
    content: Annotated[Content | None, Field(validate_default=True)] = None
    """A text, or parts of one; beside tool_calls it may be missing."""

    @field_validator("content")
    @classmethod
    def _may_miss(cls, content: object, info: ValidationInfo) -> object:
        if content is None and not info.data.get("tool_calls", True):
            raise missing("send a string, or tool_calls")
        return content


class ToolMessage(_WithoutCalls):
    """What a tool answered."""

    role: Literal["tool"]
    tool_call_id: Name
    """Of a tool: the call that this message answers."""
    name: Text = ""
    """Of a tool: its name; where it is left out, that of the call. Of others it is ignored."""
    content: Content
    """A text, or parts of one."""


def _role(role: str) -> str:
    if role == "function":
        raise ValueError('is an older form that is not supported; send "tool", with tool_call_id')
    return role


class Message(_WithoutCalls):
    """What somebody else says: "user", "system", "developer" (which models know as "system"), or another role of the template."""

    role: Annotated[Text, AfterValidator(_role), Field(json_schema_extra={"not": {"enum": ["assistant", "tool", "function"]}})]
    """Who says it."""
    content: Content
    """A text, or parts of one, which become lines."""


_KINDS = {"assistant": "<assistant>", "tool": "<tool>"}


def _message_tag(value: object) -> str:
    role = value.get("role") if isinstance(value, dict) else getattr(value, "role", None)
    return _KINDS.get(role, "<message>") if isinstance(role, str) else "<message>"


AnyMessage = Annotated[
    Annotated[AssistantMessage, Tag("<assistant>")]
    | Annotated[ToolMessage, Tag("<tool>")]
    | Annotated[Message, Tag("<message>")],
    Discriminator(_message_tag),
]
Messages = Annotated[list[AnyMessage], FIRST_ERROR, Field(min_length=1), at_most(MAX_MESSAGES, "messages")]
