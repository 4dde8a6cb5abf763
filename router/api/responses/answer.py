"""The Response object and the events of a stream, from messages of `pdmesh.v1`."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pdmesh.runtime.errors import CONTEXT_OVERFLOW, MeshError
from pdmesh.v1 import common_pb2, mesh_pb2
from router.api.http.body import from_json
from router.api.http.errors import answer_to
from router.api.http.fields import JsonObject
from router.api.http.reports import SpellingOf, bytes_of, logprob_of, report
from router.api.responses.output import COMPLETED, IN_PROGRESS, INCOMPLETE, Event, Output
from router.api.responses.requests import Call, CreateResponse
from router.api.responses.tools import FunctionTool, NamespaceTool, left_out, namespaces_of

FAILED = "failed"
OBFUSCATION_CHARS = 32
"""Deltas are padded to a multiple of this, so that the size of an encrypted event says little of its text."""
DEFAULTS: Mapping[str, float] = {"temperature": 1.0, "top_p": 1.0}
_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


@dataclass(frozen=True)
class Identity:
    """Hold what a response is called: its id without the prefix, and when it began, in Unix seconds."""

    suffix: str
    created: int

    @property
    def response_id(self) -> str:
        """Return the response's id."""
        return f"resp_{self.suffix}"


@dataclass(frozen=True)
class ServedModels:
    """Look up the models of a router. `defaults_of`: the sampling parameters that a model's publisher set, by its name."""

    defaults_of: Callable[[str], Mapping[str, float]]
    spelling_of: SpellingOf


_INCOMPLETE = {
    common_pb2.FINISH_REASON_LENGTH: "max_output_tokens",
    common_pb2.FINISH_REASON_ABORT: "abort",
}
"""The reasons for which a response is incomplete."""


class Answer:
    """Builds one response. `is_kept`: it is, or is to be, kept for the next turn."""

    def __init__(self, call: Call, identity: Identity, models: ServedModels, now: Callable[[], float], *, is_kept: bool) -> None:
        self._body = call.body
        self._identity = identity
        self._models = models
        self._now = now
        self.is_kept = is_kept
        self._output = Output(identity.suffix, self._logprobs, namespaces_of(call.body.tools))
        self._started = mesh_pb2.Started()
        self._completed: mesh_pb2.Completed | None = None
        self._status, self._incomplete = IN_PROGRESS, ""
        self._completed_at: int | None = None
        self._error: JsonObject | None = None
        self._num_tokens = self._num_reasoning = self._num_events = 0
        self._warnings = left_out(call.body.tools)

    def add(self, number: int, response: mesh_pb2.GenerateResponse) -> None:
        """Take in a message, for a whole body."""
        for _ in self._taken(response):
            pass

    def body(self) -> JsonObject:
        """Return the response as it is now: whole, once the stream has ended."""
        is_over = self._status != IN_PROGRESS
        reason = {"reason": self._incomplete} if self._status == INCOMPLETE else None
        return {
            "id": self._identity.response_id,
            "object": "response",
            "created_at": self._identity.created,
            "completed_at": self._completed_at,
            "status": self._status,
            "background": False,
            "error": self._error,
            "incomplete_details": reason,
            "model": self._started.model,
            "output": self._output.items() if is_over else [],
            "usage": self._usage() if is_over else None,
            "store": self.is_kept,
            **_echoed(self._body, {**DEFAULTS, **self._models.defaults_of(self._started.model)}),
            **({"pdmesh": [report(self._started, self._completed)]} if is_over else {}),
            **({"warnings": "; ".join(self._warnings).split("; ")} if self._warnings else {}),  # a merged delta has several
        }

    def events(self, number: int, response: mesh_pb2.GenerateResponse) -> Iterable[bytes]:
        """Return the events that show `response`."""
        return [self._sent(event) for event in self._taken(response)]

    def last_events(self) -> Iterable[bytes]:
        """Return the event with the whole response."""
        return [self._sent({"type": f"response.{self._status}", "response": self.body()})]

    def error_event(self, error: MeshError) -> bytes:
        """Return the events that end a stream with an error: what went wrong, and the response as far as it came."""
        told = answer_to(error)
        shown = told.body["error"]
        assert isinstance(shown, dict)
        message, code = shown["message"], shown["code"]
        self._status, self._completed_at = FAILED, None
        self.is_kept = False
        kind = CONTEXT_OVERFLOW if code == CONTEXT_OVERFLOW else _ERROR_CODES.get(told.status, "server_error")
        self._error = {"code": kind, "message": message}
        error_event: Event = {"type": "error", "code": code or self._error["code"], "message": message, "param": shown["param"]}
        return self._sent(error_event) + self._sent({"type": "response.failed", "response": self.body()})

    def _taken(self, response: mesh_pb2.GenerateResponse) -> Iterator[Event]:
        kind = response.WhichOneof("event")
        if kind == "started":
            self._started = response.started
            for name in ("response.created", "response.in_progress"):
                yield {"type": name, "response": self.body()}
        elif kind == "completed":
            self._completed = response.completed
            self._num_tokens = response.completed.usage.completion_tokens
        elif kind == "delta":
            yield from self._taken_delta(response.delta)

    def _taken_delta(self, delta: mesh_pb2.Delta) -> Iterator[Event]:
        self._num_tokens += len(delta.token_ids)
        self._num_reasoning += delta.num_reasoning_tokens
        if delta.warning:
            self._warnings.append(delta.warning)
        yield from self._output.take(delta)
        if delta.finish_reason:
            self._incomplete = _INCOMPLETE.get(delta.finish_reason, "")
            self._status = INCOMPLETE if self._incomplete else COMPLETED
            self._completed_at = int(self._now()) if self._status == COMPLETED else None
            yield from self._output.end(is_complete=self._status == COMPLETED)

    def _usage(self) -> JsonObject:
        num_input = self._started.num_prompt_tokens
        num_cached = self._completed.usage.cached_tokens if self._completed else 0
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
            "output_tokens": self._num_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning},
            "total_tokens": num_input + self._num_tokens,
        }

    def _sent(self, event: Event) -> bytes:
        """Return an event with its number."""
        numbered = {**event, "sequence_number": self._num_events}
        self._num_events += 1
        if self._body.stream_options is not None and self._body.stream_options.include_obfuscation and "delta" in event:
            numbered["obfuscation"] = _padding(str(event["delta"]))
        return b"event: %b\n%b" % (str(event["type"]).encode(), from_json(numbered))

    def _logprobs(self, entries: Sequence[common_pb2.Logprobs]) -> list[JsonObject]:
        return [{**self._logprob(entry.chosen), "top_logprobs": [self._logprob(top) for top in entry.top]} for entry in entries]

    def _logprob(self, token: common_pb2.TokenLogprob) -> JsonObject:
        spelled = bytes_of(token, self._started.model, self._models.spelling_of)
        return {"token": token.text, "logprob": logprob_of(token), "bytes": list(spelled)}


def _padding(delta: str) -> str:
    """Return random characters that make a delta, as JSON, as long as many others."""
    return secrets.token_hex(OBFUSCATION_CHARS)[: -len(json.dumps(delta)) % OBFUSCATION_CHARS]


def _echoed(body: CreateResponse, sampling: Mapping[str, float]) -> JsonObject:
    """Return what a response repeats of its request. `sampling`: values of what the request leaves out."""
    choice = body.tool_choice
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning.effort, "summary": body.reasoning.summary},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "temperature": sampling["temperature"] if body.temperature is None else body.temperature,
        "text": {"format": body.text.format.shown(), "verbosity": body.text.verbosity or "medium"},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
        "tools": [tool.shown() for tool in body.tools if isinstance(tool, FunctionTool | NamespaceTool)],
        "top_logprobs": body.top_logprobs,
        "top_p": sampling["top_p"] if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
