"""What clients saw during a round of faults; adds up, and goes into a file of JSON and out of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any, Self

from tests.chaos.verify import Answer


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
