"""From responses of `pdmesh.v1` to OpenAI's bodies and chunks. Pure: what goes out when is for others to say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdmesh.v1 import common_pb2, mesh_pb2
from router.api.openai.call import Call
from router.api.openai.fields import JsonObject

Echo = Callable[[int, str], str]
"""Number of the prompt and name of the model to the text that goes before the output; empty for none."""

_FINISH = {
    common_pb2.FINISH_REASON_UNSPECIFIED: None,
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}
_MODES = {mesh_pb2.PREFILL_MODE_LOCAL: "local", mesh_pb2.PREFILL_MODE_REMOTE: "remote"}


@dataclass
class _Prompt:
    """What is known of one prompt's request."""

    started: mesh_pb2.Started | None = None
    completed: mesh_pb2.Completed | None = None
    num_tokens: int = 0


@dataclass
class _Choice:
    """What has come of one choice. `text_offset`: characters of echo and of the tokens so far."""

    began: bool = False
    text_offset: int = 0
    texts: list[str] = field(default_factory=list)
    entries: list[common_pb2.Logprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | None = None


class Answer:
    """One HTTP answer in the making."""

    def __init__(self, call: Call, request_id: str, created: int, echo: Echo) -> None:
        self._call = call
        self._head: JsonObject = {"id": call.shape.id_prefix + request_id, "object": "", "created": created, "model": ""}
        self._echo = echo
        self._prompts = [_Prompt() for _ in call.requests]
        self._choices = [_Choice() for _ in range(len(call.requests) * call.num_choices)]

    def add(self, number: int, response: mesh_pb2.GenerateResponse) -> None:
        """For a whole body: take in what prompt `number` has given."""
        if not self._note(number, response):
            return
        delta, (_, choice) = response.delta, self._choice_of(number, response.delta)
        choice.texts.append(self._begin(number, choice) + delta.text)
        choice.entries.extend(delta.logprobs)
        choice.finish_reason, choice.stop_reason = _FINISH[delta.finish_reason], delta.stop_reason or None

    def body(self) -> JsonObject:
        """Once every stream has ended."""
        choices = [self._whole(index, choice) for index, choice in enumerate(self._choices)]
        head = {**self._head, "object": self._call.shape.object_name}
        return {**head, "choices": choices, "usage": self.usage(), "pdmesh": self.reports()}

    def chunk(self, number: int, response: mesh_pb2.GenerateResponse) -> JsonObject | None:
        """For a stream: the chunk that shows `response`; None where there is nothing to show."""
        if not self._note(number, response):
            return None
        delta, (index, choice) = response.delta, self._choice_of(number, response.delta)
        first = not choice.began
        text, logprobs = self._begin(number, choice) + delta.text, self._logprobs(choice, delta.logprobs)
        if not (text or logprobs or delta.finish_reason or first):
            return None
        piece = self._call.shape.piece(text, logprobs, first=first)
        shown: JsonObject = {"index": index, **piece, "finish_reason": _FINISH[delta.finish_reason]}
        if delta.stop_reason:
            shown["stop_reason"] = delta.stop_reason
        return self._chunk([shown])

    def last_chunk(self) -> JsonObject | None:
        """Usage, where the client wants it of a stream."""
        if self._call.streaming is None or not self._call.streaming.usage:
            return None
        return {**self._chunk([]), "usage": self.usage(), "pdmesh": self.reports()}

    def usage(self) -> JsonObject:
        """Tokens of all prompts and choices, so far or in the end."""
        num_prompt = sum(prompt.started.num_prompt_tokens for prompt in self._prompts if prompt.started)
        num_output = sum(prompt.num_tokens for prompt in self._prompts)
        completed = [prompt.completed.usage for prompt in self._prompts if prompt.completed]
        num_accepted = sum(usage.accepted_tokens for usage in completed)
        num_rejected = sum(usage.drafted_tokens for usage in completed) - num_accepted
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in completed)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": num_accepted,
                "rejected_prediction_tokens": num_rejected,
            },
        }

    def reports(self) -> list[JsonObject]:
        """Our own addition: of each prompt, what its request was called, which seed was in force, and where its time went."""
        return [_report(prompt) for prompt in self._prompts if prompt.started]

    def _note(self, number: int, response: mesh_pb2.GenerateResponse) -> bool:
        """Whether it is a delta; else it is noted."""
        prompt = self._prompts[number]
        kind = response.WhichOneof("event")
        if kind == "started":
            prompt.started = response.started
            self._head["model"] = response.started.model
        elif kind == "completed":
            prompt.completed = response.completed
            prompt.num_tokens = response.completed.usage.completion_tokens
        prompt.num_tokens += len(response.delta.token_ids)
        return kind == "delta"

    def _choice_of(self, number: int, delta: mesh_pb2.Delta) -> tuple[int, _Choice]:
        index = number * self._call.num_choices + delta.choice
        return index, self._choices[index]

    def _begin(self, number: int, choice: _Choice) -> str:
        """What goes before the output of a choice that has not begun."""
        if choice.began:
            return ""
        choice.began = True
        echo = self._echo(number, str(self._head["model"]))
        choice.text_offset += len(echo)
        return echo

    def _logprobs(self, choice: _Choice, entries: Sequence[common_pb2.Logprobs]) -> JsonObject | None:
        if not entries:
            return None
        shown = self._call.shape.logprobs(entries, choice.text_offset)
        choice.text_offset += sum(len(entry.chosen.text) for entry in entries)
        return shown

    def _whole(self, index: int, choice: _Choice) -> JsonObject:
        shown = self._call.shape.whole("".join(choice.texts), self._logprobs(choice, choice.entries))
        return {"index": index, **shown, "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}

    def _chunk(self, choices: list[JsonObject]) -> JsonObject:
        chunk = {**self._head, "object": self._call.shape.chunk_name, "choices": choices}
        streaming = self._call.streaming
        if streaming is not None and streaming.usage:
            chunk["usage"] = self.usage() if streaming.continuous_usage else None
        return chunk


def _report(prompt: _Prompt) -> JsonObject:
    started = prompt.started or mesh_pb2.Started()
    timings = None if prompt.completed is None else _timings(prompt.completed.timings)
    return {"request_id": started.request_id, "seed": started.seed, "timings": timings}


def _timings(timings: mesh_pb2.Timings) -> JsonObject:
    """As in protos/v1/mesh.proto: durations in nanoseconds."""
    shown: JsonObject = {name.name: getattr(timings, name.name) for name in timings.DESCRIPTOR.fields}
    return {**shown, "mode": _MODES.get(timings.mode, "")}
