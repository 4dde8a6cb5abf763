"""`POST /v1/responses`: the body as types, and its way to a ChatRequest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field, Tag

from pdmesh.text.grammar import MAX_BYTES
from pdmesh.v1 import common_pb2, mesh_pb2
from router.api.http.errors import Names
from router.api.http.fields import MAX_UINT32, JsonObject
from router.api.http.sessions import SessionBody
from router.api.http.types import Body, DrawnBody, Ignored, Refused, Text, Unsupported, checked, drawn
from router.api.responses.items import Conversation, Item, ItemReference, Located, tagged
from router.api.responses.tools import Tool, ToolChoice, choose, dumped, offer
from router.api.validation import MAX_STOP_STRINGS, refuse

LOGPROBS = "message.output_text.logprobs"
MAX_TOP_LOGPROBS = 20
MAX_METADATA = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_CHARS = 512
MAX_ITEMS = 10_000
JSON_OBJECT = '{"type":"object"}'


def _metadata(pairs: dict[str, str]) -> dict[str, str]:
    if len(pairs) > MAX_METADATA:
        raise ValueError(f"has {len(pairs)} pairs; at most {MAX_METADATA} are allowed")
    if any(len(key) > MAX_METADATA_KEY_CHARS or len(value) > MAX_METADATA_CHARS for key, value in pairs.items()):
        raise ValueError(
            f"has a key of more than {MAX_METADATA_KEY_CHARS} characters, or a value of more than {MAX_METADATA_CHARS}"
        )
    return pairs


class PlainFormat(Body):
    """`text.format`: any text, or any JSON object."""

    type: Literal["text", "json_object"]

    def shown(self) -> JsonObject:
        """Return the format as responses repeat it."""
        return {"type": self.type}


class SchemaFormat(Body):
    """`text.format`: JSON that follows a schema, `strict` or not."""

    type: Literal["json_schema"]
    name: Text
    json_schema: dict[str, Any] = Field(alias="schema")
    description: Text | None = None
    strict: bool | None = None

    def shown(self) -> JsonObject:
        """Return the format as responses repeat it."""
        return {
            "type": self.type,
            "name": self.name,
            "description": self.description,
            "schema": self.json_schema,
            "strict": bool(self.strict),
        }


def _no_format(value: object) -> object:
    raise ValueError('is none of "text", "json_object", "json_schema"')


class OtherFormat(Body):
    """`text.format` of no kind that is known."""

    model_config = Body.model_config | {"extra": "ignore"}
    type: Annotated[Any, Refused(_no_format)]

    def shown(self) -> JsonObject:
        """Return nothing: it was refused."""
        return {}


Format = Annotated[
    Annotated[PlainFormat, Tag("<text>")]
    | Annotated[PlainFormat, Tag("<json_object>")]
    | Annotated[SchemaFormat, Tag("<json_schema>")]
    | Annotated[OtherFormat, Tag("<other>")],
    tagged(("text", "json_object", "json_schema")),
]


class TextConfig(Body):
    """What the text of the answer is like. `verbosity` is a variable of the chat template."""

    format: Format = PlainFormat(type="text")
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Body):
    """How much the model thinks. Reasoning itself is shown, never a summary of it."""

    effort: Text | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Ignored = None
    context: Annotated[Any, Unsupported("auto", why="a chat template decides which reasoning of earlier turns it shows")] = None
    mode: Annotated[Any, Unsupported("standard", why="one output is computed")] = None


class StreamOptions(Body):
    """Options of a stream."""

    include_obfuscation: bool = False


class CreateResponse(DrawnBody, SessionBody):
    """The body of `POST /v1/responses`."""

    model: Text | None = None
    input: Text | Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS)]
    instructions: Text | None = None
    previous_response_id: Text | None = None
    store: bool | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    text: TextConfig = TextConfig()
    reasoning: Reasoning = Reasoning()
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_UINT32)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    include: list[
        Literal[
            "message.output_text.logprobs",
            "reasoning.encrypted_content",
            "code_interpreter_call.outputs",
            "computer_call_output.output.image_url",
            "file_search_call.results",
            "message.input_image.image_url",
            "web_search_call.action.sources",
            "web_search_call.results",
        ]
    ] = Field(default_factory=list)
    truncation: Annotated[
        Literal["disabled", "auto"],
        Unsupported("disabled", words='is "auto"; a conversation that is too long is refused, so leave it out and send less'),
    ] = "disabled"
    metadata: Annotated[dict[Text, Text], AfterValidator(_metadata)] = Field(default_factory=dict)
    user: Text | None = None
    safety_identifier: Text | None = None
    service_tier: Ignored = None
    prompt_cache_options: Ignored = None
    access_programs: Ignored = None
    client_metadata: Ignored = None
    image: Ignored = None
    background: Annotated[Any, Unsupported(False, why="a response is computed while its client waits")] = None
    conversation: Annotated[Any, Unsupported(words="is not supported; send previous_response_id, or the items themselves")] = None
    prompt: Annotated[Any, Unsupported(words="is not supported: templates are kept at OpenAI; send instructions and input")] = (
        None
    )
    context_management: Annotated[Any, Unsupported([])] = None
    moderation: Annotated[Any, Unsupported()] = None
    # As vLLM has them.
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOP_STRINGS)] = Field(default_factory=list)
    cache_salt: Text | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Return whether the log-probabilities of the answer's tokens are wanted."""
        return LOGPROBS in self.include or self.top_logprobs > 0


class Kept(NamedTuple):
    """What a request needs of responses that are kept: the conversation before it, and the items that it names, by id. Items are
    JSON, as they are kept, and as types."""

    before: Sequence[tuple[JsonObject, Located]]
    named: Mapping[str, tuple[JsonObject, Located]]


@dataclass(frozen=True)
class Call:
    """Hold one request. `conversation`: the items of its messages as JSON; empty, as are the messages, before `with_kept`."""

    body: CreateResponse
    request: mesh_pb2.ChatRequest
    sent: Sequence[JsonObject]
    conversation: Sequence[JsonObject] = ()
    names: Names = field(default_factory=dict)

    @property
    def requests(self) -> Sequence[mesh_pb2.ChatRequest]:
        """Return the one message."""
        return (self.request,)

    @property
    def is_streamed(self) -> bool:
        """Return whether the output is wanted as events."""
        return self.body.stream

    @property
    def session(self) -> SessionBody:
        """Return what the body says of the session."""
        return self.body

    @property
    def named(self) -> Sequence[tuple[str, str]]:
        """Return where the request names a kept item, and the item's id."""
        if isinstance(self.body.input, str):
            return ()
        return [(f"input[{at}].id", item.id) for at, item in enumerate(self.body.input) if isinstance(item, ItemReference)]

    def names_of(self, number: int) -> Names:
        """Return the names of fields for errors."""
        return self.names

    def with_kept(self, kept: Kept) -> Call:
        """Return the call with its messages. Raises InvalidArgument that names the item."""
        items = [*kept.before, *(self._own(kept))]
        conversation = Conversation(self.body.instructions)
        for _, located in items:
            conversation.add(located)
        request = mesh_pb2.ChatRequest()
        request.CopyFrom(self.request)
        request.messages.extend(conversation.messages)
        origins = {f"messages[{at}]": origin for at, origin in enumerate(conversation.origins)}
        return replace(
            self, request=request, conversation=[value for value, _ in items], names={**_NAMES, **origins, **self.names}
        )

    def _own(self, kept: Kept) -> list[tuple[JsonObject, Located]]:
        """Return the items of the request itself, kept ones in the place of their references."""
        if isinstance(self.body.input, str):
            (value,) = self.sent
            return [(value, Located("input", checked(_Items, {"input": [value]}).input[0]))]
        own = []
        for at, (value, item) in enumerate(zip(self.sent, self.body.input, strict=True)):
            found = kept.named[item.id] if isinstance(item, ItemReference) else (value, Located(f"input[{at}]", item))
            own.append((found[0], Located(f"input[{at}]", found[1].item)))
        return own


class _Items(Body):
    input: list[Item]


_NAMES = {
    "messages": "input",
    "prompt": "input",
    "sampling.max_tokens": "max_output_tokens",
    "sampling.logprobs": "top_logprobs",
    "chat_template_kwargs": "reasoning",
}


def parse(values: JsonObject, options: mesh_pb2.RequestOptions) -> Call:
    """Return the call for a body. One that needs kept responses has no messages yet. Raises InvalidArgument that names the
    field."""
    body = checked(CreateResponse, values)
    if body.stream_options is not None and not body.stream:
        refuse("stream_options", "needs stream: true")
    request = mesh_pb2.ChatRequest(model=body.model or "", options=options, sampling=_sampling(body))
    request.options.cache_salt = body.cache_salt or ""
    names = offer(request, body.tools)
    choose(request, body.tool_choice)
    request.parallel_tool_calls = body.parallel_tool_calls
    _set_template(request, body)
    names |= _constrain(request, body.text)
    if isinstance(body.stop, str):
        names["sampling.stop[0]"] = "stop"
    call = Call(body, request, _as_items(values["input"]), names=names)
    return call if call.named or body.previous_response_id else call.with_kept(Kept((), {}))


def _as_items(given: object) -> list[JsonObject]:
    return given if isinstance(given, list) else [{"type": "message", "role": "user", "content": given}]


def _sampling(body: CreateResponse) -> common_pb2.SamplingParams:
    sampling = drawn(body)
    sampling.stop.extend([body.stop] if isinstance(body.stop, str) else body.stop)
    if body.max_output_tokens is not None:
        sampling.max_tokens = body.max_output_tokens
    if body.wants_logprobs:
        sampling.logprobs = body.top_logprobs
    return sampling


def _set_template(request: mesh_pb2.ChatRequest, body: CreateResponse) -> None:
    """Set the variables of the chat template; which it reads is its own affair."""
    variables: JsonObject = {}
    if body.reasoning.effort == "none":
        variables |= {"enable_thinking": False, "thinking": False}
    elif body.reasoning.effort is not None:
        variables["reasoning_effort"] = body.reasoning.effort
    if body.text.verbosity is not None:
        variables["verbosity"] = body.text.verbosity
    if variables:
        request.chat_template_kwargs = dumped("reasoning", variables)


def _constrain(request: mesh_pb2.ChatRequest, text: TextConfig) -> dict[str, str]:
    """Set the constraint that the format asks for; return the names of its fields."""
    if text.format.type == "text":
        return {}
    param, schema = "text.format", JSON_OBJECT
    if isinstance(text.format, SchemaFormat):
        param = "text.format.schema"
        schema = dumped(param, text.format.json_schema)
    if len(schema) > 2 * MAX_BYTES:
        refuse(param, f"has about {len(schema)} bytes; at most {MAX_BYTES} are allowed")
    request.sampling.constraint.json_schema = schema
    return {"sampling.constraint": param, "sampling.constraint.json_schema": param}
