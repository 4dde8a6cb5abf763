"""How far forecasts of the time to the first token are to be trusted: by what came of those who were let in on them. Pure.

A forecast is a middle: of two requests one is late. Who promises an objective needs the far end. So the margin is the factor
that all but a few of the latest requests stayed within: one that did not raises it by a step, one that did lowers it by the
fraction of a step with which the two are in balance when a share of FEW exceeds it (a quantile, followed by steps).
"""

FEW = 0.03
STEP = 0.2
CLOSE = 0.4
"""Of the objective: from there on an error is of interest."""
MIN_MARGIN, MAX_MARGIN = 1 / 0.95, 2.0


class Trust:
    """In the forecasts for one lane."""

    def __init__(self) -> None:
        self.margin = MIN_MARGIN

    def observe(self, expected_s: float, seen_s: float, objective_s: float) -> None:
        """What was expected when it was let in or began to wait, and what came. Only where it might have mattered: the error of
        a short time is large beside it, and harmless."""
        if expected_s <= 0 or expected_s < CLOSE * objective_s:
            return
        step = STEP * (1 - FEW) if seen_s > expected_s * self.margin else -STEP * FEW
        self.margin = min(MAX_MARGIN, max(MIN_MARGIN, self.margin + step))
