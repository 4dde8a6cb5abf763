"""Messages, events, counts, models and errors of Anthropic's API as types: for OpenAPI, and for tests, which check every answer
by them. They are formed by `responses.py`, `content.py`, `handlers.py` and `errors.py`, as plain objects."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from router.api.http.types import AnswerBody

StopReason = Literal["end_turn", "max_tokens", "tool_use", "stop_sequence", "model_context_window_exceeded"]


# Content.


class ThinkingBlock(AnswerBody):
    """What the model wrote before its answer."""

    type: Literal["thinking"]
    thinking: str
    """Empty with `display: "omitted"`."""
    signature: Literal[""]
    """Signatures are neither made nor checked."""


class TextBlock(AnswerBody):
    """Text for the reader."""

    type: Literal["text"]
    text: str


class ToolUseBlock(AnswerBody):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    """The arguments; of a call that was cut off those that had come."""


ContentBlock = Annotated[ThinkingBlock | TextBlock | ToolUseBlock, Field(discriminator="type")]


# A message.


class MessageUsage(AnswerBody):
    """Counts of tokens."""

    input_tokens: int
    """Those of the prompt that no prefix cache had."""
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    """Those of the prompt that a prefix cache had."""
    output_tokens: int


class _Ended(AnswerBody):
    stop_reason: StopReason | None
    """Null until the output has ended."""
    stop_sequence: str | None
    """The one that ended the output, where it was one."""


class MessageAnswer(_Ended):
    """A message, whole or as a stream begins with it."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    usage: MessageUsage


class TokenCount(AnswerBody):
    """The tokens of a conversation."""

    input_tokens: int


# Events of a stream.


class ThinkingDelta(AnswerBody):
    """Further text of thinking."""

    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(AnswerBody):
    """The signature of thinking, which clients expect at its end."""

    type: Literal["signature_delta"]
    signature: Literal[""]


class TextDelta(AnswerBody):
    """Further text."""

    type: Literal["text_delta"]
    text: str


class InputJsonDelta(AnswerBody):
    """Further text of a call's arguments, which are JSON."""

    type: Literal["input_json_delta"]
    partial_json: str


class MessageStart(AnswerBody):
    """The first event: the message, before it has any content."""

    type: Literal["message_start"]
    message: MessageAnswer


class ContentBlockStart(AnswerBody):
    """A block begins."""

    type: Literal["content_block_start"]
    index: int
    content_block: ContentBlock


class ContentBlockDelta(AnswerBody):
    """A block grows."""

    type: Literal["content_block_delta"]
    index: int
    delta: Annotated[ThinkingDelta | SignatureDelta | TextDelta | InputJsonDelta, Field(discriminator="type")]


class ContentBlockStop(AnswerBody):
    """A block has ended."""

    type: Literal["content_block_stop"]
    index: int


class MessageEnd(_Ended):
    """Why a message has ended."""


class MessageDelta(AnswerBody):
    """The end of the message; the counts replace those of `message_start`."""

    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(AnswerBody):
    """The last event."""

    type: Literal["message_stop"]


class Ping(AnswerBody):
    """Nothing has come for a while; the connection is alive."""

    type: Literal["ping"]


class UnsupportedThread(AnswerBody):
    """Tells clients that a conversation has to be sent whole: routers keep none."""

    error_code: Literal["thread_unsupported_request"]
    unsupported: list[Literal["thread"]]


class MessageErrorDetails(AnswerBody):
    """What is wrong."""

    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "conflict_error",
        "request_too_large",
        "rate_limit_error",
        "overloaded_error",
        "timeout_error",
        "api_error",
    ]
    message: str
    details: UnsupportedThread | None = None


class MessageError(AnswerBody):
    """An error: the answer, or after the beginning of a stream its last event."""

    type: Literal["error"]
    error: MessageErrorDetails
    request_id: str


MessageEvent = Annotated[
    MessageStart | ContentBlockStart | ContentBlockDelta | ContentBlockStop | MessageDelta | MessageStop | Ping | MessageError,
    Field(discriminator="type"),
]
"""Any event of a stream."""


# Models.


class ModelInfo(AnswerBody):
    """A model that this router serves."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    """When the router began to serve, as RFC 3339 has it."""
    lifecycle: Literal["active"]
    max_input_tokens: int
    """Its context."""
    max_tokens: int
    """Its context."""


class ModelPage(AnswerBody):
    """The models that this router serves: all, on one page."""

    data: list[ModelInfo]
    has_more: Literal[False]
    first_id: str | None
    last_id: str | None
