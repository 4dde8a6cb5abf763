"""The Response object, its items and the events of its stream as types: for OpenAPI, and for tests, which check every answer by
them. They are formed by `answer.py` and `output.py`, as plain objects."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from router.api.http.reports import Report, TokenLogprob
from router.api.http.types import AnswerBody

ItemStatus = Literal["in_progress", "completed", "incomplete"]


# Items of an output.


class OutputText(AnswerBody):
    """Text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[None]
    """Always empty."""
    logprobs: list[TokenLogprob]
    """Of the text's tokens, where they were asked for."""


class ReasoningText(AnswerBody):
    """What the model wrote before its answer."""

    type: Literal["reasoning_text"]
    text: str


class OutputMessage(AnswerBody):
    """An item: text for the reader."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]
    """One part; none where the item has just begun."""
    status: ItemStatus


class OutputReasoning(AnswerBody):
    """An item: what the model wrote before its answer."""

    id: str
    type: Literal["reasoning"]
    summary: list[None]
    """Always empty: reasoning itself is shown."""
    content: list[ReasoningText]
    encrypted_content: None
    status: ItemStatus


class OutputCall(AnswerBody):
    """An item: a call of a function."""

    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str = ""
    """Of the function; absent where it is in none."""
    arguments: str
    """A JSON object as text; in an incomplete item what had come of it."""
    status: ItemStatus


OutputItem = Annotated[OutputMessage | OutputReasoning | OutputCall, Field(discriminator="type")]
OutputPart = Annotated[OutputText | ReasoningText, Field(discriminator="type")]


# The Response object.


class ResponseError(AnswerBody):
    """What ended a response before its time."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt", "context_length_exceeded"]
    """With the last one agents shorten what they send, and do not send the same again."""
    message: str


class IncompleteDetails(AnswerBody):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens", "abort"]


class InputTokens(AnswerBody):
    """Where the tokens of the input come from."""

    cached_tokens: int
    """Those that a prefix cache had."""
    cache_write_tokens: Literal[0]


class ReasoningTokens(AnswerBody):
    """What the tokens of the output are for."""

    reasoning_tokens: int
    """Those of reasoning, marks included; they are part of output_tokens."""


class ResponseUsage(AnswerBody):
    """Counts of tokens."""

    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class EchoedReasoning(AnswerBody):
    """The request's `reasoning`."""

    effort: str | None
    summary: Literal["auto", "concise", "detailed"] | None


class EchoedPlainFormat(AnswerBody):
    """The request's `text.format`, without a schema."""

    type: Literal["text", "json_object"]


class EchoedSchemaFormat(AnswerBody):
    """The request's `text.format`, with a schema."""

    type: Literal["json_schema"]
    name: str
    description: str | None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool


class EchoedText(AnswerBody):
    """The request's `text`."""

    format: Annotated[EchoedPlainFormat | EchoedSchemaFormat, Field(discriminator="type")]
    verbosity: Literal["low", "medium", "high"]


class EchoedTool(AnswerBody):
    """One of the request's tools."""

    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


class EchoedNamespace(AnswerBody):
    """Functions of the request that share a namespace."""

    type: Literal["namespace"]
    name: str
    description: str
    tools: list[EchoedTool]


class EchoedFunctionName(AnswerBody):
    """A function that `tool_choice` names."""

    type: Literal["function"]
    name: str
    namespace: str = ""
    """Of the function; absent where the request names none."""


class EchoedAllowedTools(AnswerBody):
    """Some of the tools, in `tool_choice`."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[EchoedFunctionName]


EchoedChoice = Annotated[EchoedFunctionName | EchoedAllowedTools, Field(discriminator="type")]


class ResponseObject(AnswerBody):
    """A response, whole or as it is while it is being made."""

    id: str
    object: Literal["response"]
    created_at: int
    """Seconds since 1970."""
    completed_at: int | None
    """Seconds since 1970; null unless it is completed."""
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    """Empty while the response is in progress."""
    usage: ResponseUsage | None
    """Null while the response is in progress."""
    store: bool
    """Whether it is kept: then a later request may name it, and GET returns it."""
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: EchoedReasoning
    safety_identifier: str | None
    service_tier: Literal["default"]
    temperature: float
    """The one in force."""
    text: EchoedText
    tool_choice: Literal["auto", "none", "required"] | EchoedChoice
    tools: list[Annotated[EchoedTool | EchoedNamespace, Field(discriminator="type")]]
    top_logprobs: int
    top_p: float
    """The one in force."""
    truncation: Literal["disabled"]
    user: str | None
    pdmesh: list[Report] = Field(default_factory=list)
    """What pdmesh says of the request, once the response has ended: one entry."""
    warnings: list[str] = Field(default_factory=list)
    """What was wrong with text that looked like a call, and which tools were left out."""


class DeletedResponse(AnswerBody):
    """A response that is no longer kept."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


# Events of a stream.


class _Event(AnswerBody):
    sequence_number: int
    """From 0, one more with each event."""


class _ItemEvent(_Event):
    output_index: int
    """The item's place in the output."""


class _Within(_ItemEvent):
    item_id: str


class _Delta(_Within):
    delta: str
    obfuscation: str = ""
    """Random characters, so that the size of the event says little: with stream_options.include_obfuscation."""


class ResponseCreated(_Event):
    """The first event: the response, before it has any output."""

    type: Literal["response.created"]
    response: ResponseObject


class ResponseInProgress(_Event):
    """The output is being made."""

    type: Literal["response.in_progress"]
    response: ResponseObject


class ResponseCompleted(_Event):
    """The last event: the whole response."""

    type: Literal["response.completed"]
    response: ResponseObject


class ResponseIncomplete(_Event):
    """The last event: the response, which `max_output_tokens` or the context has cut off."""

    type: Literal["response.incomplete"]
    response: ResponseObject


class ResponseFailed(_Event):
    """The last event, behind `error`: the response as far as it came."""

    type: Literal["response.failed"]
    response: ResponseObject


class StreamError(_Event):
    """What went wrong, after the beginning of a stream."""

    type: Literal["error"]
    code: str
    message: str
    param: str | None


class OutputItemAdded(_ItemEvent):
    """An item begins."""

    type: Literal["response.output_item.added"]
    item: OutputItem


class OutputItemDone(_ItemEvent):
    """An item has ended: here it is whole."""

    type: Literal["response.output_item.done"]
    item: OutputItem


class ContentPartAdded(_Within):
    """The content of a message or of reasoning begins."""

    type: Literal["response.content_part.added"]
    content_index: Literal[0]
    part: OutputPart


class ContentPartDone(_Within):
    """The content of a message or of reasoning, whole."""

    type: Literal["response.content_part.done"]
    content_index: Literal[0]
    part: OutputPart


class OutputTextDelta(_Delta):
    """Further text of a message."""

    type: Literal["response.output_text.delta"]
    content_index: Literal[0]
    logprobs: list[TokenLogprob]


class OutputTextDone(_Within):
    """The text of a message, whole."""

    type: Literal["response.output_text.done"]
    content_index: Literal[0]
    text: str
    logprobs: list[TokenLogprob]


class ReasoningTextDelta(_Delta):
    """Further text of reasoning."""

    type: Literal["response.reasoning_text.delta"]
    content_index: Literal[0]


class ReasoningTextDone(_Within):
    """The text of reasoning, whole."""

    type: Literal["response.reasoning_text.done"]
    content_index: Literal[0]
    text: str


class FunctionCallArgumentsDelta(_Delta):
    """Further text of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"]


class FunctionCallArgumentsDone(_Within):
    """The arguments of a call, whole."""

    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


ResponseEvent = Annotated[
    ResponseCreated
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | StreamError
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | FunctionCallArgumentsDelta
    | FunctionCallArgumentsDone,
    Field(discriminator="type"),
]
"""Any event of a stream."""
