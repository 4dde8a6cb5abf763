"""What is measured of every contestant, by one definition, and how much of it.

    decode at batch B   B * (n - 1) tokens / (t(n tokens) - t(1 token)): what remains is decode alone
    prefill             length / t(one prompt, 1 token)

Every call gets prompts of its own; in one round all contestants get the same.
"""

from __future__ import annotations

import math
import statistics
import sysconfig
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from benchmarks.harness import Kept, say
from benchmarks.peers.environments import PeerError
from benchmarks.peers.servers import Child
from pdmesh.text.tokenizer import Tokenizer

VOCABULARY = 30_000
"""Token ids below this are in every model that is measured."""
_ATTEMPTS = 3
_SHORT_PROMPT = 1000
_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Plan:
    """How much is measured. `limit_s` after the first round no further one begins, and a contestant that takes longer than
    `answer_s` for one call is ended: so slow a one cannot be the fastest. One that is not ready after `ready_s` is left out."""

    rounds: int = 5
    batches: tuple[int, ...] = (1, 4, 16, 32)
    prompt_tokens: int = 64
    new_tokens: int = 64
    prefills: tuple[int, ...] = (1000, 8000)
    limit_s: float = 300.0
    answer_s: float = 120.0
    ready_s: float = 600.0

    @property
    def max_context(self) -> int:
        """Return enough for every contestant's cases."""
        return max(*self.prefills, self.prompt_tokens) + self.new_tokens

    @property
    def mean_context(self) -> float:
        """Return that of the tokens that decode reads back."""
        return self.prompt_tokens + self.new_tokens / 2


class Prompts(Protocol):
    """Deals out token ids."""

    def deal(self, key: Hashable, count: int, length: int) -> list[list[int]]:
        """`count` prompts of exactly `length` tokens. The same key gets the same prompts, other keys get others."""


class RandomPrompts:
    """Token ids without a meaning, for models whose weights have none."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._dealt = 0
        self._known: dict[Hashable, list[list[int]]] = {}

    def deal(self, key: Hashable, count: int, length: int) -> list[list[int]]:
        """See `Prompts`."""
        if key not in self._known:
            self._known[key] = [self.next(length) for _ in range(count)]
        return self._known[key]

    def next(self, length: int) -> list[int]:
        """Return a prompt that was not dealt before."""
        self._dealt += 1
        span = self._vocabulary - 300  # behind what may have a meaning of its own
        return [300 + (self._dealt * 7919 + place * 104_729 + place * place) % span for place in range(length)]


_NUM_CHARACTERS = 2_000_000
QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "Paris"


class TextPrompts:
    """Prompts that share no beginning: consecutive pieces of the Python standard library's sources."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = tokenizer.encode(_standard_library(_NUM_CHARACTERS))
        self._place = 0
        self._dealt: dict[Hashable, list[list[int]]] = {}
        self.question = list(tokenizer.encode(QUESTION))

    def deal(self, key: Hashable, count: int, length: int) -> list[list[int]]:
        """See `Prompts`."""
        if key not in self._dealt:
            self._dealt[key] = [self._next(length) for _ in range(count)]
        return self._dealt[key]

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of an output."""
        return self._tokenizer.decode(token_ids)

    def _next(self, length: int) -> list[int]:
        if self._place + length > len(self._ids):
            self._place = self._place % 101 + 1  # once more from the top, cut elsewhere
        self._place += length
        return list(self._ids[self._place - length : self._place])


def _standard_library(num_characters: int) -> str:
    texts, total = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        texts.append(path.read_text(encoding="utf-8", errors="replace"))
        total += len(texts[-1])
        if total >= num_characters:
            break
    return "".join(texts)


def decode_case(name: str, batch: int) -> str:
    """Return the name of a contestant's case."""
    return f"{name}: decode, batch {batch}"


def prefill_case(name: str, length: int) -> str:
    """Return the name of a contestant's case."""
    return f"{name}: prefill, {length} tokens"


@dataclass(frozen=True)
class Decode:
    """Measures output tokens a second over all sequences."""

    batch: int

    def name_of(self, contestant: str) -> str:
        """Return the name of a contestant's case."""
        return decode_case(contestant, self.batch)

    def measure(self, child: Child, prompts: Prompts, plan: Plan, number: int) -> float:
        """Return the speed in round `number`. Raises PeerError."""
        for attempt in range(_ATTEMPTS):
            one, many = (self._seconds(child, prompts, plan, (number, attempt, count)) for count in (1, plan.new_tokens))
            if many > one:
                return self.batch * (plan.new_tokens - 1) / (many - one)
        raise PeerError(f"{plan.new_tokens} tokens took no longer than one, {_ATTEMPTS} times: the machine is disturbed")

    def _seconds(self, child: Child, prompts: Prompts, plan: Plan, place: tuple[int, int, int]) -> float:
        dealt = prompts.deal(("decode", self.batch, *place), self.batch, plan.prompt_tokens)
        return child.generate(dealt, place[-1], plan.answer_s).seconds

    def warm_up(self, child: Child, prompts: Prompts, plan: Plan) -> None:
        """Run the shape once: some libraries compile or lay out memory for it at first sight."""
        dealt = prompts.deal(("warm up", self.batch), self.batch, plan.prompt_tokens)
        child.generate(dealt, min(plan.new_tokens, _WARM_UP_TOKENS), plan.answer_s)


@dataclass(frozen=True)
class Prefill:
    """Measures prompt tokens a second of one prompt."""

    length: int

    def name_of(self, contestant: str) -> str:
        """Return the name of a contestant's case."""
        return prefill_case(contestant, self.length)

    def measure(self, child: Child, prompts: Prompts, plan: Plan, number: int) -> float:
        """Return the speed in round `number`. Raises PeerError."""
        dealt = prompts.deal(("prefill", self.length, number), 1, self.length)
        return self.length / child.generate(dealt, 1, plan.answer_s).seconds

    def warm_up(self, child: Child, prompts: Prompts, plan: Plan) -> None:
        """Run the length once where it is short; else a shorter one: what is laid out for the length in full takes little of so
        long a call."""
        length = self.length if self.length <= _SHORT_PROMPT else self.length // 8
        child.generate(prompts.deal(("warm up", self.length), 1, length), 1, plan.answer_s)


Case = Decode | Prefill


def cases_of(plan: Plan) -> list[Case]:
    """Return all cases of a contestant."""
    return [*(Decode(batch) for batch in plan.batches), *(Prefill(length) for length in plan.prefills)]


@dataclass
class Measured:
    """Samples by case; a case that failed once has a reason instead. With `kept` both outlive the process, so that a part that
    is cut off goes on where it was. `notes`: what each contestant says of itself."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    notes: dict[str, dict[str, object]] = field(default_factory=dict)
    kept: Kept | None = None

    @staticmethod
    def resumed(kept: Kept) -> Measured:
        """Return what an earlier process kept, or nothing."""
        document = kept.get("measured") or {}
        return Measured(document.get("samples", {}), document.get("failures", {}), document.get("notes", {}), kept)

    @property
    def medians(self) -> dict[str, float]:
        """Return that of each case without a failure."""
        return {name: statistics.median(values) for name, values in self.samples.items() if name not in self.failures}

    def wants(self, name: str, number: int) -> bool:
        """Return whether the case has no sample of round `number` yet, and none that failed."""
        return name not in self.failures and len(self.samples.get(name, ())) <= number

    def take(self, name: str, case: Callable[[], float]) -> None:
        """Add a sample of the case; a failure is kept, too, and costs no further rounds."""
        try:
            value = case()
        except (PeerError, RuntimeError, OSError) as error:
            self.failures[name] = str(error)
            say(f"{name}: failed: {error}")
            return
        self.samples.setdefault(name, []).append(value)
        say(f"{name}: {value:.4g}")

    def keep(self) -> None:
        """Write all to the files that outlive the process."""
        if self.kept is not None:
            self.kept.put("measured", {"samples": self.samples, "failures": self.failures, "notes": self.notes})


def behind(name: str, rivals: Sequence[str], medians: Mapping[str, float], share: float) -> bool:
    """Return whether a case's median is less than this share of the fastest of its rivals': more samples would not change
    which is the fastest. Pure."""
    fastest = max((medians[rival] for rival in rivals if rival in medians), default=math.inf)
    return name in medians and medians[name] < share * fastest
