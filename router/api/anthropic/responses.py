"""From responses of `pdmesh.v1` to a message of Anthropic's API, whole or as its events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from pdmesh.runtime.errors import MeshError
from pdmesh.v1 import common_pb2, mesh_pb2
from router.api.anthropic.content import Content
from router.api.anthropic.errors import told
from router.api.anthropic.requests import Call
from router.api.http.body import from_json
from router.api.http.fields import JsonObject
from router.api.http.types import AnswerBody

_STOP_REASONS = {
    common_pb2.FINISH_REASON_STOP: "end_turn",
    common_pb2.FINISH_REASON_LENGTH: "max_tokens",
    common_pb2.FINISH_REASON_TOOL_CALLS: "tool_use",
    common_pb2.FINISH_REASON_ABORT: "pause_turn",  # it would have gone on, and does when the client sends it back
}
PING = from_json({"type": "ping"}, "ping")
_NO_ROOM = "model_context_window_exceeded"


class Answer:
    """Build one message: the content grows with every delta; why it ended, and the usage, are known at the end."""

    def __init__(self, call: Call, request_id: str) -> None:
        self._call = call
        self._request_id = request_id
        self._started = mesh_pb2.Started()
        self._usage: mesh_pb2.Usage | None = None
        self._num_tokens = 0
        self._content = Content(hides_thoughts=call.hides_thoughts)
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None

    def add(self, number: int, response: mesh_pb2.GenerateResponse) -> None:
        """Take in a message, for a whole body."""
        for _ in self._shown(response):
            pass

    def body(self) -> JsonObject:
        """Return the whole message."""
        return {**self._head(), "content": self._content.blocks(), **self._end(), "usage": self._usage_shown()}

    def events(self, number: int, response: mesh_pb2.GenerateResponse) -> Iterable[bytes]:
        """Return the events that show `response`."""
        return map(_event, self._shown(response))

    def last_events(self) -> Iterable[bytes]:
        """Return the events that end a stream: the counts of `message_delta` replace those of `message_start`."""
        yield from map(_event, self._content.end())
        yield _event({"type": "message_delta", "delta": self._end(), "usage": self._usage_shown()})
        yield _event({"type": "message_stop"})

    def error_event(self, error: MeshError) -> bytes:
        """Return the event that ends a stream with an error."""
        return from_json(told(error, self._request_id).body, "error")

    def _shown(self, response: mesh_pb2.GenerateResponse) -> Iterator[JsonObject]:
        """Take in a message while its events are read."""
        match response.WhichOneof("event"):
            case "started":
                self._started = response.started
                message = {**self._head(), "content": [], **self._end(), "usage": self._usage_shown()}
                yield {"type": "message_start", "message": message}
            case "delta":
                self._num_tokens += len(response.delta.token_ids)
                yield from self._content.add(response.delta)
                self._note_end(response.delta)
            case "completed":
                self._usage = response.completed.usage

    def _note_end(self, delta: mesh_pb2.Delta) -> None:
        """Note why the output has ended. A stop string counts unless the message has calls to make; an output that is shorter
        than it might be has filled the context."""
        if not delta.finish_reason:
            return
        self._stop_reason = _STOP_REASONS[delta.finish_reason]
        if self._stop_reason == "end_turn" and delta.stop_reason in self._call.stop_sequences:
            self._stop_reason, self._stop_sequence = "stop_sequence", delta.stop_reason
        if self._stop_reason == "max_tokens" and self._num_tokens < self._call.request.sampling.max_tokens:
            self._stop_reason = _NO_ROOM

    def _head(self) -> JsonObject:
        return {"id": f"msg_{self._request_id}", "type": "message", "role": "assistant", "model": self._started.model}

    def _end(self) -> JsonObject:
        return {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}

    def _usage_shown(self) -> JsonObject:
        """Return the counts so far. What a prefix cache served is known at the end; nothing is charged for filling one."""
        num_cached = self._usage.cached_tokens if self._usage else 0
        return {
            "input_tokens": self._started.num_prompt_tokens - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": self._usage.completion_tokens if self._usage else self._num_tokens,
        }


def _event(shown: JsonObject) -> bytes:
    return from_json(shown, str(shown["type"]))


# The forms of all answers as types: for OpenAPI, and for tests, which check every answer by them.

StopReason = Literal["end_turn", "max_tokens", "tool_use", "stop_sequence", "pause_turn", "model_context_window_exceeded"]


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
