"""The arguments and results of the client library: plain frozen dataclasses, no protobuf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from pdmesh.sampling_params import SamplingOptions


class FinishReason(Enum):
    """Name why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"
    """Somebody has ended all requests of the model: it would have gone on."""


class PrefillMode(Enum):
    """Name where the prompt was computed: on the decode worker itself, or on a prefill worker that pushed its KV."""

    LOCAL = "local"
    REMOTE = "remote"


class ToolChoice(Enum):
    """Name whether an output is calls of tools: as the model chooses, none, or at least one."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


class Priority(Enum):
    """Name the class in which a request waits under load."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"


@dataclass(frozen=True)
class Tool:
    """Describe a function that the model may call. `parameters`: a JSON Schema of an object, or its text; None: any object.
    `strict`: refuse a schema that calls cannot be held to."""

    name: str
    description: str = ""
    parameters: Mapping[str, object] | str | None = None
    strict: bool = False


@dataclass(frozen=True)
class ToolCall:
    """Hold a call: `arguments` is a JSON object as text, unless the call was cut off."""

    name: str
    arguments: str = "{}"
    id: str = ""


@dataclass(frozen=True)
class ToolCallDelta:
    """Hold a piece of the call number `index` of a choice: `id` and `name` come with its first piece."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """Hold one turn of a conversation. `role` is "system", "user", "assistant", "tool" or another that the template knows.

    `tool_calls`, `reasoning`: of an assistant. `tool_call_id`, `name`: of a tool's answer, the call and the tool."""

    role: str
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    tool_call_id: str = ""
    name: str = ""


# One message, as `chat` accepts it: a Message, ("user", "text"), or a dictionary with the fields of a Message, such as
# {"role": "user", "content": "text"}; calls may also have the form of OpenAI's.
MessageLike = Message | tuple[str, str] | Mapping[str, object]
# A tool, as `chat` accepts it: a Tool, or a dictionary with its fields, also within {"type": "function", "function": …}.
ToolLike = Tool | Mapping[str, object]


class GenerateOptions(SamplingOptions, total=False):
    """Keyword arguments of generate and chat; what is absent takes the mesh's default (see SamplingParams in
    protos/pdmesh/v1)."""

    stop: Sequence[str]
    json_schema: str | Mapping[str, object]  # of json_schema, regex, choice and grammar at most one: what the output must be
    regex: str
    choice: Sequence[str]
    grammar: str
    request_id: str
    tenant: str
    priority: Priority | str
    slo_ttft_ms: int
    slo_tpot_ms: int
    mode: PrefillMode | str
    cache_salt: str
    session_id: str  # the conversation or agent that the request is a part of, unique in its tenant
    kv_retention_s: int  # how long its KV is worth keeping past others'; a hint
    session_final: bool  # nothing of this session follows
    priority_hint: int  # the place among the tenant's own requests of one priority; higher ones first
    attempt: int  # how often the caller has sent this request before; the client adds its own attempts


class ChatOptions(GenerateOptions, total=False):
    """Keyword arguments of chat: those of generate, and what only a conversation has (see ChatRequest in protos/pdmesh/v1)."""

    tools: Sequence[ToolLike]
    tool_choice: ToolChoice | str
    tool_names: Sequence[str]  # the tools that may be called; with tool_choice "required" and one name: that one
    parallel_tool_calls: bool
    chat_template_kwargs: str | Mapping[str, object]
    enable_thinking: bool  # one of chat_template_kwargs
    reasoning_effort: str  # as well
    add_generation_prompt: bool
    continue_final_message: bool


@dataclass(frozen=True)
class TokenLogprob:
    """Hold a token and its natural log-probability under the model's own distribution."""

    token_id: int
    logprob: float
    text: str


@dataclass(frozen=True)
class Logprobs:
    """Hold one position of the output: the token drawn, and the most likely ones, most likely first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True)
class Usage:
    """Count tokens over all choices; tokens after a stop string do not count.

    The model thought with `reasoning_tokens` of the completion. Workers drafted `drafted_tokens`, of which `accepted_tokens` were
    accepted; after a resumed stream, those of its last attempt."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True)
class Timings:
    """Hold where a request's time went, in nanoseconds; protos/pdmesh/v1/mesh.proto says what each field measures.

    After a resumed stream they describe its last attempt."""

    ttft_ns: int = 0
    route_ns: int = 0
    admission_queue_ns: int = 0
    reserve_ns: int = 0
    prefill_queue_ns: int = 0
    prefill_compute_ns: int = 0
    first_token_return_ns: int = 0
    retry_ns: int = 0
    kv_exposed_ns: int = 0
    decode_queue_ns: int = 0
    tpot_ns: int = 0
    total_ns: int = 0
    kv_bytes: int = 0
    transport: str = ""
    mode: PrefillMode | None = None
    prefill_worker: str = ""
    decode_worker: str = ""
    num_retries: int = 0
    num_resubmissions: int = 0
    prefill_cached_tokens: int = 0
    decode_cached_tokens: int = 0
    fetched_tokens: int = 0
    restored_tokens: int = 0
    rounded_tokens: int = 0

    @property
    def ttft_parts(self) -> dict[str, int]:
        """Return the parts of the TTFT by name, in nanoseconds, in the order in which they happen."""
        return {
            "route": self.route_ns,
            "admission_queue": self.admission_queue_ns,
            "reserve": self.reserve_ns,
            "prefill_queue": self.prefill_queue_ns,
            "prefill_compute": self.prefill_compute_ns,
            "first_token_return": self.first_token_return_ns,
            "retry": self.retry_ns,
        }

    @property
    def first_gap_parts(self) -> dict[str, int]:
        """Return what the hand-off adds between the first token and the second, by name, in nanoseconds."""
        return {"kv_exposed": self.kv_exposed_ns, "decode_queue": self.decode_queue_ns}


@dataclass(frozen=True)
class Started:
    """Begin a stream: hold what determines its tokens."""

    request_id: str
    seed: int
    model: str
    num_prompt_tokens: int


@dataclass(frozen=True)
class Delta:
    """Hold new output of one choice. `token_ids[0]` has output index `first_index`; text may lag behind the ids.

    Of chats: `reasoning` and `tool_calls`, which are no part of the text; `warning`: the model wrote something like a call that
    is none, and it is in the text. `prompt_logprobs`: of the prompt's tokens, where they were asked for (that of the first is
    NaN); the first delta of one choice has them. `system_fingerprint` of the weights and formats that the tokens are computed
    with: the first delta with tokens has it, where the workers say which weights they have."""

    choice: int
    first_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[Logprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    warning: str = ""
    prompt_logprobs: tuple[Logprobs, ...] = ()
    system_fingerprint: str = ""


@dataclass(frozen=True)
class Completed:
    """End a stream. `num_resumes` counts the routers that were lost on the way."""

    usage: Usage
    timings: Timings
    num_resumes: int = 0


Event = Started | Delta | Completed


@dataclass(frozen=True)
class Choice:
    """Hold one complete output."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: str
    logprobs: tuple[Logprobs, ...]
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def message(self) -> Message:
        """Return the output of a chat as the next turn of its conversation."""
        return Message("assistant", self.text, self.tool_calls, self.reasoning)


@dataclass(frozen=True)
class Generation:
    """Hold the complete answer to a request. `prompt_logprobs`: of the prompt's tokens, where they were asked for; that of the
    first is NaN."""

    request_id: str
    model: str
    seed: int
    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings
    num_resumes: int
    prompt_logprobs: tuple[Logprobs, ...] = ()

    @property
    def text(self) -> str:
        """Return the text of the first choice."""
        return self.choices[0].text

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Return the calls of the first choice."""
        return self.choices[0].tool_calls

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return the token ids of the first choice."""
        return self.choices[0].token_ids


@dataclass(frozen=True)
class Tokens:
    """Hold a tokenized text, and the model's context, in tokens."""

    token_ids: tuple[int, ...]
    max_context: int


class Pooling(Enum):
    """Name how an embedding is made of the hidden states of a text's tokens."""

    MEAN = "mean"
    LAST = "last"


@dataclass(frozen=True)
class Embedding:
    """Hold the embedding of a text, and the number of its tokens."""

    values: tuple[float, ...]
    num_tokens: int


@dataclass(frozen=True)
class ReleasedSession:
    """Hold what workers retained for a session until it was released. `num_unreachable` workers did not answer: what they retain
    is released when its time is over."""

    num_blocks: int
    num_workers: int
    num_unreachable: int


@dataclass(frozen=True)
class Model:
    """Describe a model that the mesh serves, and how many workers of each role are ready for it."""

    name: str
    max_context: int
    num_prefill_workers: int
    num_decode_workers: int
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """What a request gets that leaves these parameters out: the publisher's choice, from generation_config.json."""
