"""Streams of a device that does what it was given as late, and in as odd an order, as marks and lanes allow."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pdmesh.engine.kv_cache.streams import Lane, Mark, Work


@dataclass(eq=False)
class _LateMark(Mark):
    position: int  # in the compute stream: so many works lie before it


@dataclass
class _Entry:
    work: Work
    after: int
    future: Future[None]


@dataclass
class _LateLane:
    device: ReorderingStreams
    entries: deque[_Entry] = field(default_factory=deque)

    def run(self, work: Work, after: Mark) -> Future[None]:
        assert isinstance(after, _LateMark)
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        with self.device.lock:
            self.entries.append(_Entry(work, after.position, future))
        return future

    def close(self) -> None:
        with self.device.lock:
            while self.entries:
                self.device.advance_for(self.entries[0])
                self.do_next()

    def do_next(self) -> None:
        entry = self.entries.popleft()
        try:
            entry.work()
        except Exception as error:  # noqa: BLE001  it belongs to who waits for the work
            entry.future.set_exception(error)
        else:
            entry.future.set_result(None)


class ReorderingStreams:
    """Satisfies Streams. Nothing happens but by `advance`; steps are launched with `compute`."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._compute: deque[Work] = deque()
        self._num_computed = self._num_launched = 0
        self._lanes: list[_LateLane] = []
        self._waited_for: list[tuple[int, Future[None]]] = []

    def compute(self, work: Work) -> None:
        """Launch work of a step."""
        with self.lock:
            self._compute.append(work)
            self._num_launched += 1

    def mark(self) -> Mark:
        with self.lock:
            return _LateMark(self._num_launched)

    def reached(self, mark: Mark) -> Future[None]:
        assert isinstance(mark, _LateMark)
        future: Future[None] = Future()
        with self.lock:
            self._waited_for.append((mark.position, future))
            self._tell_reached()
        return future

    def lane(self) -> Lane:
        self._lanes.append(_LateLane(self))
        return self._lanes[-1]

    def close(self) -> None:
        with self.lock:
            assert not self.num_waited_for, "somebody waits for a mark"

    @property
    def num_waited_for(self) -> int:
        """How many wait for a mark."""
        with self.lock:
            return sum(not future.cancelled() for _, future in self._waited_for)

    @property
    def is_idle(self) -> bool:
        """No lane was given anything that it has not done."""
        with self.lock:
            return not any(lane.entries for lane in self._lanes)

    def host_room(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def advance(self, choose: Callable[[int], int], *, steps: bool = True) -> bool:
        """Does one of the works that may come next: the one of index `choose(how many)`. False: nothing is left. Without `steps`
        what computes stands still."""
        with self.lock:
            ready: list[Work] = [self._do_compute] if self._compute and steps else []
            ready += [lane.do_next for lane in self._lanes if lane.entries and lane.entries[0].after <= self._num_computed]
            if not ready:
                return False
            ready[choose(len(ready))]()
            return True

    def advance_for(self, entry: _Entry) -> None:
        """The compute stream, as far as this waits for it."""
        while entry.after > self._num_computed:
            self._do_compute()

    def _do_compute(self) -> None:
        self._compute.popleft()()
        self._num_computed += 1
        self._tell_reached()

    def _tell_reached(self) -> None:
        reached = [(at, future) for at, future in self._waited_for if at <= self._num_computed]
        self._waited_for = [each for each in self._waited_for if each not in reached]
        for _, future in reached:
            if future.set_running_or_notify_cancel():
                future.set_result(None)
