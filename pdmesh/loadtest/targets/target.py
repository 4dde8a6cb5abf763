"""The interface of a target: anything that answers prompts token by token; and the text of prompts."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, Protocol

from pdmesh.loadtest.record import Objectives, Outcome
from pdmesh.loadtest.workload import Segment, TrafficClass


@dataclass(frozen=True, slots=True)
class Answer:
    """Hold what was received of an answer: ids where the protocol has them, text where it has that; and its length."""

    token_ids: Sequence[int] = ()
    text: str = ""
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Said:
    """Hold one turn of a conversation; `answer` is None for the last, current one."""

    segments: tuple[Segment, ...]
    answer: Answer | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """Describe a request, independent of the protocol. `request_id` is unique in the run, `session_id` the same for all turns of
    a session; `seed` makes its words; `objectives` are those of its class."""

    request_id: str
    seed: int
    traffic: TrafficClass
    said: tuple[Said, ...]
    output_tokens: int
    timeout_s: float
    objectives: Objectives = field(default_factory=Objectives)
    session_id: str = ""

    @property
    def num_input_tokens(self) -> int:
        """Return the planned input tokens: segments, and answers where their ids are known."""
        asked = sum(segment.num_tokens for said in self.said for segment in said.segments)
        return asked + sum(len(said.answer.token_ids) for said in self.said if said.answer)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Report `count` new tokens of an answer; more than 0."""

    count: int
    token_ids: Sequence[int] = ()
    text: str = ""


@dataclass(frozen=True, slots=True)
class Done:
    """Report that the answer is complete. What the server does not report is None or empty."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int = 0
    phases_ms: Mapping[str, float] = field(default_factory=dict)
    workers: str = ""


Event = Tokens | Done


class TargetError(Exception):
    """Raised when the target did not answer: the outcome, and the reason in a few words that are the same for the same cause."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.message = message


@dataclass(frozen=True)
class TargetInfo:
    """Describe a target: its model, and the model's context in tokens if it is known."""

    model: str
    max_context: int | None = None


@dataclass(frozen=True)
class Fleet:
    """Describe the fleet at one moment."""

    num_prefill: int
    num_decode: int
    num_inflight: int
    num_queued: int


class Target(Protocol):
    """Represent a protocol and an address. Belongs to one event loop."""

    async def check(self) -> TargetInfo:
        """Return what it serves, if it is reachable. Raises TargetError."""
        ...

    def prepare(self, ask: Ask) -> object:
        """Do all work on a request that can be done before it is due."""
        ...

    def stream(self, prepared: object) -> AsyncGenerator[Event, None]:
        """Send what `prepare` returned; yield tokens as they arrive, last Done. Closing it cancels the request. Raises
        TargetError."""
        ...

    async def fleet(self) -> Fleet | None:
        """Return the current fleet; None where the target never reports it. Raises TargetError where it failed to report this
        time."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


# Segments as token ids or as words: functions of the run's seed and the segment, so that equal segments are equal text.


PromptKind = Literal["tokens", "words"]
# Tokenizers keep their special tokens and single bytes in front.
FIRST_TOKEN_ID = 300
# Short everyday words: most tokenizers make one token of each (with the space before it).
_COMMON = """
the of and to in is that for it as was with be by on not he this are or his from at which but have an had they you were
their one all we can her has there been if more when will would who so no out up into than them only some could time these
two may then do first any my now such like our over man me even most made after also did many before must through back years
"""
WORDS = tuple(_COMMON.split())


def token_ids(segments: Iterable[Segment], seed: int, vocab_size: int) -> list[int]:
    """Return ids from FIRST_TOKEN_ID to below `vocab_size`."""
    ids: list[int] = []
    for segment in segments:
        ids += _ids(segment, seed, vocab_size)
    return ids


def words(segments: Iterable[Segment], seed: int) -> str:
    """Return words, about one token for each."""
    return " ".join(WORDS[number % len(WORDS)] for segment in segments for number in _numbers(segment, seed))


def conversation(said: Iterable[Said], seed: int) -> str:
    """Return the words of all turns, and the answers between them."""
    return " ".join(text for one in said for text in (words(one.segments, seed), *([one.answer.text] if one.answer else ())))


def conversation_ids(said: Iterable[Said], seed: int, vocab_size: int) -> list[int]:
    """Return the ids of all turns, and of the answers between them as far as they are known."""
    ids: list[int] = []
    for one in said:
        ids += token_ids(one.segments, seed, vocab_size)
        if one.answer is not None:
            ids += one.answer.token_ids
    return ids


@lru_cache(maxsize=256)
def _ids(segment: Segment, seed: int, vocab_size: int) -> list[int]:
    span = vocab_size - FIRST_TOKEN_ID
    return [FIRST_TOKEN_ID + number % span for number in _numbers(segment, seed)]


def _numbers(segment: Segment, seed: int) -> memoryview:
    """Return random 32-bit numbers; a longer segment of the same key begins with the same ones."""
    return memoryview(random.Random(f"{seed}/{segment.key}").randbytes(4 * segment.num_tokens)).cast("I")
