"""How many tokens a request is thought to generate: the mean of those that its tenant had of its model. Bounded; pure."""

from collections import OrderedDict

UNKNOWN = 128.0
MAX_KEYS = 4096
MEMORY = 64
"""About so many requests make the mean."""


class OutputLengths:
    """Moving means by model and tenant."""

    def __init__(self) -> None:
        self._means: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()

    def expected(self, model: str, tenant: str, max_tokens: int) -> float:
        """Tokens of each choice: at least one, at most `max_tokens`."""
        mean, _ = self._means.get((model, tenant)) or self._means.get((model, "")) or (UNKNOWN, 0)
        return max(1.0, min(mean, max_tokens))

    def observe(self, model: str, tenant: str, num_tokens: int) -> None:
        """A choice has ended after `num_tokens`."""
        mean, count = self._means.pop((model, tenant), (0.0, 0))
        count = min(count + 1, MEMORY)
        self._means[(model, tenant)] = (mean + (num_tokens - mean) / count, count)
        if len(self._means) > MAX_KEYS:
            self._means.popitem(last=False)
