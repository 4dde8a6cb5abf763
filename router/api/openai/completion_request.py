"""`POST /v1/completions`: from JSON to one GenerateRequest for each prompt."""

from __future__ import annotations

from pdmesh.v1 import mesh_pb2
from router.api.openai import sampling
from router.api.openai.call import IGNORED, Call, read_streaming
from router.api.openai.fields import MAX_UINT32, Fields, JsonObject, as_integer, as_text
from router.api.openai.shapes import TextShape
from router.api.validation import refuse

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 128
MAX_TOKEN_IDS = 1 << 20
"""Of all prompts. More than any model here has room for; each costs the event loop time."""
MAX_TEXT_CHARS = 2 << 20
"""Of all prompts: each has a bound of its own beside it (max_prompt_bytes)."""
# What these would ask for is not done here; the values given ask for nothing.
COMPLETION_HARMLESS: dict[str, tuple[object, ...]] = {
    "suffix": ("",), "logit_bias": ({},), "add_special_tokens": (True,), "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,), "include_stop_str_in_output": (False,), "use_beam_search": (False,),
    "length_penalty": (1, 1.0), "prompt_logprobs": (), "prompt_embeds": (), "truncate_prompt_tokens": (),
    "logits_processors": ([],), "return_token_ids": (False,),
}  # fmt: skip
_REQUEST_ID_CHARS = 64


def parse_completion(body: JsonObject, options: mesh_pb2.RequestOptions) -> Call:
    """Raises InvalidArgument that names the field as the client does."""
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
    """One request for each prompt, each under an id of its own."""
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
    """A text, texts, token ids, or several lists of those."""
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
    return [as_integer(f"{param}[{number}]", value) for number, value in enumerate(values)]  # names the one that is wrong
