"""Who was given how much of late, and who of them less than its share. Pure: time is counted in tokens that anybody was given.

    use      = tokens given to a tenant, a token that was given WINDOW_TOKENS tokens ago counting 1/e
    level    = use / weight
    typical  = the mean level over recent tokens: that of the tenant to whom the typical token went

A tenant well below the typical level takes less than the others beside it. Nobody's level is below it where all take equally
much, and not that of a tenant alone. Each charge costs the same however many tenants there are.
"""

import math
from dataclasses import dataclass

WINDOW_TOKENS = 32768.0
BELOW = 0.9
"""Of the typical level: above it, tenants that take equally much would be called poor by turns."""


@dataclass
class Use:
    """One tenant's: its tokens as of when so many had been given to anybody."""

    tokens: float = 0.0
    as_of: float = 0.0


class RecentUse:
    """All tenants'. Whoever is forgotten fades from the sums by itself."""

    def __init__(self) -> None:
        self._given = 0.0  # ever, to anybody
        self._tokens = 0.0  # of late
        self._squares = 0.0  # of late: use²/weight over all tenants

    def charge(self, use: Use, tokens: float, weight: float) -> None:
        """A tenant was given so many."""
        kept = math.exp(-tokens / WINDOW_TOKENS)
        before = self._of(use) * kept
        self._given += tokens
        self._tokens = self._tokens * kept + tokens
        self._squares = self._squares * kept * kept + tokens * (2 * before + tokens) / weight
        use.tokens, use.as_of = before + tokens, self._given

    def is_below(self, use: Use, weight: float) -> bool:
        """Was this tenant given less than its share?"""
        return self._of(use) / weight * self._tokens < BELOW * self._squares

    def _of(self, use: Use) -> float:
        return use.tokens * math.exp((use.as_of - self._given) / WINDOW_TOKENS)
