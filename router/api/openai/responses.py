"""From responses of `pdmesh.v1` to OpenAI's bodies and chunks."""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from pdmesh.runtime.errors import MeshError
from pdmesh.v1 import common_pb2, mesh_pb2
from router.api.http.body import from_json
from router.api.http.errors import Names, answer_to
from router.api.http.exchange import MeshRequest
from router.api.http.fields import JsonObject
from router.api.http.reports import LOWEST_LOGPROB, BytesOf, SpellingOf, bytes_of, logprob_of, report
from router.api.http.sessions import NO_SESSION, SessionBody

# The two forms of a choice: chat completions and (text) completions.

Entries = Sequence[common_pb2.Logprobs]
DONE = b"data: [DONE]\n\n"


@dataclass
class Said:
    """Hold what a choice says, or what is new of it. `calls`: pieces of calls, or whole ones."""

    text: str = ""
    reasoning: str = ""
    calls: list[mesh_pb2.ToolCallDelta] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, delta: mesh_pb2.Delta, before: str) -> Said:
        """Return what a delta says. `before`: text that goes before it."""
        return cls(before + delta.text, delta.reasoning, list(delta.tool_calls), [delta.warning] if delta.warning else [])

    @classmethod
    def joined(cls, pieces: Sequence[Said]) -> Said:
        """Return all that was said; pieces of a call become one."""
        calls: dict[int, mesh_pb2.ToolCallDelta] = {}
        arguments: dict[int, list[str]] = {}
        for piece in (each for said in pieces for each in said.calls):
            calls.setdefault(piece.index, piece)
            arguments.setdefault(piece.index, []).append(piece.arguments)
        for index, call in calls.items():
            call.arguments = "".join(arguments[index])
        warnings = [warning for said in pieces for warning in said.warnings]
        text, reasoning = "".join(said.text for said in pieces), "".join(said.reasoning for said in pieces)
        return cls(text, reasoning, list(calls.values()), warnings)

    def shown(self) -> JsonObject:
        """Return the fields of a message besides role and content: what there is of them."""
        reasoning: JsonObject = {"reasoning_content": self.reasoning, "reasoning": self.reasoning} if self.reasoning else {}
        return reasoning | ({"tool_calls": [_call(call) for call in self.calls]} if self.calls else {})


def _call(piece: mesh_pb2.ToolCallDelta) -> JsonObject:
    """Return a call, or a piece of one: id, type and name come with the first."""
    if not piece.name:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}


class Shape(Protocol):
    """Form the choices of one kind of response."""

    @property
    def id_prefix(self) -> str:
        """Return the prefix of the response's id."""

    @property
    def object_name(self) -> str:
        """Return the `object` of a whole response."""

    @property
    def chunk_name(self) -> str:
        """Return the `object` of a streamed chunk."""

    @property
    def scores_in_choice(self) -> bool:
        """Return whether the prompt's log-probabilities are a field of each choice; else of the whole."""

    def whole(self, said: Said, logprobs: JsonObject | None) -> JsonObject:
        """Return the fields of a complete choice besides index and finish reason."""

    def piece(self, said: Said, logprobs: JsonObject | None, *, first: bool) -> JsonObject:
        """Return the fields of a streamed piece; `first`: it is the first piece of its choice."""

    def logprobs(self, entries: Entries, offsets: Sequence[int], bytes_of: BytesOf) -> JsonObject:
        """Return the log-probabilities of consecutive tokens. `offsets`: for each the characters of the choice's text before it,
        echo included."""


class ChatShape:
    """Form `chat.completion`: messages."""

    id_prefix, object_name, chunk_name = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    scores_in_choice = False

    def whole(self, said: Said, logprobs: JsonObject | None) -> JsonObject:
        content = None if said.calls and not said.text else said.text
        message: JsonObject = {"role": "assistant", "content": content, "refusal": None, **said.shown()}
        return {"message": message, "logprobs": logprobs}

    def piece(self, said: Said, logprobs: JsonObject | None, *, first: bool) -> JsonObject:
        shown = said.shown()
        delta: JsonObject = {"role": "assistant"} if first else {}
        if said.text or (first and not shown):
            delta["content"] = said.text
        return {"delta": delta | shown, "logprobs": logprobs}

    def logprobs(self, entries: Entries, offsets: Sequence[int], bytes_of: BytesOf) -> JsonObject:
        def shown(token: common_pb2.TokenLogprob) -> JsonObject:
            return {"token": token.text, "logprob": logprob_of(token), "bytes": list(bytes_of(token)) or None}

        content = [{**shown(entry.chosen), "top_logprobs": [shown(top) for top in entry.top]} for entry in entries]
        return {"content": content, "refusal": None}


class TextShape:
    """Form `text_completion`: plain text."""

    id_prefix, object_name, chunk_name = "cmpl-", "text_completion", "text_completion"
    scores_in_choice = True

    def whole(self, said: Said, logprobs: JsonObject | None) -> JsonObject:
        return {"text": said.text, "logprobs": logprobs}

    def piece(self, said: Said, logprobs: JsonObject | None, *, first: bool) -> JsonObject:
        return self.whole(said, logprobs)

    def logprobs(self, entries: Entries, offsets: Sequence[int], bytes_of: BytesOf) -> JsonObject:
        tokens = [_spelled(bytes_of(entry.chosen)) for entry in entries]
        tops: list[JsonObject | None] | None = None
        if any(entry.top for entry in entries):
            tops = [dict(_alternatives(entry, bytes_of)) for entry in entries]
        values = [_or_none(entry.chosen) for entry in entries]
        if tops is not None:
            tops = [None if value is None else top for value, top in zip(values, tops, strict=True)]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": list(offsets)}


def _or_none(token: common_pb2.TokenLogprob) -> float | None:
    """Return the log-probability; None for a prompt's first token, which has none."""
    return None if math.isnan(token.logprob) else logprob_of(token)


def _spelled(data: bytes) -> str:
    """Return a token as text, or as OpenAI's completions write bytes that are no text alone: `bytes:\\xf0\\x9f`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(chr(byte) if 0x20 <= byte < 0x7F and byte != 0x5C else f"\\x{byte:02x}" for byte in data)


def _alternatives(entry: common_pb2.Logprobs, bytes_of: BytesOf) -> dict[str, float]:
    """Return the likeliest tokens with the chosen one among them, as OpenAI does. The chosen one has the name that `tokens`
    shows; another one that reads like one before it is named by its id, as vLLM writes ids."""
    named = {_spelled(bytes_of(entry.chosen)): logprob_of(entry.chosen)}
    for token in entry.top:
        if token.token_id != entry.chosen.token_id:
            name = _spelled(bytes_of(token))
            named[f"token_id:{token.token_id}" if name in named else name] = logprob_of(token)
    return named


# A checked HTTP request: its messages of `pdmesh.v1`, and the form of the response.


@dataclass(frozen=True)
class Streaming:
    """Hold how a response streams. `Call` has None instead for one whole body."""

    usage: bool = False  # the last chunk has the usage
    continuous_usage: bool = False  # every chunk has the usage so far


@dataclass(frozen=True)
class Best:
    """Say that of each prompt's choices the `num_kept` likeliest are the answer. `shows_logprobs`: the client asked for them."""

    num_kept: int
    shows_logprobs: bool


class Scoring(NamedTuple):
    """Hold what is shown of the log-probabilities of prompts: `shown` alternatives in vLLM's form, `echoed` ones with the echo,
    as OpenAI's completions have them; None: none. `is_alone`: no output is wanted."""

    shown: int | None = None
    echoed: int | None = None
    is_alone: bool = False


NOT_SCORED = Scoring()


@dataclass(frozen=True)
class Call:
    """Hold one HTTP request. With several prompts, choice c of prompt p has the index p * num_choices + c."""

    requests: tuple[MeshRequest, ...]
    num_choices: int
    shape: Shape
    streaming: Streaming | None
    names: Names = field(default_factory=dict)
    echo: bool = False
    best: Best | None = None
    scoring: Scoring = NOT_SCORED
    session: SessionBody = NO_SESSION

    @property
    def is_streamed(self) -> bool:
        """Return whether the output is wanted as chunks."""
        return self.streaming is not None

    def names_of(self, number: int) -> Names:
        """Return the names for errors about the prompt `number`."""
        if len(self.requests) == 1:
            return self.names
        return {**self.names, "prompt": f"prompt[{number}]", "tokens.ids": f"prompt[{number}]"}


Echo = Callable[[int, str], str]
"""Maps the number of a prompt and the name of its model to the text that goes before the output; empty for none."""

_FINISH = {
    common_pb2.FINISH_REASON_UNSPECIFIED: None,
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
    common_pb2.FINISH_REASON_ABORT: "abort",
}


@dataclass
class _Prompt:
    """Hold what is known about one prompt's request."""

    started: mesh_pb2.Started | None = None
    completed: mesh_pb2.Completed | None = None
    num_tokens: int = 0
    fingerprint: str | None = None
    entries: Sequence[common_pb2.Logprobs] = ()  # of its tokens, where they are wanted


@dataclass
class _Choice:
    """Hold the output of one choice so far. `text_offset`: characters of echo and of the tokens so far; `decoder` holds the bytes
    of the character that the last token has begun."""

    began: bool = False
    text_offset: int = 0
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    said: list[Said] = field(default_factory=list)
    entries: list[common_pb2.Logprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | None = None


class Answer:
    """Build one HTTP response from the messages of its prompts."""

    def __init__(self, call: Call, request_id: str, created: int, echo: Echo, spelling_of: SpellingOf) -> None:
        self._call = call
        self._head: JsonObject = {"id": call.shape.id_prefix + request_id, "object": "", "created": created, "model": ""}
        self._echo = echo
        self._spelling_of = spelling_of
        self._prompts = [_Prompt() for _ in call.requests]
        self._choices = [_Choice() for _ in range(len(call.requests) * call.num_choices)]

    def add(self, number: int, response: mesh_pb2.GenerateResponse) -> None:
        """Take in a message of prompt `number`, for a whole body."""
        if not self._note(number, response):
            return
        delta, (_, choice) = response.delta, self._choice_of(number, response.delta)
        said, entries = self._new(number, choice, delta)
        choice.said.append(said)
        choice.entries.extend(entries)
        choice.finish_reason, choice.stop_reason = self._finish(delta), delta.stop_reason or None

    def body(self) -> JsonObject:
        """Return the whole body, after every stream has ended."""
        choices = [self._whole(index, choice) for index, choice in enumerate(self._kept())]
        head = {**self._head, "object": self._call.shape.object_name, "system_fingerprint": self._fingerprint}
        if self._call.scoring.shown is not None and not self._call.shape.scores_in_choice:
            head["prompt_logprobs"] = self._prompt_scores(self._prompts[0])
        return {**head, "choices": choices, "usage": self.usage(), "pdmesh": self.reports()}

    @property
    def _num_kept(self) -> int:
        return self._call.num_choices if self._call.best is None else self._call.best.num_kept

    def _prompt_scores(self, prompt: _Prompt) -> list[JsonObject | None]:
        """Return the log-probabilities of a prompt's tokens in vLLM's form: null, then an object by token id for each."""
        return [None, *(_scores(entry, self._call.scoring.shown or 0) for entry in prompt.entries[1:])]

    def _kept(self) -> list[_Choice]:
        """Return the choices of the answer: all, or of each prompt the best, the likeliest first."""
        best, num_choices = self._call.best, self._call.num_choices
        if best is None:
            return self._choices
        starts = range(0, len(self._choices), num_choices)
        ranked = [sorted(self._choices[start : start + num_choices], key=_likelihood, reverse=True) for start in starts]
        return [choice for choices in ranked for choice in choices[: best.num_kept]]

    def events(self, number: int, response: mesh_pb2.GenerateResponse) -> Iterable[bytes]:
        """Return the events that show `response`, for a stream; none where there is nothing to show."""
        return [event for chunk in _ends_apart(self.chunk(number, response)) for event in _event(chunk)]

    def last_events(self) -> Iterable[bytes]:
        """Return the events that end a stream."""
        return (*_event(self.last_chunk()), DONE)

    def error_event(self, error: MeshError) -> bytes:
        """Return the event that ends a stream with an error."""
        return from_json(answer_to(error).body)

    def chunk(self, number: int, response: mesh_pb2.GenerateResponse) -> JsonObject | None:
        """Return the chunk that shows `response`, for a stream; None where there is nothing to show."""
        if not self._note(number, response):
            return None
        delta, (index, choice) = response.delta, self._choice_of(number, response.delta)
        first = not choice.began
        said, entries = self._new(number, choice, delta)
        logprobs = self._logprobs(choice, entries)
        if not (said != Said() or logprobs or delta.finish_reason or first):
            return None
        piece = self._call.shape.piece(said, logprobs, first=first)
        shown: JsonObject = {"index": index, **piece, "finish_reason": self._finish(delta)}
        if said.warnings:
            shown["warnings"] = said.warnings
        if delta.stop_reason:
            shown["stop_reason"] = delta.stop_reason
        return self._chunk([shown], self._prompts[number].fingerprint)

    def last_chunk(self) -> JsonObject | None:
        """Return the chunk with the usage, where the client wants it in a stream."""
        if self._call.streaming is None or not self._call.streaming.usage:
            return None
        return {**self._chunk([], self._fingerprint), "usage": self.usage(), "pdmesh": self.reports()}

    def usage(self) -> JsonObject:
        """Return the token counts of all prompts and choices, so far or at the end."""
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
                "reasoning_tokens": sum(usage.reasoning_tokens for usage in completed),
                "accepted_prediction_tokens": num_accepted,
                "rejected_prediction_tokens": num_rejected,
            },
        }

    def reports(self) -> list[JsonObject]:
        """Return pdmesh's own addition: for each prompt the id of its request, the seed, and the timings."""
        return [report(prompt.started, prompt.completed) for prompt in self._prompts if prompt.started]

    def _note(self, number: int, response: mesh_pb2.GenerateResponse) -> bool:
        """Return whether the response is a delta; else record it."""
        prompt = self._prompts[number]
        kind = response.WhichOneof("event")
        if kind == "started":
            prompt.started = response.started
            self._head["model"] = response.started.model
        elif kind == "completed":
            prompt.completed = response.completed
            prompt.num_tokens = 0 if self._call.scoring.is_alone else response.completed.usage.completion_tokens
        elif response.delta.prompt_logprobs:
            prompt.entries = list(response.delta.prompt_logprobs)
        if response.delta.system_fingerprint:
            prompt.fingerprint = response.delta.system_fingerprint
        if not self._call.scoring.is_alone:
            prompt.num_tokens += len(response.delta.token_ids)
        return kind == "delta"

    def _new(self, number: int, choice: _Choice, delta: mesh_pb2.Delta) -> tuple[Said, list[common_pb2.Logprobs]]:
        """Return what a delta adds to a choice: its text, and log-probabilities of tokens, the echo first."""
        scoring, begins = self._call.scoring, not choice.began
        echo = self._begin(number, choice)
        echoed = self._echoed(self._prompts[number].entries, echo, choice) if begins and scoring.echoed is not None else []
        if scoring.is_alone:
            return Said(echo), echoed
        return Said.of(delta, echo), [*echoed, *delta.logprobs]

    def _finish(self, delta: mesh_pb2.Delta) -> str | None:
        reason = _FINISH[delta.finish_reason]
        return "length" if reason and self._call.scoring.is_alone else reason

    def _echoed(self, entries: Sequence[common_pb2.Logprobs], echo: str, choice: _Choice) -> list[common_pb2.Logprobs]:
        """Return the entries of an echoed prompt with as many alternatives as the echo shows. Offsets of its tokens begin at 0,
        or before it, for a special token that the tokenizer put in front."""
        choice.text_offset = 0 if not entries or echo.startswith(entries[0].chosen.text) else -len(entries[0].chosen.text)
        count = self._call.scoring.echoed or 0
        return [common_pb2.Logprobs(chosen=entry.chosen, top=entry.top[:count]) for entry in entries]

    def _choice_of(self, number: int, delta: mesh_pb2.Delta) -> tuple[int, _Choice]:
        index = number * self._call.num_choices + delta.choice
        return index, self._choices[index]

    def _begin(self, number: int, choice: _Choice) -> str:
        """Return the text before the output of a choice that has not begun."""
        if choice.began:
            return ""
        choice.began = True
        echo = self._echo(number, str(self._head["model"]))
        choice.text_offset += len(echo)
        return echo

    def _logprobs(self, choice: _Choice, entries: Sequence[common_pb2.Logprobs]) -> JsonObject | None:
        if not entries:
            return None
        offsets = []
        for entry in entries:
            offsets.append(max(0, choice.text_offset))
            choice.text_offset += len(choice.decoder.decode(self._bytes_of(entry.chosen)))
        return self._call.shape.logprobs(entries, offsets, self._bytes_of)

    def _bytes_of(self, token: common_pb2.TokenLogprob) -> bytes:
        return bytes_of(token, str(self._head["model"]), self._spelling_of)

    def _whole(self, index: int, choice: _Choice) -> JsonObject:
        said = Said.joined(choice.said)
        is_shown = self._call.best is None or self._call.best.shows_logprobs
        shown = self._call.shape.whole(said, self._logprobs(choice, choice.entries) if is_shown else None)
        if said.warnings:
            shown["warnings"] = said.warnings
        if self._call.scoring.shown is not None and self._call.shape.scores_in_choice:
            shown["prompt_logprobs"] = self._prompt_scores(self._prompts[index // self._num_kept])
        return {"index": index, **shown, "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}

    @property
    def _fingerprint(self) -> str | None:
        """Return what computed the whole answer; None where prompts were computed by different things."""
        known = {prompt.fingerprint for prompt in self._prompts}
        return known.pop() if len(known) == 1 else None

    def _chunk(self, choices: list[JsonObject], fingerprint: str | None) -> JsonObject:
        shape = self._call.shape
        chunk = {**self._head, "object": shape.chunk_name, "system_fingerprint": fingerprint, "choices": choices}
        streaming = self._call.streaming
        if streaming is not None and streaming.usage:
            chunk["usage"] = self.usage() if streaming.continuous_usage else None
        return chunk


def _scores(entry: common_pb2.Logprobs, count: int) -> JsonObject:
    """Return the likeliest tokens and the one that is in the prompt, whose rank is null where it is none of them."""
    ranked = {token.token_id: (rank, token) for rank, token in enumerate(entry.top[:count], start=1)}
    own = {entry.chosen.token_id: ranked.get(entry.chosen.token_id, (None, entry.chosen))}
    return {
        str(token_id): {"logprob": logprob_of(token), "rank": rank, "decoded_token": token.text}
        for token_id, (rank, token) in (own | ranked).items()
    }


def _likelihood(choice: _Choice) -> float:
    """Return the mean log-probability of a choice's tokens, by which OpenAI's completions rank what `best_of` made."""
    values = [logprob_of(entry.chosen) for entry in choice.entries]
    return sum(values) / len(values) if values else LOWEST_LOGPROB


def _ends_apart(chunk: JsonObject | None) -> Iterator[JsonObject | None]:
    """Yield a chunk; as two if it has calls and the end of its choice, which OpenAI sends in a chunk of its own: the helper of
    its package tells the end of a call only behind the call's last piece."""
    choices: Any = [] if chunk is None else chunk["choices"]
    if chunk is None or not any(choice["finish_reason"] and choice.get("delta", {}).get("tool_calls") for choice in choices):
        yield chunk
        return
    for choice in choices:
        ending = {name: choice[name] for name in ("index", "finish_reason", "stop_reason") if name in choice}
        said = {name: value for name, value in choice.items() if name != "stop_reason"}
        yield {**chunk, "choices": [{**said, "finish_reason": None}]}
        yield {**chunk, "choices": [{"delta": {}, "logprobs": None, **ending}]}


def _event(chunk: JsonObject | None) -> tuple[bytes, ...]:
    return () if chunk is None else (from_json(chunk),)
