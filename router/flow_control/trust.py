"""How far forecasts of the time to the first token are to be trusted: by what came of those who were let in on them. Pure.

A forecast is a middle: of two requests one is late. Who promises an objective needs the far end. So there is a margin: the factor
that all but a few of the latest requests stayed within. One that did not raises it by a step; one that did lowers it by the
fraction of a step with which the two are in balance when a share of FEW exceeds it (a quantile, followed by steps). A stall makes
many late at once and is one thing to learn from; and what was learned fades.
"""

FEW = 0.03
STEP = 0.2
MIN_MARGIN, MAX_MARGIN = 1 / 0.95, 2.0
HALF_LIFE_S = 30.0
RAISE_PERIOD_S = 0.5
CLOSE = 0.4
"""Of the objective: from there on an error is of interest. That of a short time is large beside it, and harmless."""


class Trust:
    """In the forecasts for one lane. Times are seconds, `now` is monotonic."""

    def __init__(self) -> None:
        self._margin = MIN_MARGIN
        self._margin_at = 0.0
        self._raised_at = -RAISE_PERIOD_S

    def margin(self, now: float) -> float:
        """For a request that comes now."""
        faded: float = 0.5 ** (max(0.0, now - self._margin_at) / HALF_LIFE_S)
        return MIN_MARGIN + (self._margin - MIN_MARGIN) * faded

    def observe(self, expected_s: float, seen_s: float, objective_s: float, now: float) -> None:
        """What was expected when it was let in or began to wait, and what came."""
        if expected_s < CLOSE * objective_s:
            return
        margin = self.margin(now)
        late = seen_s > margin * expected_s
        if late and now - self._raised_at >= RAISE_PERIOD_S:
            margin, self._raised_at = margin + STEP * (1 - FEW), now
        elif not late:
            margin -= STEP * FEW
        self._margin, self._margin_at = min(MAX_MARGIN, max(MIN_MARGIN, margin)), now
