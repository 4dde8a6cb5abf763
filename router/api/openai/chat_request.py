"""`POST /v1/chat/completions`: from JSON to a ChatRequest."""

from __future__ import annotations

from pdmesh.v1 import common_pb2, mesh_pb2
from router.api.openai import sampling
from router.api.openai.call import IGNORED, Call, read_streaming
from router.api.openai.fields import Fields, JsonObject, as_fields, as_text
from router.api.openai.shapes import ChatShape
from router.api.validation import MAX_MESSAGES, refuse

# What these would ask for is not done here; the values given ask for nothing.
CHAT_HARMLESS: dict[str, tuple[object, ...]] = {
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "modalities": (["text"],), "audio": (), "web_search_options": (), "moderation": (), "logit_bias": ({},),
    "reasoning_effort": ("none",), "verbosity": ("medium",), "echo": (False,), "add_generation_prompt": (True,),
    "continue_final_message": (False,), "chat_template": (), "chat_template_kwargs": ({},), "documents": ([],),
    "add_special_tokens": (False,), "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,), "use_beam_search": (False,), "best_of": (1,), "length_penalty": (1, 1.0),
    "prompt_logprobs": (), "truncate_prompt_tokens": (), "logits_processors": ([],), "return_token_ids": (False,),
}  # fmt: skip
MESSAGE_HARMLESS: dict[str, tuple[object, ...]] = {"tool_calls": ([],), "function_call": (), "audio": (), "refusal": ("",)}
MESSAGE_IGNORED = frozenset({"name", "annotations", "reasoning", "reasoning_content"})


def parse_chat(body: JsonObject, options: mesh_pb2.RequestOptions) -> Call:
    """Raises InvalidArgument that names the field as the client does."""
    fields = Fields(body)
    request = mesh_pb2.ChatRequest(model=fields.text("model") or "", options=options, messages=_messages(fields))
    request.options.cache_salt = fields.text("cache_salt") or ""
    params, names = sampling.read_sampling(fields)
    limit = fields.integer("max_completion_tokens", low=1)
    if limit is not None:
        params.max_tokens = limit  # max_tokens is its older name
        names["sampling.max_tokens"] = "max_completion_tokens"
    _read_logprobs(fields, params)
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
    if role in ("tool", "function"):
        refuse(fields.param("role"), "tools are not supported")
    content = _content(fields)
    fields.finish(MESSAGE_IGNORED, MESSAGE_HARMLESS)
    # OpenAI's newer name; models are trained with the older one.
    return mesh_pb2.ChatMessage(role="system" if role == "developer" else role, content=content)


def _content(fields: Fields) -> str:
    """A string, or text parts, which become lines."""
    value, param = fields.value("content"), fields.param("content")
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
