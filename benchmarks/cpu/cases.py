"""What is measured of every contestant, by one definition, and of the machine.

    decode at batch B   B * (n - 1) tokens / (t(n tokens) - t(1 token)): what remains is decode alone
    prefill             length / t(one prompt, 1 token)
    KV read             (time per token at a long context - at a short one): what remains is the KV cache's part

Every call gets prompts of its own; in one round all contestants get the same.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.cpu.contest import Contest, Seat, first_token_seconds
from benchmarks.cpu.limits import LIMIT_CASES
from benchmarks.cpu.prompts import Prompts
from benchmarks.harness import interleave, say
from benchmarks.peers.environments import PeerError

SHORT_CONTEXT = 64
_ATTEMPTS = 3


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    rounds: int = 3
    starts: int = 3
    batches: tuple[int, ...] = (1, 4, 16, 32)
    prompt_tokens: int = 160
    new_tokens: int = 128
    prefill_tokens: int = 1000
    long_context: int = 8000

    @property
    def max_context(self) -> int:
        """Enough for every contestant's cases; the long context is our engine's alone."""
        return self.prefill_tokens + self.new_tokens

    @property
    def mean_context(self) -> float:
        """Of the tokens that decode reads back."""
        return self.prompt_tokens + self.new_tokens / 2


@dataclass
class Measured:
    """Samples by case; a case that failed once has a reason instead."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def medians(self) -> dict[str, float]:
        return {name: statistics.median(values) for name, values in self.samples.items() if name not in self.failures}

    def recorded(self, name: str, case: Callable[[], float]) -> Callable[[], float]:
        """The case, keeping its samples; a failure is kept too and costs no further rounds."""

        def run() -> float:
            if name in self.failures:
                return math.nan
            try:
                value = case()
            except (PeerError, RuntimeError, OSError) as error:
                self.failures[name] = str(error)
                say(f"{name}: failed: {error}")
                return math.nan
            self.samples.setdefault(name, []).append(value)
            return value

        return run


def decode_case(name: str, batch: int) -> str:
    return f"{name}: decode, batch {batch}"


def prefill_case(name: str, length: int) -> str:
    return f"{name}: prefill, {length} tokens"


def context_case(name: str, length: int) -> str:
    return f"{name}: seconds a token, context {length}"


def start_case(name: str) -> str:
    return f"{name}: process start to first token"


def measure(contest: Contest, plan: Plan) -> Measured:
    """All cases in turn, round after round, by size: at one size the contestants follow each other."""
    measured, cases = Measured(), dict[str, Callable[[], float]]()
    cases |= LIMIT_CASES
    for batch in plan.batches:
        cases |= {decode_case(seat.contestant.name, batch): Decode(seat, contest.prompts, plan, batch) for seat in contest.seats}
    for seat in contest.seats:
        cases[prefill_case(seat.contestant.name, plan.prefill_tokens)] = Prefill(seat, contest.prompts, plan.prefill_tokens)
    for seat in [seat for seat in contest.seats if seat.contestant.is_ours][:1]:
        for length in (SHORT_CONTEXT, plan.long_context):
            cases[context_case(seat.contestant.name, length)] = Context(seat, contest.prompts, plan, length)
    warm_up(contest, plan)
    interleave({name: measured.recorded(name, case) for name, case in cases.items()}, plan.rounds)
    return measured


def warm_up(contest: Contest, plan: Plan) -> None:
    """Each shape once: some libraries compile or lay out memory for it at first sight."""
    for seat in contest.seats:
        say(f"{seat.contestant.name}: warming up")
        try:
            for batch in plan.batches:
                Decode(seat, contest.prompts, plan, batch)()
            Prefill(seat, contest.prompts, plan.prefill_tokens)()
        except PeerError as error:  # the case itself will tell
            say(f"{seat.contestant.name}: {error}")


def measure_starts(contest: Contest, plan: Plan) -> Measured:
    """Fresh processes, one at a time. The measured ones must be gone: they hold memory."""
    measured, question = Measured(), contest.prompts.question
    fresh = [seat for seat in contest.seats if not seat.contestant.settings]
    cases = {start_case(seat.contestant.name): Start(seat, question) for seat in fresh}
    interleave({name: measured.recorded(name, case) for name, case in cases.items()}, plan.starts)
    return measured


@dataclass
class Decode:
    """Output tokens a second over all sequences. Callable; each call is the next round."""

    seat: Seat
    prompts: Prompts
    plan: Plan
    batch: int
    round: int = 0

    def __call__(self) -> float:
        self.round += 1
        with self.seat.child.turn():
            for attempt in range(_ATTEMPTS):
                one, many = (self._seconds(num_tokens, attempt) for num_tokens in (1, self.plan.new_tokens))
                if many > one:
                    return self.batch * (self.plan.new_tokens - 1) / (many - one)
        raise PeerError(f"{self.plan.new_tokens} tokens took no longer than one, {_ATTEMPTS} times: the machine is disturbed")

    def _seconds(self, num_tokens: int, attempt: int) -> float:
        key = ("decode", self.batch, self.round, num_tokens, attempt)
        return self.seat.child.generate(self.prompts.deal(key, self.batch, self.plan.prompt_tokens), num_tokens).seconds


@dataclass
class Prefill:
    """Prompt tokens a second of one prompt."""

    seat: Seat
    prompts: Prompts
    length: int
    round: int = 0

    def __call__(self) -> float:
        self.round += 1
        with self.seat.child.turn():
            prompts = self.prompts.deal(("prefill", self.round), 1, self.length)
            return self.length / self.seat.child.generate(prompts, 1).seconds


@dataclass
class Context:
    """Seconds a token of one sequence whose prompt has `length` tokens. For contestants that show when the first one came."""

    seat: Seat
    prompts: Prompts
    plan: Plan
    length: int
    round: int = 0

    def __call__(self) -> float:
        self.round += 1
        with self.seat.child.turn():
            prompts = self.prompts.deal(("context", self.length, self.round), 1, self.length)
            reply = self.seat.child.generate(prompts, self.plan.new_tokens)
        if reply.first_seconds is None:
            raise PeerError("does not show when the first token came")
        return (reply.seconds - reply.first_seconds) / (self.plan.new_tokens - 1)


@dataclass
class Start:
    seat: Seat
    question: list[int]

    def __call__(self) -> float:
        return first_token_seconds(self.seat, self.question)
