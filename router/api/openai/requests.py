"""From the body of an HTTP request to messages of `pdmesh.v1`, within bounds of size, depth and time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pdmesh.v1 import common_pb2, mesh_pb2
from router.api.http.fields import JsonObject
from router.api.http.types import checked
from router.api.openai import tools
from router.api.openai.bodies import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    Generation,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from router.api.openai.messages import AnyMessage, AssistantMessage, Content, ToolMessage
from router.api.openai.responses import Best, Call, ChatShape, Scoring, Streaming, TextShape
from router.api.openai.sampling import read_sampling
from router.api.validation import refuse

# `POST /v1/chat/completions`: from JSON to a ChatRequest.


def parse_chat(body: JsonObject, options: mesh_pb2.RequestOptions) -> Call:
    """Return the call for the body of a chat completion. Raises InvalidArgument that names the field as the client does."""
    wanted = checked(ChatCompletionRequest, body)
    request = mesh_pb2.ChatRequest(model=wanted.model, options=options, messages=_messages(wanted.messages))
    request.options.cache_salt = wanted.cache_salt
    params, names = read_sampling(wanted)
    if wanted.max_completion_tokens is not None:
        params.max_tokens = wanted.max_completion_tokens  # max_tokens is the older name
        names["sampling.max_tokens"] = "max_completion_tokens"
    if wanted.logprobs:
        params.logprobs = wanted.top_logprobs or 0
    names |= tools.read_tools(wanted, request)
    tools.read_template(wanted, request)
    request.sampling.CopyFrom(params)
    names |= {"sampling.logprobs": "top_logprobs", "prompt": "messages"}
    return Call(
        (request,), params.n or 1, ChatShape(), _streaming(wanted), names, scoring=Scoring(_shown(wanted)), session=wanted
    )


def _streaming(wanted: Generation) -> Streaming | None:
    if not wanted.stream:
        return None
    asked = wanted.stream_options
    return Streaming() if asked is None else Streaming(asked.include_usage, asked.continuous_usage_stats)


def _messages(messages: list[AnyMessage]) -> list[mesh_pb2.ChatMessage]:
    return [_message(message) for message in messages]


def _message(message: AnyMessage) -> mesh_pb2.ChatMessage:
    # "developer" is OpenAI's newer name; models are trained with the older one.
    role = "system" if message.role == "developer" else message.role
    made = mesh_pb2.ChatMessage(role=role, content=_text_of(message.content))
    if isinstance(message, AssistantMessage):
        made.reasoning = message.reasoning_content or message.reasoning
        for call in message.tool_calls:
            made.tool_calls.add(id=call.id, name=call.function.name, arguments=call.function.arguments)
    elif isinstance(message, ToolMessage):
        made.tool_call_id, made.name = message.tool_call_id, message.name
    return made


def _text_of(content: Content | None) -> str:
    """Return a string; text parts are joined as lines."""
    return "\n".join(part.text for part in content) if isinstance(content, list) else content or ""


# `POST /v1/completions`: from JSON to one GenerateRequest for each prompt.

DEFAULT_MAX_TOKENS = 16
_REQUEST_ID_CHARS = 64
_PROMPT_ALONE = 1
"""Tokens of output that workers draw where none is wanted; they are not shown."""


def parse_completion(body: JsonObject, options: mesh_pb2.RequestOptions) -> Call:
    """Return the call for the body of a completion. Raises InvalidArgument that names the field as the client does."""
    wanted = checked(CompletionRequest, body)
    params, names = read_sampling(wanted)
    if wanted.max_tokens is None:
        params.max_tokens = DEFAULT_MAX_TOKENS
    elif not wanted.max_tokens:
        params.max_tokens = _PROMPT_ALONE
    if wanted.logprobs is not None:
        params.logprobs = wanted.logprobs
    scoring = _scoring(wanted, params)
    num_choices = params.n or 1
    best = None if wanted.best_of in (None, num_choices) else Best(num_choices, shows_logprobs=wanted.logprobs is not None)
    if best is not None and wanted.best_of is not None:
        params.n = num_choices = wanted.best_of
        params.logprobs = wanted.logprobs or 0
    base = mesh_pb2.GenerateRequest(model=wanted.model, sampling=params, options=options, suffix=wanted.suffix)
    base.options.cache_salt = wanted.cache_salt
    names["tokens.ids"] = "prompt"
    requests = _numbered(base, _prompts(wanted))
    return Call(requests, num_choices, TextShape(), _streaming(wanted), names, wanted.echo, best, scoring, wanted)


def _scoring(wanted: CompletionRequest, params: common_pb2.SamplingParams) -> Scoring:
    """Return what is shown of the prompt's log-probabilities; ask for them. Raises InvalidArgument."""
    is_alone = wanted.max_tokens == 0
    if is_alone and not wanted.echo and wanted.prompt_logprobs is None:
        refuse("max_tokens", "0 needs echo: true, or prompt_logprobs; else there is nothing to answer")
    echoes = wanted.echo and wanted.logprobs is not None
    if echoes:
        params.prompt_logprobs = max(wanted.logprobs or 0, wanted.prompt_logprobs or 0)
    return Scoring(_shown(wanted), wanted.logprobs if echoes else None, is_alone)


def _shown(wanted: Generation) -> int | None:
    if wanted.prompt_logprobs is not None and wanted.stream:
        refuse("prompt_logprobs", "excludes stream: leave one of them out")
    return wanted.prompt_logprobs


def _prompts(wanted: CompletionRequest) -> list[str | list[int]]:
    """Return the prompts, one or several."""
    prompt: Any = wanted.prompt
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


def _numbered(base: mesh_pb2.GenerateRequest, prompts: list[str | list[int]]) -> tuple[mesh_pb2.GenerateRequest, ...]:
    """Return one request for each prompt, each with an id of its own."""
    requests = []
    for number, prompt in enumerate(prompts):
        request = mesh_pb2.GenerateRequest()
        request.CopyFrom(base)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.tokens.ids.extend(prompt)
        if len(prompts) > 1:
            suffix = f"-{number}"
            request.options.request_id = base.options.request_id[: _REQUEST_ID_CHARS - len(suffix)] + suffix
        requests.append(request)
    return tuple(requests)


# `POST /tokenize` and `POST /detokenize`, in vLLM's form.


class Tokenize(NamedTuple):
    """Hold a text or a conversation to tokenize. `with_strings`: the tokens as texts are wanted, too. `names`: fields as the
    client calls them, by their names in the message."""

    message: mesh_pb2.TokenizeRequest
    add_special_tokens: bool
    with_strings: bool
    names: Mapping[str, str] = {}


def parse_tokenize(body: JsonObject) -> Tokenize:
    """Return what the body of a call to /tokenize asks for. Raises InvalidArgument that names the field."""
    if body.get("messages") is None:
        text = checked(TokenizeTextRequest, body)
        message = mesh_pb2.TokenizeRequest(model=text.model, text=text.prompt)
        return Tokenize(message, text.add_special_tokens, text.return_token_strs)
    chat = checked(TokenizeChatRequest, body)
    message = mesh_pb2.TokenizeRequest(model=chat.model, messages=_messages(chat.messages))
    names = tools.read_shown(chat, message)
    return Tokenize(message, False, chat.return_token_strs, names)  # the template writes the special tokens


def parse_detokenize(body: JsonObject) -> tuple[str, list[int]]:
    """Return the model's name and the token ids of a call to /detokenize. Raises InvalidArgument that names the field."""
    wanted = checked(DetokenizeRequest, body)
    return wanted.model, wanted.tokens
