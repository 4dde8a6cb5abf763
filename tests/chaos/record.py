"""What became of the faults of a round, and what clients saw meanwhile; goes into a line of JSON and out of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from pdmesh.models.catalogue import cache_folder

# Is a stream the answer that an engine alone gives? Every token and every index counts. Pure.


class Answer:
    """One request's output as it comes, beside the token ids `expected` of each choice."""

    def __init__(self, expected: Sequence[Sequence[int]]) -> None:
        self._expected = expected
        self._next_index = [0] * len(expected)
        self.num_tokens = 0
        self.num_wrong = 0
        self.num_lost = 0
        self.num_duplicated = 0

    def take(self, choice: int, first_index: int, token_ids: Sequence[int]) -> None:
        """Tokens of `choice` from `first_index` on."""
        if not token_ids:
            return
        self.num_lost += max(0, first_index - self._next_index[choice])
        self.num_duplicated += max(0, self._next_index[choice] - first_index)
        expected = self._expected[choice][first_index : first_index + len(token_ids)]
        same = sum(ours == theirs for ours, theirs in zip(token_ids, expected, strict=False))
        self.num_wrong += len(token_ids) - same  # what comes behind the expected end is wrong as well
        self.num_tokens += len(token_ids)
        self._next_index[choice] = max(self._next_index[choice], first_index + len(token_ids))

    def end(self) -> None:
        """The mesh says that it is complete."""
        for index, expected in zip(self._next_index, self._expected, strict=True):
            self.num_lost += max(0, len(expected) - index)


# What clients saw during a round of faults; adds up, and goes into a file of JSON and out of it.


@dataclass
class Tally:
    """Counts of requests and tokens, the errors in words, and the waits for a token that were long: (begin, end), in seconds of
    the monotonic clock. `num_left`: streams that their client closed on purpose. `transports`: streams by what their KV came over
    last; "": decode computed it itself."""

    num_requests: int = 0
    num_left: int = 0
    num_resumes: int = 0
    num_resubmissions: int = 0
    num_retries: int = 0
    num_tokens: int = 0
    num_wrong: int = 0
    num_lost: int = 0
    num_duplicated: int = 0
    errors: list[str] = field(default_factory=list)
    transports: Counter[str] = field(default_factory=Counter)
    waits: list[tuple[float, float]] = field(default_factory=list)

    def count(self, answer: Answer) -> None:
        """One stream, whichever way it ended."""
        self.num_requests += 1
        self.num_tokens += answer.num_tokens
        self.num_wrong += answer.num_wrong
        self.num_lost += answer.num_lost
        self.num_duplicated += answer.num_duplicated

    def add(self, other: Tally) -> None:
        """Takes in the counts of another one."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def to_json(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        waits = [(begin, end) for begin, end in content["waits"]]
        return cls(**{**content, "waits": waits, "transports": Counter(content["transports"])})


# Rounds that are done, in a file: a campaign that was stopped goes on behind the last of them.


class Progress:
    """One line of JSON for each round of one plan. A line that was cut off in the middle counts as not written."""

    def __init__(self, plan_name: str, *, fresh: bool) -> None:
        """`plan_name`: what tells plans apart. `fresh`: forget what is there."""
        self._file = cache_folder() / "chaos" / f"{plan_name}.jsonl"
        self._file.parent.mkdir(parents=True, exist_ok=True)
        if fresh:
            self._file.unlink(missing_ok=True)
        self.rounds = self._read()
        self._write_all()

    @property
    def path(self) -> Path:
        return self._file

    def find(self, campaign: str, number: int) -> Round | None:
        """The round, if it is done."""
        return next((each for each in self.rounds if (each.campaign, each.number) == (campaign, number)), None)

    def add(self, done: Round) -> None:
        """Keeps a round."""
        self.rounds.append(done)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(done.to_json()) + "\n")

    def read_again(self) -> None:
        """Take in what another process has added."""
        self.rounds = self._read()

    def _read(self) -> list[Round]:
        if not self._file.exists():
            return []
        lines = self._file.read_text(encoding="utf-8").split("\n")[:-1]
        return [Round.from_json(json.loads(line)) for line in lines]

    def _write_all(self) -> None:
        """Without the line that was cut off."""
        self._file.write_text("".join(json.dumps(each.to_json()) + "\n" for each in self.rounds), encoding="utf-8")


@dataclass(frozen=True)
class Dealt:
    """A fault that was dealt. `began` (the blow) and `ended` (the victim serves again): seconds of the monotonic clock.

    `serving_s`: from ready to serving, of a process started again. `stall_s`: the longest wait of any client for a token while it
    lasted; `own_stall_s`: the same over waits during which no other fault lasted. None: nobody waited long.
    """

    number: int
    kind: str
    state: str
    victim: str
    began: float
    ended: float
    serving_s: float | None = None
    stall_s: float | None = None
    own_stall_s: float | None = None


@dataclass(frozen=True)
class Round:
    """A batch of faults, from a mesh at rest to a mesh at rest. `not_dealt`: numbers of faults whose state was not reached.
    `problems`: in words, whatever must not be; `blocks_leaked`: held when nobody asked any more; `kv_counts`: what workers
    restored and fetched, where they have tiers."""

    campaign: str
    number: int
    elapsed_s: float
    dealt: Sequence[Dealt]
    not_dealt: Sequence[int]
    tally: Tally
    blocks_leaked: int = 0
    problems: Sequence[str] = field(default_factory=list)
    kv_counts: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        # By hand: `asdict` cannot copy the tally's Counter.
        return {**vars(self), "dealt": [asdict(fault) for fault in self.dealt], "tally": self.tally.to_json()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        dealt = [Dealt(**each) for each in content["dealt"]]
        return cls(**{**content, "dealt": dealt, "tally": Tally.from_json(content["tally"])})


def with_stalls(dealt: Sequence[Dealt], waits: Sequence[tuple[float, float]]) -> list[Dealt]:
    """The faults with the longest of `waits`, (begin, end), that overlap each of them."""
    stalls: dict[int, float] = {}
    own_stalls: dict[int, float] = {}
    for begin, end in waits:
        overlapping = [fault.number for fault in dealt if begin < fault.ended and end > fault.began]
        for number in overlapping:
            stalls[number] = max(stalls.get(number, 0.0), end - begin)
        if len(overlapping) == 1:
            own_stalls[overlapping[0]] = max(own_stalls.get(overlapping[0], 0.0), end - begin)
    return [replace(fault, stall_s=stalls.get(fault.number), own_stall_s=own_stalls.get(fault.number)) for fault in dealt]
