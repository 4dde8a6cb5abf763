"""What speculation does on this worker, as it tells routers: counts since start, and what of it is of now. Pure."""

from __future__ import annotations

from pdmesh.engine.speculation.stats import ProposerStats, SpeculationStats
from pdmesh.v1 import worker_pb2

HALF_LIFE_ROWS = 256
"""What is older by so many rows counts half."""
FIRST_ROWS = 16
"""So many count as if they had given one token each, before the first."""


class RecentDrafts:
    """Tokens that a row (a sequence's part of a step) gives lately, and that are computed for it. Both are at least 1."""

    def __init__(self) -> None:
        self.stats = SpeculationStats()
        self.tokens_per_row = self.computed_per_row = 1.0

    def take(self, stats: SpeculationStats) -> None:
        """As of now; what has come since the last ones is the latest."""
        num_rows, num_tokens = stats.num_rows - self.stats.num_rows, stats.num_tokens - self.stats.num_tokens
        num_computed = num_rows + _num_verified(stats) - _num_verified(self.stats)
        self.stats = stats
        if num_rows:
            share = max(1 - 0.5 ** (num_rows / HALF_LIFE_ROWS), num_rows / (stats.num_rows + FIRST_ROWS))
            self.tokens_per_row += share * (num_tokens / num_rows - self.tokens_per_row)
            self.computed_per_row += share * (num_computed / num_rows - self.computed_per_row)


def _num_verified(stats: SpeculationStats) -> int:
    return sum(proposer.num_verified for proposer in stats.by_proposer.values())


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
        failed_proposers=stats.failed,
    )


def _proposer(name: str, counts: ProposerStats) -> worker_pb2.ProposerReport:
    """As deep as its drafts have been."""
    deepest = max((depth for depth, count in enumerate(counts.verified, start=1) if count), default=0)
    return worker_pb2.ProposerReport(name=name, verified=counts.verified[:deepest], kept=counts.kept[:deepest])
