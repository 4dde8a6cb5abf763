"""Converts between the client's own types and the protobufs of protos/pdmesh/v1: requests out, events in."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import TypeVar

from pdmesh.client.types import (
    Choice,
    Completed,
    Delta,
    Event,
    FinishReason,
    GenerateOptions,
    Generation,
    Logprobs,
    Message,
    MessageLike,
    Model,
    PrefillMode,
    Priority,
    Started,
    Timings,
    TokenLogprob,
    Tokens,
    Usage,
)
from pdmesh.errors import InvalidArgument
from pdmesh.v1 import common_pb2, mesh_pb2

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
}
_MODES = {mesh_pb2.PREFILL_MODE_LOCAL: PrefillMode.LOCAL, mesh_pb2.PREFILL_MODE_REMOTE: PrefillMode.REMOTE}
_WIRE_MODES = {mode: wire for wire, mode in _MODES.items()}
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


def chat_request(messages: Iterable[MessageLike], model: str, options: GenerateOptions) -> mesh_pb2.ChatRequest:
    """Return the request for the next message of a conversation. Raises InvalidArgument for what no message can hold."""
    sampling, request_options = _split(options)
    return mesh_pb2.ChatRequest(model=model, messages=chat_messages(messages), sampling=sampling, options=request_options)


def chat_messages(messages: Iterable[MessageLike]) -> list[mesh_pb2.ChatMessage]:
    """Return messages of any accepted shape as protobufs."""
    with _FieldErrors("messages"):
        return [mesh_pb2.ChatMessage(role=m.role, content=m.content) for m in map(_message, messages)]


def tokenize_request(text: str | Iterable[MessageLike], model: str) -> mesh_pb2.TokenizeRequest:
    """Return the request for the token ids of a text, or of messages."""
    if isinstance(text, str):
        return mesh_pb2.TokenizeRequest(model=model, text=text)
    return mesh_pb2.TokenizeRequest(model=model, messages=chat_messages(text))


def _message(message: MessageLike) -> Message:
    if isinstance(message, Message):
        return message
    if isinstance(message, tuple):
        return Message(*message)
    return Message(message["role"], message["content"])


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
        else:
            known = ", ".join(sorted(_SAMPLING | CONSTRAINTS | _OPTIONS))
            raise InvalidArgument(name, f"{name} is not a parameter of a request; there are: {known}")
    return sampling, request_options


def _set(message: common_pb2.SamplingParams | mesh_pb2.RequestOptions, name: str, value: object) -> None:
    with _FieldErrors(name):
        if isinstance(value, (list, tuple, set, frozenset)):
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
    )


def _logprobs(logprobs: common_pb2.Logprobs) -> Logprobs:
    return Logprobs(_token_logprob(logprobs.chosen), tuple(_token_logprob(token) for token in logprobs.top))


def _token_logprob(token: common_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(token.token_id, token.logprob, token.text)


def _usage(usage: mesh_pb2.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.drafted_tokens, usage.accepted_tokens)


def timings(wire: mesh_pb2.Timings) -> Timings:
    """Return the timings of a completed request; the fields have the same names on both sides."""
    plain = {field.name: getattr(wire, field.name) for field in wire.DESCRIPTOR.fields if field.name != "mode"}
    return Timings(mode=_MODES.get(wire.mode), **plain)


def emitted_choice(index: int, token_ids: Sequence[int], finish_reason: FinishReason | None) -> common_pb2.EmittedChoice:
    """Return what the caller has received of a choice, for a Resume."""
    wire = {reason: value for value, reason in _FINISH_REASONS.items()}
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
    )


def _choice(index: int, deltas: Sequence[Delta]) -> Choice:
    return Choice(
        index=index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        finish_reason=deltas[-1].finish_reason if deltas else None,
        stop_reason=deltas[-1].stop_reason if deltas else "",
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
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
