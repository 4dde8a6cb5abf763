"""What came of every request: counts, the first answer of each known one, and whatever no client has caused."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass

import grpc

from pdmesh.errors import MeshError
from tests.soak.cases import Case
from tests.soak.sides.base import Answer, ChoiceAnswer

_KEPT_PROBLEMS = 200
_Choices = tuple[str, ...] | tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class _First:
    """An answer, and who got it."""

    choices: _Choices
    side: str


class Ledger:
    """`counts`: requests by what became of them, and by protocol. `problems`: in words, the first of them."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_problems = 0
        self.num_compared = 0
        self.num_tokens = 0
        self.counts: Counter[str] = Counter()
        self.by_side: Counter[str] = Counter()
        self.problems: list[str] = []
        self._first: dict[tuple[str, str], _First] = {}

    def sent(self, side: str) -> None:
        """A request goes out."""
        self.num_requests += 1
        self.by_side[side] += 1

    def count(self, end: str) -> None:
        """It has ended like this."""
        self.counts[end] += 1

    def problem(self, side: str, what: str) -> None:
        """Something that no client has caused."""
        self.num_problems += 1
        if len(self.problems) < _KEPT_PROBLEMS:
            self.problems.append(f"{side}: {what}"[:600])

    def failed(self, side: str, wanted: str, error: BaseException) -> None:
        """An error where there should have been none, or another one."""
        text = repr(error) if isinstance(error, MeshError) else f"{type(error).__name__}: {error}"
        self.problem(side, f"{wanted}: {text}")
        self.count("error")

    def answered(self, side: str, case: Case, answer: Answer) -> None:
        """A request that nobody left: complete, as it was wanted, and the same as the last time."""
        self.count("complete")
        self.num_tokens += answer.num_pieces
        self._compare(side, case, answer)
        for problem in incomplete(case, answer):
            self.problem(side, f"{problem}; {case.key or 'fresh'}, {case.options}")

    def _compare(self, side: str, case: Case, answer: Answer) -> None:
        if not case.key:
            return
        told: dict[str, _Choices] = {}
        if answer.has_text:
            told["text"] = tuple(choice.text for choice in answer.choices)
        if answer.has_tokens:
            told["tokens"] = tuple(tuple(choice.tokens) for choice in answer.choices)
        for kind, choices in told.items():
            first = self._first.setdefault((case.key, kind), _First(choices, side))
            if first.choices != choices:
                self.problem(side, f"{case.key}: {kind} {choices!r}, but {first.side} got {first.choices!r}; {case.options}")
        self.num_compared += 1


def incomplete(case: Case, answer: Answer) -> list[str]:
    """What is missing of an answer, or is not what was asked for, in words."""
    problems = [] if answer.ended else ["the stream stopped without its end"]
    for index, choice in enumerate(answer.choices):
        if choice.finish not in ("stop", "length"):
            problems.append(f"choice {index} ended with {choice.finish!r}")
        problems += [f"choice {index}: {problem}" for problem in _wrong(case, answer, choice)]
    return problems


def _wrong(case: Case, answer: Answer, choice: ChoiceAnswer) -> list[str]:
    problems = []
    if answer.has_tokens:
        if case.num_tokens is not None and len(choice.tokens) != case.num_tokens:
            problems.append(f"{len(choice.tokens)} tokens instead of {case.num_tokens}")
        if len(choice.tokens) > case.options["max_tokens"]:
            problems.append(f"{len(choice.tokens)} tokens are more than max_tokens")
        if answer.has_logprobs and "logprobs" in case.options and choice.num_logprobs != len(choice.tokens):
            problems.append(f"{choice.num_logprobs} log-probabilities for {len(choice.tokens)} tokens")
    if answer.has_text and choice.finish == "stop" and not _keeps_to(case, choice.text):
        problems.append(f"{choice.text!r} breaks the constraint")
    if answer.has_text and any(stop in choice.text for stop in case.options.get("stop", ())):
        problems.append(f"{choice.text!r} holds the stop string")
    return problems


def _keeps_to(case: Case, text: str) -> bool:
    """Whether a complete output is what its constraint says; of a schema only that it is JSON and an object."""
    if case.constraint == "regex":
        return re.fullmatch(case.options["regex"], text) is not None
    if case.constraint == "json_schema":
        try:
            return isinstance(json.loads(text), dict)
        except ValueError:
            return False
    return True


def is_refusal(side: str, error: BaseException) -> bool:
    """Overload, with the time to come again; KServe's stream tells no such time in its messages."""
    if not isinstance(error, MeshError) or error.code is not grpc.StatusCode.RESOURCE_EXHAUSTED:
        return False
    return bool(error.retry_delay_s) or (side == "kserve" and "retry later" in error.message)


def has_lapsed(error: BaseException) -> bool:
    """DEADLINE_EXCEEDED, or what gRPC's own client says where the deadline passes while it begins the call (grpc/grpc#2685)."""
    if not isinstance(error, MeshError):
        return False
    is_begun_late = error.code is grpc.StatusCode.INTERNAL and error.message == "Internal error from Core"
    return error.code is grpc.StatusCode.DEADLINE_EXCEEDED or is_begun_late


def is_hopeless(error: BaseException) -> bool:
    """A first token that is predicted after the request's deadline: to wait for it would hold up others for nothing."""
    is_exhausted = isinstance(error, MeshError) and error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    return is_exhausted and "deadline: the first token is predicted" in str(error)


def is_about(field: str, error: BaseException) -> bool:
    """INVALID_ARGUMENT that names the field."""
    if not isinstance(error, MeshError) or error.code is not grpc.StatusCode.INVALID_ARGUMENT:
        return False
    return field in (error.field or "") or field in error.message
