"""Converts between the client's own types and the protobufs of protos/pdmesh/v1: requests out, events in."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar, cast

from pdmesh.client.types import (
    ChatOptions,
    Choice,
    Completed,
    Delta,
    Embedding,
    Event,
    FinishReason,
    GenerateOptions,
    Generation,
    Logprobs,
    Message,
    MessageLike,
    Model,
    Pooling,
    PrefillMode,
    Priority,
    ReleasedSession,
    Started,
    Timings,
    TokenLogprob,
    Tokens,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolChoice,
    ToolLike,
    Usage,
)
from pdmesh.errors import InvalidArgument
from pdmesh.v1 import common_pb2, mesh_pb2, worker_pb2

# A constraint on the output, from the keyword arguments of a request to the wire.


CONSTRAINTS = frozenset(field.name for field in common_pb2.Constraint.DESCRIPTOR.fields)


def set_constraint(constraint: common_pb2.Constraint, name: str, value: object) -> None:
    """Set the constraint. `name` is one of CONSTRAINTS, of which a request has one. Raises InvalidArgument for two of them,
    TypeError or ValueError for a wrong type."""
    given = constraint.WhichOneof("kind")
    if given is not None:
        raise InvalidArgument(name, f"{name} excludes {given}; give one of them")
    if name == "json_schema":
        constraint.json_schema = value if isinstance(value, str) else json.dumps(_mapping(value))
    elif name == "choice":
        constraint.choice.values.extend(_strings(value))
    else:
        setattr(constraint, name, value)


def _mapping(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise TypeError("a JSON schema is a dictionary, or a string with JSON text")
    return value


def _strings(value: object) -> list[str]:
    # A string is a sequence of strings too, which is never intended.
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        raise TypeError("a list of strings is needed")
    return list(value)


_SAMPLING = frozenset(field.name for field in common_pb2.SamplingParams.DESCRIPTOR.fields) - {"constraint"}
_OPTIONS = frozenset(field.name for field in mesh_pb2.RequestOptions.DESCRIPTOR.fields)
_FINISH_REASONS = {
    common_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    common_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    common_pb2.FINISH_REASON_TOOL_CALLS: FinishReason.TOOL_CALLS,
    common_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
}
_MODES = {mesh_pb2.PREFILL_MODE_LOCAL: PrefillMode.LOCAL, mesh_pb2.PREFILL_MODE_REMOTE: PrefillMode.REMOTE}
_WIRE_MODES = {mode: wire for wire, mode in _MODES.items()}
_WIRE_TOOL_CHOICES = {
    ToolChoice.AUTO: mesh_pb2.TOOL_CHOICE_AUTO,
    ToolChoice.NONE: mesh_pb2.TOOL_CHOICE_NONE,
    ToolChoice.REQUIRED: mesh_pb2.TOOL_CHOICE_REQUIRED,
}
_TEMPLATE_VARIABLES = ("enable_thinking", "reasoning_effort")
CHAT_OPTIONS = (
    "tools",
    "tool_choice",
    "tool_names",
    "parallel_tool_calls",
    "chat_template_kwargs",
    *_TEMPLATE_VARIABLES,
    "add_generation_prompt",
    "continue_final_message",
)
_WIRE_PRIORITIES = {
    Priority.INTERACTIVE: common_pb2.PRIORITY_INTERACTIVE,
    Priority.STANDARD: common_pb2.PRIORITY_STANDARD,
    Priority.BATCH: common_pb2.PRIORITY_BATCH,
}
E = TypeVar("E", bound=Enum)


def generate_request(prompt: str | Sequence[int], model: str, options: GenerateOptions) -> mesh_pb2.GenerateRequest:
    """Return the request for a text or token prompt. Raises InvalidArgument for what no message can hold."""
    sampling, request_options = _split(options)
    request = mesh_pb2.GenerateRequest(model=model, sampling=sampling, options=request_options)
    if isinstance(prompt, str):
        request.text = prompt
        return request
    with _FieldErrors("prompt"):
        request.tokens.CopyFrom(mesh_pb2.TokenIds(ids=prompt))
    return request


def chat_request(messages: Iterable[MessageLike], model: str, options: ChatOptions) -> mesh_pb2.ChatRequest:
    """Return the request for the next message of a conversation. Raises InvalidArgument for what no message can hold."""
    plain: dict[str, object] = dict(options)
    own = {name: value for name in CHAT_OPTIONS if (value := plain.pop(name, None)) is not None}
    sampling, request_options = _split(cast(GenerateOptions, plain))
    request = mesh_pb2.ChatRequest(model=model, messages=chat_messages(messages), sampling=sampling, options=request_options)
    variables = {name: own.pop(name) for name in _TEMPLATE_VARIABLES if name in own}
    if variables or "chat_template_kwargs" in own:
        request.chat_template_kwargs = _template_kwargs(own.pop("chat_template_kwargs", {}), variables)
    for name, value in own.items():
        with _FieldErrors(name):
            if name == "tools":
                request.tools.extend(map(_tool, cast(Iterable[ToolLike], value)))
            elif name == "tool_choice":
                request.tool_choice = _WIRE_TOOL_CHOICES[_member(ToolChoice, name, value)]
            elif name == "tool_names":
                request.tool_names.extend(_strings(value))
            else:
                setattr(request, name, value)
    return request


def _template_kwargs(given: object, variables: Mapping[str, object]) -> str:
    with _FieldErrors("chat_template_kwargs"):
        known = json.loads(given) if isinstance(given, str) else given
        return json.dumps({**variables, **_mapping(known)})


def _tool(tool: ToolLike) -> mesh_pb2.Tool:
    if not isinstance(tool, Tool):
        tool = Tool(**cast(Mapping[str, Any], tool.get("function", tool)))
    parameters = tool.parameters
    text = parameters if isinstance(parameters, str) else "" if parameters is None else json.dumps(_mapping(parameters))
    return mesh_pb2.Tool(name=tool.name, description=tool.description, parameters=text, strict=tool.strict)


def chat_messages(messages: Iterable[MessageLike]) -> list[mesh_pb2.ChatMessage]:
    """Return messages of any accepted shape as protobufs."""
    with _FieldErrors("messages"):
        return [_wire_message(message) for message in map(_message, messages)]


def _wire_message(message: Message) -> mesh_pb2.ChatMessage:
    calls = [mesh_pb2.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in message.tool_calls]
    return mesh_pb2.ChatMessage(
        role=message.role,
        content=message.content,
        tool_calls=calls,
        reasoning=message.reasoning,
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def tokenize_request(
    text: str | Iterable[MessageLike], model: str, tools: Iterable[ToolLike] = (), chat_template_kwargs: object = None
) -> mesh_pb2.TokenizeRequest:
    """Return the request for the token ids of a text, or of messages. Raises InvalidArgument for what no message can hold."""
    request = mesh_pb2.TokenizeRequest(model=model)
    if isinstance(text, str):
        request.text = text
    else:
        request.messages.extend(chat_messages(text))
    with _FieldErrors("tools"):
        request.tools.extend(map(_tool, tools))
    if chat_template_kwargs:
        request.chat_template_kwargs = _template_kwargs(chat_template_kwargs, {})
    return request


_POOLINGS = {Pooling.MEAN: common_pb2.POOLING_MEAN, Pooling.LAST: common_pb2.POOLING_LAST}


def embed_request(
    inputs: Iterable[str | Sequence[int]], model: str, pooling: Pooling, dimensions: int, *, normalize: bool
) -> mesh_pb2.EmbedRequest:
    """Return the request for the embeddings of texts, or of token ids."""
    wanted = [
        mesh_pb2.EmbedInput(text=each) if isinstance(each, str) else mesh_pb2.EmbedInput(tokens=mesh_pb2.TokenIds(ids=each))
        for each in inputs
    ]
    return mesh_pb2.EmbedRequest(
        model=model, inputs=wanted, pooling=_POOLINGS[pooling], dimensions=dimensions, unnormalized=not normalize
    )


def embeddings(response: mesh_pb2.EmbedResponse) -> tuple[Embedding, ...]:
    """Return the embeddings, in the order of the inputs."""
    return tuple(Embedding(tuple(each.values), each.num_tokens) for each in response.embeddings)


def _message(message: MessageLike) -> Message:
    if isinstance(message, Message):
        return message
    if isinstance(message, tuple):
        return Message(*message)
    fields = cast(Mapping[str, Any], message)
    return Message(
        fields["role"],
        fields.get("content") or ("" if fields.get("tool_calls") else fields["content"]),
        tuple(map(_call, fields.get("tool_calls") or ())),
        fields.get("reasoning") or fields.get("reasoning_content") or "",
        fields.get("tool_call_id") or "",
        fields.get("name") or "",
    )


def _call(call: ToolCall | Mapping[str, Any]) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    function = call.get("function", call)
    arguments = function.get("arguments") or "{}"
    return ToolCall(
        function["name"], arguments if isinstance(arguments, str) else json.dumps(_mapping(arguments)), call.get("id") or ""
    )


def released(response: mesh_pb2.ReleaseSessionResponse) -> ReleasedSession:
    """Return the response of ReleaseSession."""
    return ReleasedSession(response.num_blocks, response.num_workers, response.num_unreachable)


def _split(options: GenerateOptions) -> tuple[common_pb2.SamplingParams, mesh_pb2.RequestOptions]:
    sampling, request_options = common_pb2.SamplingParams(), mesh_pb2.RequestOptions()
    for name, value in options.items():
        if value is None:
            continue
        if name in _SAMPLING:
            _set(sampling, name, value)
        elif name in CONSTRAINTS:
            with _FieldErrors(name):
                set_constraint(sampling.constraint, name, value)
        elif name in _OPTIONS:
            _set(request_options, name, _enum_value(name, value))
        elif name in CHAT_OPTIONS:
            raise InvalidArgument(name, f"{name} is a parameter of chat, not of generate")
        else:
            known = ", ".join(sorted({*_SAMPLING, *CONSTRAINTS, *_OPTIONS, *CHAT_OPTIONS}))
            raise InvalidArgument(name, f"{name} is not a parameter of a request; there are: {known}")
    return sampling, request_options


def _biases(value: object) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise TypeError("a dictionary with a number for each token id is needed")
    return value


def _set(message: common_pb2.SamplingParams | mesh_pb2.RequestOptions, name: str, value: object) -> None:
    with _FieldErrors(name):
        if name == "logit_bias":
            biases = (common_pb2.TokenBias(token_id=token_id, bias=bias) for token_id, bias in _biases(value).items())
            getattr(message, name).extend(biases)
        elif isinstance(value, (list, tuple, set, frozenset)):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)


def _enum_value(name: str, value: object) -> object:
    if name == "mode":
        return _WIRE_MODES[_member(PrefillMode, name, value)]
    if name == "priority":
        return _WIRE_PRIORITIES[_member(Priority, name, value)]
    return value


def _member(kind: type[E], name: str, value: object) -> E:
    try:
        return kind(value)
    except ValueError:
        choices = ", ".join(str(member.value) for member in kind)
        raise InvalidArgument(name, f"{name} is {value!r}; it must be one of {choices}") from None


class _FieldErrors:
    """Turn protobuf's rejection of a value (wrong type, out of range) into an InvalidArgument that names the field."""

    def __init__(self, field: str) -> None:
        self._field = field

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, (TypeError, ValueError, KeyError, AttributeError)):
            raise InvalidArgument(self._field, f"{self._field} cannot be sent: {error}") from error


def event(response: mesh_pb2.GenerateResponse) -> Event | None:
    """Return the event of a message; None for a kind that this client does not know (from a newer router)."""
    kind = response.WhichOneof("event")
    if kind == "started":
        started = response.started
        return Started(started.request_id, started.seed, started.model, started.num_prompt_tokens)
    if kind == "delta":
        return _delta(response.delta)
    if kind == "completed":
        return Completed(_usage(response.completed.usage), timings(response.completed.timings))
    return None


def _delta(delta: mesh_pb2.Delta) -> Delta:
    return Delta(
        choice=delta.choice,
        first_index=delta.first_index,
        token_ids=tuple(delta.token_ids),
        text=delta.text,
        logprobs=tuple(_logprobs(entry) for entry in delta.logprobs),
        finish_reason=_FINISH_REASONS.get(delta.finish_reason),
        stop_reason=delta.stop_reason,
        reasoning=delta.reasoning,
        tool_calls=tuple(ToolCallDelta(piece.index, piece.id, piece.name, piece.arguments) for piece in delta.tool_calls),
        warning=delta.warning,
        prompt_logprobs=tuple(_logprobs(entry) for entry in delta.prompt_logprobs),
        system_fingerprint=delta.system_fingerprint,
    )


def _logprobs(logprobs: common_pb2.Logprobs) -> Logprobs:
    return Logprobs(_token_logprob(logprobs.chosen), tuple(_token_logprob(token) for token in logprobs.top))


def _token_logprob(token: common_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(token.token_id, token.logprob, token.text)


def _usage(usage: mesh_pb2.Usage) -> Usage:
    return Usage(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.cached_tokens,
        usage.drafted_tokens,
        usage.accepted_tokens,
        usage.reasoning_tokens,
    )


def timings(wire: mesh_pb2.Timings) -> Timings:
    """Return the timings of a completed request; the fields have the same names on both sides."""
    plain = {field.name: getattr(wire, field.name) for field in wire.DESCRIPTOR.fields if field.name != "mode"}
    return Timings(mode=_MODES.get(wire.mode), **plain)


def emitted_choice(index: int, token_ids: Sequence[int], finish_reason: FinishReason | None) -> common_pb2.EmittedChoice:
    """Return what the caller has received of a choice, for a Resume."""
    wire = {reason: value for value, reason in _FINISH_REASONS.items()}
    wire[FinishReason.TOOL_CALLS] = common_pb2.FINISH_REASON_STOP  # to the mesh it is the same
    reason = common_pb2.FINISH_REASON_UNSPECIFIED if finish_reason is None else wire[finish_reason]
    return common_pb2.EmittedChoice(index=index, token_ids=token_ids, finish_reason=reason)


def generation(events: Iterable[Event]) -> Generation:
    """Return the complete answer of a finished stream."""
    started, completed, deltas = None, None, list[Delta]()
    for item in events:
        if isinstance(item, Started):
            started = item
        elif isinstance(item, Completed):
            completed = item
        else:
            deltas.append(item)
    assert started is not None and completed is not None, "a stream that ended without error has both"
    by_choice: Mapping[int, list[Delta]] = {index: [] for index in sorted({delta.choice for delta in deltas} | {0})}
    for delta in deltas:
        by_choice[delta.choice].append(delta)
    return Generation(
        request_id=started.request_id,
        model=started.model,
        seed=started.seed,
        choices=tuple(_choice(index, parts) for index, parts in by_choice.items()),
        usage=completed.usage,
        timings=completed.timings,
        num_resumes=completed.num_resumes,
        prompt_logprobs=tuple(entry for delta in deltas for entry in delta.prompt_logprobs),
    )


def _choice(index: int, deltas: Sequence[Delta]) -> Choice:
    return Choice(
        index=index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        finish_reason=deltas[-1].finish_reason if deltas else None,
        stop_reason=deltas[-1].stop_reason if deltas else "",
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        reasoning="".join(delta.reasoning for delta in deltas),
        tool_calls=_calls(deltas),
        warnings=tuple(delta.warning for delta in deltas if delta.warning),
    )


def _calls(deltas: Sequence[Delta]) -> tuple[ToolCall, ...]:
    pieces: dict[int, list[ToolCallDelta]] = {}
    for piece in (each for delta in deltas for each in delta.tool_calls):
        pieces.setdefault(piece.index, []).append(piece)
    return tuple(
        ToolCall(parts[0].name, "".join(part.arguments for part in parts), parts[0].id) for _, parts in sorted(pieces.items())
    )


def tokens(response: mesh_pb2.TokenizeResponse) -> Tokens:
    """Return a tokenized text."""
    return Tokens(tuple(response.token_ids), response.max_context)


def models(response: mesh_pb2.ListModelsResponse) -> tuple[Model, ...]:
    """Return the models of a mesh."""
    return tuple(
        Model(m.name, m.max_context, m.num_prefill_workers, m.num_decode_workers, _set_numbers(m.sampling_defaults))
        for m in response.models
    )


def _set_numbers(sampling: common_pb2.SamplingParams) -> dict[str, float]:
    return {descriptor.name: value for descriptor, value in sampling.ListFields()}


def traffic_split(model: str, weights: Mapping[str, int]) -> mesh_pb2.SetTrafficSplitRequest:
    """Return the request. Raises InvalidArgument for what no message can hold."""
    for revision, weight in weights.items():
        if not isinstance(weight, int) or not 0 <= weight < 1 << 32:
            raise InvalidArgument("weights", f"the weight of {revision[:80]!r} is {weight!r}; give a whole number from 0")
    shares = [mesh_pb2.RevisionWeight(revision=revision, weight=weight) for revision, weight in weights.items()]
    return mesh_pb2.SetTrafficSplitRequest(model=model, weights=shares)


_SERVING_STATES = {
    "running": worker_pb2.SERVING_STATE_RUNNING,
    "paused": worker_pb2.SERVING_STATE_PAUSED,
    "asleep": worker_pb2.SERVING_STATE_ASLEEP,
}


def serving(state: str, model: str, finish_s: float | None, *, abort: bool) -> mesh_pb2.MeshSetServingRequest:
    """Return the request to be in `state`; `finish_s` None: what runs is not waited for; `abort`: it ends. Raises ValueError."""
    if state not in _SERVING_STATES:
        raise ValueError(f"state: {state!r} is none of {', '.join(_SERVING_STATES)}")
    if abort and (finish_s is not None or state == "running"):
        raise ValueError('abort_running: goes with "paused" or "asleep", and not with finish_running')
    asked = worker_pb2.SetServingRequest(state=_SERVING_STATES[state], finish_running=finish_s is not None, abort_running=abort)
    if finish_s is not None:
        if not 0 < finish_s <= 24 * 3600:
            raise ValueError(f"finish_s: {finish_s} is not above 0 and at most a day")
        asked.timeout_ms = max(1, round(1000 * finish_s))
    return mesh_pb2.MeshSetServingRequest(model=model, serving=asked)
