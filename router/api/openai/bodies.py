"""Bodies of requests to OpenAI's endpoints, and to /tokenize and /detokenize, as types. Ranges of sampling parameters, lengths
and grammars are checked later, for all protocols (router/api/validation.py)."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)

from pdmesh.sampling_params import MAX_BIASES, MAX_CHOICES, MAX_LOGPROBS
from pdmesh.text.exact_json import dumps
from router.api.http.fields import MAX_UINT32
from router.api.http.sessions import SessionBody
from router.api.http.types import FIRST_ERROR, Body, Count, DrawnBody, Hint, Ids, Text, Unsupported, at_most, valid_unicode
from router.api.openai.messages import Choice, Messages, Tool
from router.api.validation import MAX_STOP_STRINGS, MAX_STOP_TOKENS

# Constraints on the output.


def _schema(value: object) -> str:
    """Return a JSON Schema as text, from an object or from text."""
    if isinstance(value, str):
        return valid_unicode(value)
    if not isinstance(value, dict | bool):
        raise ValueError("is not a JSON Schema")
    return dumps(value, separators=(",", ":"))


Schema = Annotated[Any, AfterValidator(_schema), WithJsonSchema({"type": ["object", "boolean", "string"]})]


class TextFormat(Body):
    """Output without a constraint."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Output that is a JSON object."""

    type: Literal["json_object"]


class NamedSchema(Body):
    """A JSON Schema with a name."""

    name: Text | None = None
    description: Text | None = None
    strict: bool = False
    """Changes nothing: the output follows the schema in any case."""
    json_schema: Annotated[Schema, Field(alias="schema")] = "{}"


class JsonSchemaFormat(Body):
    """Output that follows a JSON Schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]
Choices = Annotated[list[Text], FIRST_ERROR]


class StructuredOutputs(Body):
    """A constraint on the output, as vLLM has it; one of json, regex, choice, grammar, json_object."""

    json_text: Annotated[Schema | None, Field(alias="json")] = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    """In Lark's syntax."""
    json_object: bool = False
    disable_fallback: Annotated[Any, Hint("there is one implementation of grammars")] = None
    disable_any_whitespace: Annotated[Any, Unsupported(False, why="grammars allow whitespace")] = None
    disable_additional_properties: Annotated[Any, Unsupported(False, why="a schema says it itself")] = None


# What chat completions and completions have in common.


class StreamOptions(Body):
    """How a stream is formed."""

    include_usage: bool = False
    """The last chunk has the usage."""
    continuous_usage_stats: bool = False
    """With include_usage every chunk has the usage so far."""
    include_obfuscation: Annotated[Any, Hint("chunks are not padded")] = None


def _token_id(name: str) -> str:
    if not _TOKEN_ID.fullmatch(name) or int(name) > MAX_UINT32:
        raise ValueError("is no token id")
    return name


_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
TokenId = Annotated[str, AfterValidator(_token_id)]
Bias = Annotated[float, Field(ge=-100, le=100)]
LogitBias = Annotated[
    dict[TokenId, Bias],
    at_most(MAX_BIASES, "tokens"),
    Field(json_schema_extra={"propertyNames": {"pattern": f"^({_TOKEN_ID.pattern})$"}, "maxProperties": MAX_BIASES}),
]


class Sampling(DrawnBody):
    """How tokens are drawn, and how many."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_UINT32)] | None = None
    """At most so many tokens; left out: chat what is left of the context, completions 16."""
    min_tokens: Count | None = None
    """No end of sequence and no stop token before so many tokens."""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """The number of choices for each prompt."""
    ignore_eos: bool = False
    """The output goes on behind an end of sequence."""
    stop_token_ids: Annotated[Ids, at_most(MAX_STOP_TOKENS, "tokens")] | None = None
    """Tokens that end the output."""
    prompt_logprobs: Annotated[Count | None, Field(json_schema_extra={"maximum": MAX_LOGPROBS})] = None
    """The log-probabilities of the prompt's tokens are wanted, and those of so many of the likeliest ones, in vLLM's form. Not
    with stream."""
    logit_bias: LogitBias | None = None
    """What is added to the logits of tokens, by token id, before penalties."""
    stop: Text | Annotated[list[Text], FIRST_ERROR, at_most(MAX_STOP_STRINGS, "strings")] | None = None
    """A string that ends the output, or several."""
    response_format: ResponseFormat | None = None
    """A constraint on the output; there is one at most, of this and the following fields."""
    structured_outputs: StructuredOutputs | None = None
    """A constraint as vLLM has it."""
    guided_json: Schema | None = None
    """As structured_outputs.json: a JSON Schema."""
    guided_regex: Text | None = None
    """As structured_outputs.regex."""
    guided_choice: Choices | None = None
    """As structured_outputs.choice: one of these texts."""
    guided_grammar: Text | None = None
    """As structured_outputs.grammar: a grammar in Lark's syntax."""


class _Foreign(Body):
    """What other servers take, and would change the output."""

    spaces_between_special_tokens: Annotated[Any, Unsupported(True, why="special tokens are not shown")] = None
    skip_special_tokens: Annotated[Any, Unsupported(True, why="special tokens are not shown")] = None
    include_stop_str_in_output: Annotated[Any, Unsupported(False, why="stop_reason names what ended a choice")] = None
    use_beam_search: Annotated[Any, Unsupported(False, why="outputs are drawn")] = None
    length_penalty: Annotated[Any, Unsupported(1, 1.0, why="of beam search")] = None
    truncate_prompt_tokens: Annotated[Any, Unsupported(why="a prompt that is too long is refused")] = None
    logits_processors: Annotated[Any, Unsupported([], why="requests bring no code")] = None
    return_token_ids: Annotated[Any, Unsupported(False, why="/tokenize gives token ids")] = None


class Generation(Sampling, SessionBody, _Foreign):
    """What chat completions and completions have in common."""

    model: Text = ""
    """May be left out while the mesh serves one."""
    cache_salt: Text = ""
    """Keeps prefix caches apart, within the tenant."""
    stream: bool = False
    """The answer comes as server-sent events."""
    stream_options: StreamOptions | None = None
    """Whether chunks have the usage."""
    user: Annotated[Any, Hint("accounting")] = None
    metadata: Annotated[Any, Hint("accounting")] = None
    store: Annotated[Any, Hint("nothing is stored")] = None
    service_tier: Annotated[Any, Hint("accounting; X-Priority is the priority")] = None
    safety_identifier: Annotated[Any, Hint("accounting")] = None
    prompt_cache_options: Annotated[Any, Hint("prefixes of prompts are cached by themselves")] = None
    prediction: Annotated[Any, Hint("workers draft by themselves")] = None
    request_id: Annotated[Any, Hint("X-Request-Id is the id")] = None

    @field_validator("stream_options")
    @classmethod
    def _needs_a_stream(cls, options: object, info: ValidationInfo) -> object:
        if options is not None and not info.data.get("stream", True):
            raise ValueError("needs stream: true")
        return options


# `POST /v1/chat/completions`.


class ChatPrompt(Body):
    """What chat completions and /tokenize take beside messages: what the chat template shows; and what they do not support."""

    tools: Annotated[list[Tool], FIRST_ERROR] = Field(default_factory=list)
    """Functions that the model may call."""
    tool_choice: Choice | None = None
    """Whether it calls them, and which: "auto", "none", "required", one tool, or some of them."""
    parallel_tool_calls: bool | None = None
    """false: one call at most."""
    reasoning_effort: Text | None = None
    """A variable of the chat template. "none" is enable_thinking: false, and thinking: false."""
    enable_thinking: bool | None = None
    """A variable of the chat template."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template."""
    add_generation_prompt: bool | None = None
    """Whether a new message of the assistant begins behind the last one: the default."""
    continue_final_message: bool = False
    """Whether the output goes on with the last message."""

    functions: Annotated[Any, Unsupported([], why="the older form of tools")] = None
    function_call: Annotated[Any, Unsupported("none", "auto", why="the older form of tool_choice")] = None
    modalities: Annotated[Any, Unsupported(["text"], why="the models write text")] = None
    audio: Annotated[Any, Unsupported(why="the models write text")] = None
    web_search_options: Annotated[Any, Unsupported(why="the mesh has no tools of its own")] = None
    moderation: Annotated[Any, Unsupported(why="the mesh has no moderation")] = None
    verbosity: Annotated[Any, Unsupported("medium", why="templates do not read it")] = None
    echo: Annotated[Any, Unsupported(False, why="of completions")] = None
    best_of: Annotated[Any, Unsupported(1, why="of completions")] = None
    chat_template: Annotated[Any, Unsupported(why="the model's own is used")] = None
    documents: Annotated[Any, Unsupported([], why="put them into messages")] = None
    add_special_tokens: Annotated[Any, Unsupported(False, why="the template writes them")] = None


class ChatCompletionRequest(Generation, ChatPrompt):
    """A conversation, whose next message is wanted."""

    messages: Messages
    """Oldest first."""
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_UINT32)] | None = None
    """As max_tokens, which is the older name; reasoning counts."""
    logprobs: bool = False
    """The log-probabilities of the output's tokens are wanted."""
    top_logprobs: Annotated[Count | None, Field(json_schema_extra={"maximum": MAX_LOGPROBS})] = None
    """And those of so many of the likeliest ones."""

    @field_validator("top_logprobs")
    @classmethod
    def _needs_logprobs(cls, number: int | None, info: ValidationInfo) -> int | None:
        if number and not info.data.get("logprobs", True):
            raise ValueError("needs logprobs: true")
        return number


# `POST /v1/completions`.

MAX_PROMPTS = 128
MAX_TOKEN_IDS = 1 << 20
"""Bounds the token ids of all prompts together: more than any model here has room for, and each costs time on the event loop."""
MAX_TEXT_CHARS = 2 << 20
"""Bounds the text of all prompts together; each prompt has a bound of its own (max_prompt_bytes)."""


def _is_prompt(value: object) -> object:
    if not isinstance(value, str | list) or value == []:
        raise ValueError("is missing; send a text, texts, token ids or lists of token ids")
    return value


def _prompt_tag(value: object) -> str:
    """Tell a text, token ids and several prompts apart."""
    if not isinstance(value, list):
        return "<text>"
    return "<ids>" if isinstance(value[0], int) else "<several>"


def _one_tag(value: object) -> str:
    return "<ids>" if isinstance(value, list) else "<text>"


def _bounded(values: object) -> object:
    """Bound all prompts together, before any of them is looked at."""
    items = values if isinstance(values, list) else []
    if sum(len(item) for item in items if isinstance(item, list)) > MAX_TOKEN_IDS:
        raise ValueError(f"more than {MAX_TOKEN_IDS} token ids in all prompts; send them in several requests")
    if sum(len(item) for item in items if isinstance(item, str)) > MAX_TEXT_CHARS:
        raise ValueError(f"more than {MAX_TEXT_CHARS} characters in all prompts; send them in several requests")
    return values


TextPrompt = Annotated[Text, Tag("<text>")]
IdsPrompt = Annotated[Ids, at_most(MAX_TOKEN_IDS, "token ids"), Tag("<ids>")]
OnePrompt = Annotated[TextPrompt | IdsPrompt, Discriminator(_one_tag)]
Prompts = Annotated[
    list[OnePrompt], FIRST_ERROR, BeforeValidator(_bounded), at_most(MAX_PROMPTS, "prompts"), Tag("<several>")
]  # the length is checked first
Prompt = Annotated[TextPrompt | IdsPrompt | Prompts, Discriminator(_prompt_tag), BeforeValidator(_is_prompt)]


class CompletionRequest(Generation):
    """One or several prompts to continue."""

    max_tokens: Annotated[int, Field(ge=0, le=MAX_UINT32)] | None = None
    """At most so many tokens, 16 if it is left out; 0, with echo or prompt_logprobs: the prompt alone."""
    prompt: Prompt
    """A text, texts, token ids, or lists of them. Choice c of prompt p has the index p * n + c."""
    logprobs: Annotated[Count | None, Field(json_schema_extra={"maximum": MAX_LOGPROBS})] = None
    """The log-probabilities of the output's tokens are wanted, and those of so many of the likeliest ones."""
    suffix: Text = ""
    """The output goes between prompt and suffix. Refused where the model has no tokens for that (fill-in-the-middle)."""
    echo: bool = False
    """The prompt goes before each choice."""
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """So many choices are made, of which the n with the highest log-probability per token are the answer; all count in usage."""
    parallel_tool_calls: Annotated[Any, Hint("of chat completions")] = None
    add_special_tokens: Annotated[Any, Unsupported(True, why="a text gets the tokens that the model wants")] = None
    prompt_embeds: Annotated[Any, Unsupported(why="prompts are texts or token ids")] = None

    @field_validator("echo")
    @classmethod
    def _without_suffix(cls, echo: bool, info: ValidationInfo) -> bool:
        if echo and info.data.get("suffix"):
            raise ValueError("excludes suffix: what goes around an output is no beginning of it")
        return echo

    @field_validator("best_of")
    @classmethod
    def _of_whole_answers(cls, number: int | None, info: ValidationInfo) -> int | None:
        if number is None or "n" not in info.data or "stream" not in info.data:
            return number
        wanted = info.data["n"] or 1
        if number < wanted:
            raise ValueError(f"{number} is less than n, {wanted}")
        if number > wanted and info.data["stream"]:
            raise ValueError("excludes stream: the best ones are known at the end")
        return number


# `POST /tokenize` and `POST /detokenize`, in vLLM's form.


class _Tokenize(Body):
    model: Text = ""
    """May be left out while the mesh serves one."""
    return_token_strs: bool = False
    """The tokens are wanted as texts, too."""


class TokenizeTextRequest(_Tokenize):
    """A text whose tokens are wanted."""

    prompt: Annotated[Text, Field(min_length=1)]
    add_special_tokens: bool = True
    """Whether the special tokens count that the model wants around a text."""


class TokenizeChatRequest(_Tokenize, ChatPrompt, _Foreign):
    """A conversation whose tokens are wanted, as the chat template renders it."""

    messages: Messages
    prompt: Annotated[Any, Unsupported(words="excludes messages; send one of them", why="excludes messages")] = None


class DetokenizeRequest(Body):
    """Tokens whose text is wanted."""

    model: Text = ""
    """May be left out while the mesh serves one."""
    tokens: Annotated[Ids, at_most(MAX_TOKEN_IDS, "token ids")]
    """Token ids."""
