"""The largest context of any worker of a model, without a look at every worker: each request asks. Pure."""

from collections import Counter


class Contexts:
    """What workers can hold at most, by address. Few of thousands differ: the sizes are counted."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[str, int]] = {}
        self._sizes: dict[str, Counter[int]] = {}

    def put(self, address: str, model: str, max_context: int) -> None:
        """The worker there serves `model` with contexts of up to `max_context` tokens."""
        self.drop(address)
        self._of[address] = (model, max_context)
        self._sizes.setdefault(model, Counter())[max_context] += 1

    def drop(self, address: str) -> None:
        """Nothing is known of the worker there, any more."""
        known = self._of.pop(address, None)
        if known is None:
            return
        model, max_context = known
        sizes = self._sizes[model]
        sizes[max_context] -= 1
        if not sizes[max_context]:
            del sizes[max_context]
        if not sizes:
            del self._sizes[model]

    def largest(self, model: str) -> int | None:
        """Of the workers of `model`, in tokens; None without one."""
        return max(self._sizes.get(model, ()), default=None)
