"""From the body of an HTTP request to messages of `pdmesh.v1`, within bounds of size, depth and time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import NamedTuple, NoReturn

from starlette.requests import ClientDisconnect, Request

from pdmesh.v1 import common_pb2, mesh_pb2
from router.api.openai import sampling, tools
from router.api.openai.errors import HttpError
from router.api.openai.fields import MAX_UINT32, Fields, JsonObject, as_fields, as_integer, as_text
from router.api.openai.responses import IGNORED, Call, ChatShape, TextShape, read_streaming
from router.api.validation import MAX_MESSAGES, refuse

READ_TIMEOUT_S = 60.0


async def read(request: Request, max_bytes: int) -> bytes:
    """Return the complete body that a client sent. Raises HttpError, also when the client leaves in the middle."""
    _check_headers(request, max_bytes)
    return await _read(request, max_bytes)


def parse(body: bytes) -> JsonObject:
    """Return the JSON object in the body. Raises HttpError with status 400 that says what is wrong and where."""
    try:
        value = json.loads(body.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise HttpError(400, f"the body is not UTF-8 (at byte {error.start}); send JSON in UTF-8") from None
    except RecursionError:
        raise HttpError(400, "the body's JSON is nested too deeply") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise HttpError(400, f"the body is not JSON: {error.msg} ({where})") from None
    except ValueError:
        raise HttpError(400, "the body is not JSON that can be read: it holds NaN, Infinity or a number of many digits") from None
    if not isinstance(value, dict):
        raise HttpError(400, 'the body is not a JSON object; send one such as {"model": ...}')
    return value


def _check_headers(request: Request, max_bytes: int) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HttpError(415, f"content-type is {kind[:80]!r}; send application/json", param="Content-Type")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HttpError(415, "a compressed body is not supported; send it as it is", param="Content-Encoding")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        _refuse_size(max_bytes)


async def _read(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            async for piece in request.stream():
                body += piece
                if len(body) > max_bytes:
                    _refuse_size(max_bytes)
    except TimeoutError:
        raise HttpError(408, f"the body did not arrive within {READ_TIMEOUT_S:g} s") from None
    except ClientDisconnect:
        raise HttpError(400, "the body is not complete") from None
    return bytes(body)


def _refuse_size(max_bytes: int) -> NoReturn:
    raise HttpError(413, f"the body has more than {max_bytes} bytes (http_max_body_bytes)")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


# `POST /v1/chat/completions`: from JSON to a ChatRequest.


# Fields that are not supported, with the values that ask for nothing and are accepted.
CHAT_HARMLESS: dict[str, tuple[object, ...]] = {
    "functions": ([],), "function_call": ("none", "auto"),
    "modalities": (["text"],), "audio": (), "web_search_options": (), "moderation": (), "logit_bias": ({},),
    "verbosity": ("medium",), "echo": (False,), "chat_template": (), "documents": ([],),
    "add_special_tokens": (False,), "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,), "use_beam_search": (False,), "best_of": (1,), "length_penalty": (1, 1.0),
    "prompt_logprobs": (), "truncate_prompt_tokens": (), "logits_processors": ([],), "return_token_ids": (False,),
}  # fmt: skip
MESSAGE_HARMLESS: dict[str, tuple[object, ...]] = {"function_call": (), "audio": (), "refusal": ("",)}
MESSAGE_IGNORED = frozenset({"name", "annotations"})


def parse_chat(body: JsonObject, options: mesh_pb2.RequestOptions) -> Call:
    """Return the call for the body of a chat completion. Raises InvalidArgument that names the field as the client does."""
    fields = Fields(body)
    request = mesh_pb2.ChatRequest(model=fields.text("model") or "", options=options, messages=_messages(fields))
    request.options.cache_salt = fields.text("cache_salt") or ""
    params, names = sampling.read_sampling(fields)
    limit = fields.integer("max_completion_tokens", low=1)
    if limit is not None:
        params.max_tokens = limit  # max_tokens is the older name
        names["sampling.max_tokens"] = "max_completion_tokens"
    _read_logprobs(fields, params)
    names |= tools.read_tools(fields, request)
    tools.read_template(fields, request)
    request.sampling.CopyFrom(params)
    streaming = read_streaming(fields)
    fields.finish(IGNORED, CHAT_HARMLESS)
    names |= {"sampling.logprobs": "top_logprobs", "prompt": "messages"}
    return Call((request,), params.n or 1, ChatShape(), streaming, names)


def _read_logprobs(fields: Fields, params: common_pb2.SamplingParams) -> None:
    wanted, num_top = fields.flag("logprobs"), fields.integer("top_logprobs")
    if wanted:
        params.logprobs = num_top or 0
    elif num_top:
        refuse("top_logprobs", "needs logprobs: true")


def _messages(fields: Fields) -> list[mesh_pb2.ChatMessage]:
    messages = fields.items("messages")
    if not messages:
        refuse("messages", "there are none; send at least one")
    if len(messages) > MAX_MESSAGES:
        refuse("messages", f"there are {len(messages)}, {MAX_MESSAGES} are allowed")
    return [_message(as_fields(f"messages[{number}]", message)) for number, message in enumerate(messages)]


def _message(fields: Fields) -> mesh_pb2.ChatMessage:
    role = fields.text("role")
    if role is None:
        refuse(fields.param("role"), 'is missing; give one such as "user"')
    if role == "function":
        refuse(fields.param("role"), 'is an older form that is not supported; send "tool", with tool_call_id')
    # "developer" is OpenAI's newer name; models are trained with the older one.
    message = mesh_pb2.ChatMessage(role="system" if role == "developer" else role)
    if role == "assistant":
        tools.read_calls(fields, message)
    elif role == "tool":
        tools.read_answer(fields, message)
    message.content = _content(fields, may_miss=bool(message.tool_calls))
    fields.finish(MESSAGE_IGNORED, {**MESSAGE_HARMLESS, "tool_calls": ([],), "reasoning": ("",), "reasoning_content": ("",)})
    return message


def _content(fields: Fields, *, may_miss: bool) -> str:
    """Return a string; text parts are joined as lines. Beside calls it `may_miss`."""
    value, param = fields.value("content"), fields.param("content")
    if value is None and may_miss:
        return ""
    if value is None:
        refuse(param, "is missing; send a string")
    if isinstance(value, list):
        return "\n".join(_part(as_fields(f"{param}[{number}]", part)) for number, part in enumerate(value))
    return as_text(param, value)


def _part(fields: Fields) -> str:
    kind, text = fields.text("type"), fields.text("text")
    if kind != "text":
        refuse(fields.param("type"), 'only "text" is supported: the models read text')
    if text is None:
        refuse(fields.param("text"), "is missing")
    fields.finish({"cache_control", "prompt_cache_breakpoint"}, {})
    return text


# `POST /v1/completions`: from JSON to one GenerateRequest for each prompt.

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 128
MAX_TOKEN_IDS = 1 << 20
"""Bounds the token ids of all prompts together: more than any model here has room for, and each costs time on the event loop."""
MAX_TEXT_CHARS = 2 << 20
"""Bounds the text of all prompts together; each prompt has a bound of its own (max_prompt_bytes)."""
# Fields that are not supported, with the values that ask for nothing and are accepted.
COMPLETION_HARMLESS: dict[str, tuple[object, ...]] = {
    "suffix": ("",), "logit_bias": ({},), "add_special_tokens": (True,), "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,), "include_stop_str_in_output": (False,), "use_beam_search": (False,),
    "length_penalty": (1, 1.0), "prompt_logprobs": (), "prompt_embeds": (), "truncate_prompt_tokens": (),
    "logits_processors": ([],), "return_token_ids": (False,),
}  # fmt: skip
_REQUEST_ID_CHARS = 64


def parse_completion(body: JsonObject, options: mesh_pb2.RequestOptions) -> Call:
    """Return the call for the body of a completion. Raises InvalidArgument that names the field as the client does."""
    fields = Fields(body)
    params, names = sampling.read_sampling(fields)
    if not params.HasField("max_tokens"):
        params.max_tokens = DEFAULT_MAX_TOKENS
    num_choices = params.n or 1
    if fields.integer("best_of", low=1) not in (None, num_choices):
        refuse("best_of", "is not supported; leave it out, or give the value of n")
    num_logprobs = fields.integer("logprobs")
    if num_logprobs is not None:
        params.logprobs = num_logprobs
    echo = fields.flag("echo")
    if echo and num_logprobs is not None:
        refuse("echo", "excludes logprobs: those of a prompt are not computed")
    model, salt, prompts = fields.text("model") or "", fields.text("cache_salt") or "", _prompts(fields)
    streaming = read_streaming(fields)
    fields.finish(IGNORED, COMPLETION_HARMLESS)
    base = mesh_pb2.GenerateRequest(model=model, sampling=params, options=options)
    base.options.cache_salt = salt
    return Call(_numbered(base, prompts), num_choices, TextShape(), streaming, {**names, "tokens.ids": "prompt"}, echo)


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


def _prompts(fields: Fields) -> list[str | list[int]]:
    """Return the prompts: a text, several texts, token ids, or several lists of token ids."""
    value = fields.value("prompt")
    if isinstance(value, str):
        return [as_text("prompt", value)]
    if not isinstance(value, list) or not value:
        refuse("prompt", "is missing; send a text, texts, token ids or lists of token ids")
    if isinstance(value[0], int):
        return [_token_ids("prompt", value)]
    if len(value) > MAX_PROMPTS:
        refuse("prompt", f"{len(value)} prompts are more than {MAX_PROMPTS}")
    if sum(len(item) for item in value if isinstance(item, list)) > MAX_TOKEN_IDS:
        refuse("prompt", f"more than {MAX_TOKEN_IDS} token ids in all prompts; send them in several requests")
    if sum(len(item) for item in value if isinstance(item, str)) > MAX_TEXT_CHARS:
        refuse("prompt", f"more than {MAX_TEXT_CHARS} characters in all prompts; send them in several requests")
    return [_prompt(f"prompt[{number}]", item) for number, item in enumerate(value)]


def _prompt(param: str, value: object) -> str | list[int]:
    return _token_ids(param, value) if isinstance(value, list) else as_text(param, value)


def _token_ids(param: str, values: list[object]) -> list[int]:
    if len(values) > MAX_TOKEN_IDS:
        refuse(param, f"{len(values)} token ids are more than {MAX_TOKEN_IDS}")
    numbers = [value for value in values if type(value) is int]
    if len(numbers) == len(values) and (not numbers or (min(numbers) >= 0 and max(numbers) <= MAX_UINT32)):
        return numbers
    return [as_integer(f"{param}[{number}]", value) for number, value in enumerate(values)]  # errors name the list item


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
    fields = Fields(body)
    message = mesh_pb2.TokenizeRequest(model=fields.text("model") or "")
    is_chat, with_strings = fields.has("messages"), fields.flag("return_token_strs")
    if is_chat:
        if fields.has("prompt"):
            refuse("prompt", "excludes messages; send one of them")
        message.messages.extend(_messages(fields))
        names = tools.read_shown(fields, message)
        fields.finish((), CHAT_HARMLESS)  # the template writes the special tokens
        return Tokenize(message, False, with_strings, names)
    text = fields.text("prompt")
    if not text:
        refuse("prompt", "is missing; send a text, or messages")
    message.text = text
    add_special_tokens = not fields.has("add_special_tokens") or fields.flag("add_special_tokens")
    fields.finish((), {})
    return Tokenize(message, add_special_tokens, with_strings)


def parse_detokenize(body: JsonObject) -> tuple[str, list[int]]:
    """Return the model's name and the token ids of a call to /detokenize. Raises InvalidArgument that names the field."""
    fields = Fields(body)
    name, tokens = fields.text("model") or "", fields.items("tokens")
    if tokens is None:
        refuse("tokens", "is missing; send token ids")
    fields.finish((), {})
    return name, _token_ids("tokens", tokens)
