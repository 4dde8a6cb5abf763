"""Holds the event queue, a heap of actions, and the simulated clock. Pure."""

import heapq
from collections.abc import Callable

Action = Callable[..., None]


class EventQueue:
    """Order actions by time; those of one moment in the order of insertion. `now` is simulated seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_done = 0
        self._heap: list[tuple[float, int, Action, tuple[object, ...]]] = []
        self._num_put = 0
        self._is_stopped = False

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, at_s: float, action: Action, *arguments: object) -> None:
        """Call `action(*arguments)` at `at_s`. Raises ValueError for a time that has passed, or is not a number."""
        if not at_s >= self.now:
            raise ValueError(f"at_s: {at_s} is not at or after now, {self.now}")
        heapq.heappush(self._heap, (at_s, self._num_put, action, arguments))
        self._num_put += 1

    def after(self, delay_s: float, action: Action, *arguments: object) -> None:
        """Call the action `delay_s` seconds from now; see `at`."""
        now = self.now
        at_s = now + delay_s
        if not at_s >= now:
            raise ValueError(f"delay_s: {delay_s} is not at or after 0")
        heapq.heappush(self._heap, (at_s, self._num_put, action, arguments))
        self._num_put += 1

    def stop(self) -> None:
        """End `run` after the present action."""
        self._is_stopped = True

    def run(self, until_s: float | None = None) -> None:
        """Run the actions in order until none is left, the next comes after `until_s`, or `stop` is called. The clock ends at the
        last action, or at `until_s` if that was given and reached."""
        heap, pop, self._is_stopped = self._heap, heapq.heappop, False
        while heap and not self._is_stopped:
            if until_s is not None and heap[0][0] > until_s:
                self.now = until_s
                return
            self.now, _, action, arguments = pop(heap)
            self.num_done += 1
            action(*arguments)
