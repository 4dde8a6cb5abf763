"""Bodies of answers of OpenAI's endpoints, and of /tokenize, /detokenize and health, as types: for OpenAPI, and for tests, which
check every answer by them. Answers are formed by `responses.py`, as plain objects."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from router.api.http.reports import Report, TokenLogprob
from router.api.http.types import AnswerBody

# What chat completions and completions have in common.

FinishReason = Literal["stop", "length", "tool_calls", "abort"]


class CachedTokens(AnswerBody):
    """Where a prompt's tokens come from."""

    cached_tokens: int
    """Those that a prefix cache had."""


class OutputTokens(AnswerBody):
    """What was done for an output."""

    accepted_prediction_tokens: int
    """Drafted tokens that speculative decoding accepted; they are part of completion_tokens."""
    rejected_prediction_tokens: int
    """Drafted tokens that it rejected; they are not."""
    reasoning_tokens: int = 0
    """Tokens of reasoning; they are part of completion_tokens."""


class Usage(AnswerBody):
    """Counts of tokens, of all prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: OutputTokens


class _Whole(AnswerBody):
    id: str
    created: int
    """Seconds since 1970."""
    model: str
    system_fingerprint: str | None
    """Of what computed the answer: weights, formats of numbers, adapter. Equal seeds give equal tokens where it is equal. Null
    where the workers do not say which weights they have."""
    usage: Usage
    pdmesh: list[Report]
    """One entry for each prompt."""


class _Chunk(AnswerBody):
    id: str
    created: int
    """Seconds since 1970."""
    model: str
    system_fingerprint: str | None
    """As of whole answers; null before the first token."""
    usage: Usage | None = None
    """With stream_options.include_usage: of the last chunk, or of each one so far."""
    pdmesh: list[Report] = Field(default_factory=list)
    """Of the last chunk, with stream_options.include_usage: one entry for each prompt."""


# Chat completions.


class AnswerFunction(AnswerBody):
    """Which function is to be called, with what."""

    name: str
    arguments: str
    """A JSON object as text."""


class AnswerCall(AnswerBody):
    """A call of a tool."""

    index: int
    id: str
    type: Literal["function"]
    function: AnswerFunction


class MoreArguments(AnswerBody):
    """Further text of a call's arguments."""

    arguments: str


class AnswerCallPiece(AnswerBody):
    """A further piece of a call."""

    index: int
    function: MoreArguments


class AnswerMessage(AnswerBody):
    """What the model wrote."""

    role: Literal["assistant"]
    content: str | None
    """Null where there are calls alone."""
    refusal: None
    reasoning_content: str = ""
    """What it wrote before its answer."""
    reasoning: str = ""
    """As reasoning_content."""
    tool_calls: list[AnswerCall] = Field(default_factory=list)


class Delta(AnswerBody):
    """What is new of a message."""

    role: Literal["assistant"] = "assistant"
    """With the first piece of a choice."""
    content: str = ""
    reasoning_content: str = ""
    reasoning: str = ""
    tool_calls: list[AnswerCall | AnswerCallPiece] = Field(default_factory=list)


class ChatLogprobs(AnswerBody):
    """Log-probabilities of the output's tokens."""

    content: list[TokenLogprob]
    refusal: None


class ChatChoice(AnswerBody):
    """One choice of a chat completion."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | None
    """The string or token that ended the choice."""
    warnings: list[str] = Field(default_factory=list)
    """What was wrong with text that looked like a call."""


class ChatChunkChoice(AnswerBody):
    """A piece of one choice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | None = None
    warnings: list[str] = Field(default_factory=list)


class PromptLogprob(AnswerBody):
    """One of the likeliest tokens in the place of a prompt's token, or that token."""

    logprob: float
    rank: int | None
    """1 for the likeliest; null for a token that is none of them."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ChatCompletion(_Whole):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | None = None
    """By token id, null first; where they were asked for."""


class ChatCompletionChunk(_Chunk):
    """One event of a streamed chat completion."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


# Completions.


class TextLogprobs(AnswerBody):
    """Log-probabilities of the output's tokens."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """null: of a prompt's first token."""
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TextChoice(AnswerBody):
    """One choice of a completion."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | None
    """The string or token that ended the choice."""
    prompt_logprobs: PromptLogprobs | None = None
    """By token id, null first; where they were asked for."""


class TextChunkChoice(AnswerBody):
    """A piece of one choice."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | None = None


class Completion(_Whole):
    """The answer of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class CompletionChunk(_Chunk):
    """One event of a streamed completion."""

    object: Literal["text_completion"]
    choices: list[TextChunkChoice]


# The other endpoints.


class Model(AnswerBody):
    """A model that this router serves."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["pdmesh"]
    max_model_len: int
    """Its context in tokens."""
    sampling_defaults: dict[str, float] = Field(default_factory=dict)
    """What its generation_config.json says for parameters that a request leaves out."""
    parent: str = ""
    """Of an adapter: its base model."""


class ModelList(AnswerBody):
    """The models that this router serves."""

    object: Literal["list"]
    data: list[Model]


class Tokenized(AnswerBody):
    """The tokens of a text or a conversation."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None
    """The tokens as texts, where return_token_strs asked for them."""


class Detokenized(AnswerBody):
    """The text of tokens."""

    prompt: str


class Health(AnswerBody):
    """Whether the router is up."""

    status: Literal["live", "ready", "not ready"]
