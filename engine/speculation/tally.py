"""What speculation did since the engine started: for metrics, and for whoever asks why a request was fast or slow."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from engine.speculation.draft import Verified

MAX_POSITION = 16
"""Drafted tokens deeper than this are counted here."""


@dataclass(frozen=True)
class ProposerStats:
    """Drafted tokens that were verified and kept, by depth: [0] is the token behind the known ones."""

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
    """Since start. A row is a sequence's part of a step: it gives one token, and those that were kept of its draft."""

    num_rows: int = 0
    num_drafts: int = 0  # of the rows, those with a draft
    num_tokens: int = 0  # that they gave
    drafting_s: float = 0.0
    by_proposer: dict[str, ProposerStats] = field(default_factory=dict)
    verifying_s: float = 0.0  # computing drafted tokens: their part of the steps that did


class Tally:
    """Counts on the engine thread."""

    def __init__(self) -> None:
        self._num_rows = self._num_drafts = self._num_tokens = self._drafting_ns = self._verifying_ns = 0
        self._verified: defaultdict[str, list[int]] = defaultdict(lambda: [0] * MAX_POSITION)
        self._kept: defaultdict[str, list[int]] = defaultdict(lambda: [0] * MAX_POSITION)

    def drafted(self, took_ns: int) -> None:
        """Drafts were made for a step."""
        self._drafting_ns += took_ns

    def computed(self, took_ns: int, num_tokens: int, num_drafted: int) -> None:
        """A step of so many tokens, drafted ones included. All are counted alike, though some share what is read."""
        if num_drafted:
            self._verifying_ns += took_ns * num_drafted // num_tokens

    def verified(self, verified: Verified) -> None:
        """One sequence's part of a step, with a draft or without."""
        self._num_rows += 1
        self._num_tokens += 1
        draft = verified.draft
        if not draft:
            return
        kept = verified.kept
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
            self._verifying_ns / 1e9,
        )
