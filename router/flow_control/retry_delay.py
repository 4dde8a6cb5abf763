"""The retry delay that a refused request gets. How soon slots come free is measured by `DrainRate` (`capacity.py`)."""

MIN_RETRY_DELAY_S = 0.1
MAX_RETRY_DELAY_S = 30.0
UNKNOWN_RETRY_DELAY_S = 1.0


def retry_delay_s(seconds: float | None) -> float:
    """Return the retry delay that a client gets: within bounds, and a default while nothing is known."""
    if seconds is None:
        return UNKNOWN_RETRY_DELAY_S
    return min(MAX_RETRY_DELAY_S, max(MIN_RETRY_DELAY_S, seconds))
