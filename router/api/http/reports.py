"""What answers of several APIs over HTTP tell: the order of a delta, seed, timings, log-probabilities of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pdmesh.v1 import common_pb2, mesh_pb2
from router.api.http.fields import JsonObject
from router.api.http.types import AnswerBody

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot express; OpenAI's own bound."""

BytesOf = Callable[[common_pb2.TokenLogprob], bytes]
"""Maps a token to the bytes that it stands for, which may be part of a character; empty for an id without text."""

SpellingOf = Callable[[str, int], bytes]
"""Maps the name of a model and a token id to the bytes of that token."""

_MODES = {mesh_pb2.PREFILL_MODE_LOCAL: "local", mesh_pb2.PREFILL_MODE_REMOTE: "remote"}


class Report(AnswerBody):
    """What pdmesh says of a prompt."""

    request_id: str
    seed: int
    """The seed in force."""
    timings: dict[str, int | str] | None
    """The fields of Timings in protos/pdmesh/v1/mesh.proto: durations in nanoseconds, workers, mode."""


class TopLogprob(AnswerBody):
    """A token that might have been drawn."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of the output."""

    top_logprobs: list[TopLogprob]


class Said(NamedTuple):
    """Hold what comes next in a delta: reasoning, then text, then pieces of calls."""

    reasoning: str
    text: str
    calls: Sequence[mesh_pb2.ToolCallDelta]


def in_order(delta: mesh_pb2.Delta) -> Iterator[Said]:
    """Yield what is new with a delta in the order in which the model wrote it."""
    if not delta.parts:  # one kind alone
        yield Said(delta.reasoning, delta.text, delta.tool_calls)
    text = reasoning = call = 0
    for part in delta.parts:
        to_text, to_reasoning, to_call = text + part.text_chars, reasoning + part.reasoning_chars, call + part.num_tool_calls
        yield Said(delta.reasoning[reasoning:to_reasoning], delta.text[text:to_text], delta.tool_calls[call:to_call])
        text, reasoning, call = to_text, to_reasoning, to_call


def report(started: mesh_pb2.Started | None, completed: mesh_pb2.Completed | None) -> JsonObject:
    """Return pdmesh's own addition to an answer, about one prompt: the id of its request, the seed, the timings."""
    started = started or mesh_pb2.Started()
    timings = None if completed is None else _timings(completed.timings)
    return {"request_id": started.request_id, "seed": started.seed, "timings": timings}


def _timings(timings: mesh_pb2.Timings) -> JsonObject:
    """Return the fields of Timings in protos/pdmesh/v1/mesh.proto: durations in nanoseconds."""
    shown: JsonObject = {name.name: getattr(timings, name.name) for name in timings.DESCRIPTOR.fields}
    return {**shown, "mode": _MODES.get(timings.mode, "")}


def logprob_of(token: common_pb2.TokenLogprob) -> float:
    """Return the log-probability as JSON can hold it."""
    return token.logprob if token.logprob >= LOWEST_LOGPROB else LOWEST_LOGPROB


def bytes_of(token: common_pb2.TokenLogprob, model: str, spelling_of: SpellingOf) -> bytes:
    """Return the bytes of a token: those of its text, unless U+FFFD stands for some of them."""
    return spelling_of(model, token.token_id) if "\ufffd" in token.text else token.text.encode()
