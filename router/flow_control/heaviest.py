"""Who holds most of a room: a heap whose old entries are void. Pure."""

import heapq
from typing import Generic, Protocol, TypeVar


class Holder(Protocol):
    """`load`: what it holds of the room, for its weight."""

    num_waiting: int

    @property
    def load(self) -> float: ...


Item = TypeVar("Item", bound=Holder)


class Heaviest(Generic[Item]):
    """Items by load; whoever changes an item's load says so with `weigh`."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Item]] = []
        self._entries = 0
        self._bound = 64

    def weigh(self, item: Item) -> None:
        """It holds more than before; who holds less is found out by `top`."""
        self._entries += 1
        heapq.heappush(self._heap, (-item.load, self._entries, item))
        if len(self._heap) > self._bound:
            waiting = {id(other): other for _, _, other in self._heap if other.num_waiting}
            self._heap = [(-other.load, number, other) for number, other in enumerate(waiting.values())]
            heapq.heapify(self._heap)
            self._bound = 4 * len(self._heap) + 64

    def top(self) -> Item | None:
        """None when nobody waits."""
        while self._heap:
            load, _, item = self._heap[0]
            if item.num_waiting and -load == item.load:
                return item
            heapq.heappop(self._heap)
            if item.num_waiting:
                self.weigh(item)  # it was heavier once
        return None
