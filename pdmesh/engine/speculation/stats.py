"""Statistics of speculative decoding since the engine started: for metrics and for usage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from pdmesh.engine.speculation.draft import Verified

MAX_POSITION = 16
"""Draft tokens deeper than this are counted at this depth."""


@dataclass(frozen=True)
class ProposerStats:
    """Count draft tokens that were verified and accepted, by depth: [0] is the token after the known ones."""

    verified: tuple[int, ...]
    kept: tuple[int, ...]

    @property
    def num_verified(self) -> int:
        return sum(self.verified)

    @property
    def num_kept(self) -> int:
        return sum(self.kept)


@dataclass(frozen=True)
class SpeculationStats:
    """Count since start. A row is a sequence's part of a step: it gives one token, and the accepted ones of its draft."""

    num_rows: int = 0
    num_drafts: int = 0  # rows with a draft
    num_tokens: int = 0  # tokens of all rows
    drafting_s: float = 0.0
    by_proposer: dict[str, ProposerStats] = field(default_factory=dict)
    failed: tuple[str, ...] = ()  # proposers that are not used any more
    verifying_s: float = 0.0  # time of verifying draft tokens: their part of the steps


class Tally:
    """Count on the engine thread."""

    def __init__(self) -> None:
        self._num_rows = self._num_drafts = self._num_tokens = self._drafting_ns = self._verifying_ns = 0
        self._failed: list[str] = []
        self._verified: defaultdict[str, list[int]] = defaultdict(lambda: [0] * MAX_POSITION)
        self._kept: defaultdict[str, list[int]] = defaultdict(lambda: [0] * MAX_POSITION)

    def drafted(self, took_ns: int) -> None:
        """Record the time of drafting for a step."""
        self._drafting_ns += took_ns

    def fault(self, proposer: str) -> None:
        """Record that a proposer is not used any more."""
        self._failed.append(proposer)

    def stepped(self, num_rows: int, drafted: Iterable[Verified]) -> None:
        """Record a step of `num_rows` sequences, and the results of their drafts."""
        self._num_rows += num_rows
        self._num_tokens += num_rows
        for verified in drafted:
            self._verified_one(verified)

    def computed(self, took_ns: int, num_tokens: int, num_drafted: int) -> None:
        """Record a step of so many tokens, draft tokens included. All are counted alike, though some share what is read."""
        if num_drafted:
            self._verifying_ns += took_ns * num_drafted // num_tokens

    def _verified_one(self, verified: Verified) -> None:
        draft, kept = verified.draft, verified.kept
        self._num_drafts += 1
        self._num_tokens += len(kept)
        for depth in draft.depths:
            self._verified[draft.proposer][min(depth, MAX_POSITION) - 1] += 1
        for place in range(len(kept)):
            self._kept[draft.proposer][min(place, MAX_POSITION - 1)] += 1

    def stats(self) -> SpeculationStats:
        return SpeculationStats(
            self._num_rows,
            self._num_drafts,
            self._num_tokens,
            self._drafting_ns / 1e9,
            {name: ProposerStats(tuple(counts), tuple(self._kept[name])) for name, counts in self._verified.items()},
            tuple(self._failed),
            self._verifying_ns / 1e9,
        )
