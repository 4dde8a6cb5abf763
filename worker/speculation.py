"""What speculation does on this worker, as it tells routers: counts since start, and what of it is of now. Pure."""

from __future__ import annotations

from engine.speculation.tally import ProposerStats, SpeculationStats
from protos.v1 import worker_pb2

HALF_LIFE_ROWS = 256
"""What is older by so many rows counts half."""
FIRST_ROWS = 16.0
"""Before the first row: so many, of which each gave and computed one token."""


class RecentDrafts:
    """Tokens that a row (a sequence's part of a step) gives lately, and that are computed for it."""

    def __init__(self) -> None:
        self.stats = SpeculationStats()
        self._num_verified = 0
        self._rows = self._tokens = self._computed = FIRST_ROWS

    @property
    def tokens_per_row(self) -> float:
        """At least 1."""
        return self._tokens / self._rows

    @property
    def computed_per_row(self) -> float:
        """At least 1."""
        return self._computed / self._rows

    def take(self, stats: SpeculationStats) -> None:
        """As of now; what has come since the last ones is the latest."""
        num_verified = sum(proposer.num_verified for proposer in stats.by_proposer.values())
        num_rows, num_tokens = stats.num_rows - self.stats.num_rows, stats.num_tokens - self.stats.num_tokens
        kept = 0.5 ** (num_rows / HALF_LIFE_ROWS)
        self._rows = kept * self._rows + num_rows
        self._tokens = kept * self._tokens + num_tokens
        self._computed = kept * self._computed + num_rows + num_verified - self._num_verified
        self.stats, self._num_verified = stats, num_verified


def speculation_message(recent: RecentDrafts) -> worker_pb2.SpeculationReport:
    """As it travels."""
    stats = recent.stats
    return worker_pb2.SpeculationReport(
        tokens_per_row=recent.tokens_per_row,
        computed_per_row=recent.computed_per_row,
        num_rows=stats.num_rows,
        num_drafts=stats.num_drafts,
        num_tokens=stats.num_tokens,
        drafting_s=stats.drafting_s,
        proposers=[_proposer(name, counts) for name, counts in stats.by_proposer.items()],
    )


def _proposer(name: str, counts: ProposerStats) -> worker_pb2.ProposerReport:
    """As deep as its drafts have been."""
    deepest = max((depth for depth, count in enumerate(counts.verified, start=1) if count), default=0)
    return worker_pb2.ProposerReport(name=name, verified=counts.verified[:deepest], kept=counts.kept[:deepest])
