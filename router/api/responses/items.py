"""Items of a conversation, as the Responses API writes them, and the messages that a chat template renders.

An answer is several items: reasoning, a message, calls. Clients send them back one after the other; together they are one turn of
the assistant again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Discriminator, Field, Tag

from pdmesh.v1 import mesh_pb2
from router.api.http.fields import shown
from router.api.http.types import Body, Ignored, Refused, Text
from router.api.validation import refuse

TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
ITEMS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")


def _no_text(value: object) -> object:
    raise ValueError(f"{shown(value)} is not supported: the models read text; there is input_text, output_text")


def _no_item(value: object) -> object:
    known = ", ".join(ITEMS)
    raise ValueError(
        f"{shown(value)} is not supported: it belongs to tools that run elsewhere, or is not known; there is {known}"
    )


def tagged(known: Sequence[str], default: str | None = None) -> Discriminator:
    """Return how the form of an object is told: by its `type`, or "<other>" for one that is none of `known`. No tag is the name
    of a field, so that none is taken for a part of an error's path."""

    def tag(value: object) -> str:
        kind = _kind_of(value) or default
        return f"<{kind}>" if kind in known else "<other>"

    return Discriminator(tag)


def _kind_of(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else "" if kind is None else "<other>"


def _form_of(part: object) -> str:
    kind = _kind_of(part)
    return "<text>" if kind in TEXT_PARTS else "<refusal>" if kind == "refusal" else "<other>"


class TextPart(Body):
    """A piece of text within a message, of a tool's output or of reasoning."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: Text
    annotations: Ignored = None
    logprobs: Ignored = None
    parsed: Ignored = None  # openai's own addition, where a program dumps the item itself
    prompt_cache_breakpoint: Ignored = None


class Refusal(Body):
    """What a model said instead of an answer."""

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        """Return what was said."""
        return self.refusal


class OtherPart(Body):
    """A part that is no text."""

    model_config = ConfigDict(extra="ignore")
    type: Annotated[Any, Refused(_no_text)]


Part = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[Refusal, Tag("<refusal>")] | Annotated[OtherPart, Tag("<other>")],
    Discriminator(_form_of),
]
"""Any part of a content."""

Content = Text | list[Part]
"""A text, or its parts, which become lines."""


def text_of(content: str | Iterable[TextPart | Refusal | OtherPart]) -> str:
    """Return content as one text."""
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content if not isinstance(part, OtherPart))


class MessageItem(Body):
    """A message of any role. The easy form has no `type`."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: Text | None = None
    status: Ignored = None
    phase: Ignored = None


def model_name(name: str, namespace: str | None) -> str:
    """Return the name by which the model knows a function."""
    return f"{namespace}__{name}" if namespace else name


class FunctionCall(Body):
    """A call that the assistant made. `arguments` is JSON text."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    namespace: Text | None = None
    arguments: Text
    parsed_arguments: Ignored = None  # openai's own addition
    id: Text | None = None
    status: Ignored = None
    caller: Ignored = None


class FunctionCallOutput(Body):
    """What a tool returned for a call."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Content
    id: Text | None = None
    name: Ignored = None
    namespace: Ignored = None
    status: Ignored = None
    caller: Ignored = None


class ReasoningItem(Body):
    """What the assistant thought before it answered. Encrypted content of other servers cannot be read."""

    type: Literal["reasoning"]
    id: Text | None = None
    summary: list[Part] = Field(default_factory=list)
    content: list[Part] | None = None
    encrypted_content: Ignored = None
    status: Ignored = None

    @property
    def text(self) -> str:
        """Return the reasoning itself; its summary where it came without."""
        return text_of(self.content or self.summary)


class ItemReference(Body):
    """Names an item of a response that is kept."""

    type: Literal["item_reference"]
    id: Text


class OtherItem(Body):
    """An item of a tool that runs at OpenAI, or of none that is known."""

    model_config = ConfigDict(extra="ignore")
    type: Annotated[Any, Refused(_no_item)]


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCall, Tag("<function_call>")]
    | Annotated[FunctionCallOutput, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[ItemReference, Tag("<item_reference>")]
    | Annotated[OtherItem, Tag("<other>")],
    tagged(ITEMS, "message"),
]
"""Any item of an input."""


class Located(NamedTuple):
    """An item, and where the client wrote it."""

    path: str
    item: MessageItem | FunctionCall | FunctionCallOutput | ReasoningItem | ItemReference | OtherItem

    def param(self, name: str) -> str:
        """Return where a field of the item stands. A kept item is no part of the request, but what named it is."""
        return f"{self.path}.{name}" if self.path.startswith("input") else self.path


class Conversation:
    """Builds the messages of a chat. `origins` holds for each of them where its first item stands."""

    def __init__(self, instructions: str | None) -> None:
        self.messages: list[mesh_pb2.ChatMessage] = []
        self.origins: list[str] = []
        self._call_ids: set[str] = set()
        if instructions:
            self._begin("instructions", "system").content = instructions

    def add(self, located: Located) -> None:
        """Add an item. Raises InvalidArgument that names it."""
        path, item = located
        match item:
            case MessageItem():
                self._add_message(path, item)
            case FunctionCall():
                self._call_ids.add(item.call_id)
                calls = self._turn(path).tool_calls
                arguments = _arguments(located.param("arguments"), item.arguments)
                calls.add(id=item.call_id, name=model_name(item.name, item.namespace), arguments=arguments)
            case FunctionCallOutput():
                self._add_output(path, item)
            case ReasoningItem():
                turn = self._turn(path, is_new_after=("content", "tool_calls"))
                turn.reasoning = _lines(turn.reasoning, item.text)
            case _:
                refuse(path, "names a kept item, and was not replaced by it")

    def _add_message(self, path: str, item: MessageItem) -> None:
        text = text_of(item.content)
        if item.role == "assistant":
            self._turn(path, is_new_after=("content", "tool_calls")).content = text
            return
        role = "system" if item.role == "developer" else item.role
        if role == "system" and self.origins == ["instructions"]:  # many templates take one message of the system, the first
            self.messages[0].content = f"{self.messages[0].content}\n\n{text}"
            return
        self._begin(path, role).content = text

    def _add_output(self, path: str, item: FunctionCallOutput) -> None:
        if item.call_id not in self._call_ids:
            problem = f"No tool call found for function call output with call_id {shown(item.call_id)}"
            refuse(f"{path}.call_id", f"{problem}; send the function_call before it")
        message = self._begin(path, "tool")
        message.content, message.tool_call_id = text_of(item.output), item.call_id

    def _turn(self, path: str, is_new_after: Sequence[str] = ()) -> mesh_pb2.ChatMessage:
        """Return the assistant's turn that goes on; a new one where the last has one of these fields already."""
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != "assistant" or any(getattr(last, name) for name in is_new_after):
            return self._begin(path, "assistant")
        return last

    def _begin(self, path: str, role: str) -> mesh_pb2.ChatMessage:
        self.messages.append(mesh_pb2.ChatMessage(role=role))
        self.origins.append(path)
        return self.messages[-1]


def _lines(before: str, text: str) -> str:
    return f"{before}\n{text}" if before else text


def _arguments(path: str, text: str) -> str:
    try:
        is_object = not text.strip() or isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        refuse(path, "is no JSON object as text; leave out a call that was cut off")
    return text.strip()
