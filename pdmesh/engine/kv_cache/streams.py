"""Order between what computes on a device and copies beside it, without waiting for the compute stream on the host.

    compute   ── step ── mark ── step ── ...          launched by the engine thread
                           └──────────┐ after
    lane      ── work ── work ──── work ── ...        launched by the owner of the lane; a lane's works run in order

Nothing else is ordered: work of a lane may run before or behind any step unless a mark orders it.
"""

from __future__ import annotations

import heapq
import itertools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

# Notification when a stream has passed a position: one thread sleeps until the earliest position that is waited for
#
#     tell(12) ─┐
#     tell(4) ──┼─► [4, 7, 12] ─► the thread sleeps until 4, then completes its future; until 7; ...
#     tell(7) ──┘
#
# A position that is added while the thread sleeps for a later one is reported when the later one is passed.


Wait = Callable[[], None]


@dataclass(order=True)
class _Asked:
    position: int
    number: int  # order of requests with the same position
    wait: Wait = field(compare=False)
    future: Future[None] = field(compare=False)


class StreamWatch:
    """Wait for positions of a stream. `tell` and `close` may be called from any thread. The thread starts with the first
    request."""

    def __init__(self) -> None:
        self._asked: list[_Asked] = []  # a heap
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def tell(self, position: int, wait: Wait) -> Future[None]:
        """Return a future that is done when the stream is past `position`; `wait` sleeps until it is, and what it raises is the
        future's exception. It may be cancelled."""
        future: Future[None] = Future()
        with self._changed:
            heapq.heappush(self._asked, _Asked(position, next(self._numbers), wait, future))
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="kv-marks", daemon=True)
                self._thread.start()
            self._changed.notify()
        return future

    def close(self) -> None:
        """End the thread behind all requests; idempotent."""
        with self._changed:
            thread, self._thread, self._is_closed = self._thread, None, True
            self._changed.notify()
        if thread is not None:
            thread.join()
        self._is_closed = False

    def _watch(self) -> None:
        while (asked := self._earliest()) is not None:
            if not asked.future.set_running_or_notify_cancel():
                continue
            try:
                asked.wait()
            except Exception as error:  # noqa: BLE001  the future gets it
                asked.future.set_exception(error)
            else:
                asked.future.set_result(None)

    def _earliest(self) -> _Asked | None:
        """Return the earliest request; None: closed, and no request is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._asked or self._is_closed)
            return heapq.heappop(self._asked) if self._asked else None


Work = Callable[[], None]


class Mark:
    """A point in the compute stream, behind what was launched before it was made."""


class Lane(Protocol):
    """A stream of copies. One thread launches its work."""

    def run(self, work: Work, after: Mark) -> Future[None]:
        """Launch `work` behind `after` and all earlier work of this lane; return at once. The future is done, and cannot be
        cancelled, when the device has finished it; what `work` raised is its exception."""
        ...

    def close(self) -> None:
        """Wait until all work has ended; idempotent."""
        ...


class Streams(Protocol):
    def mark(self) -> Mark:
        """Return a mark, from any thread, without waiting."""
        ...

    def reached(self, mark: Mark) -> Future[None]:
        """Return a future that is done when the device has passed the mark; an error of the device is its exception. It may be
        cancelled."""
        ...

    def lane(self) -> Lane: ...

    def close(self) -> None:
        """Close, when no mark is waited for any more; idempotent."""
        ...

    def host_room(self, num_bytes: int) -> Tensor:
        """Return [num_bytes] uint8 in host memory that the device copies from and to asynchronously."""
        ...


class InOrder:
    """Run work at once, for a pool in CPU memory."""

    def mark(self) -> Mark:
        return Mark()

    def reached(self, mark: Mark) -> Future[None]:
        return _done()

    def lane(self) -> Lane:
        return _InOrderLane()

    def close(self) -> None:
        """Do nothing: there is nothing to wait for."""

    def host_room(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)


class _InOrderLane:
    def run(self, work: Work, after: Mark) -> Future[None]:
        future: Future[None] = Future()
        _finish(future, _error_of(work))
        return future

    def close(self) -> None:
        """Do nothing: all work has ended."""


@dataclass(frozen=True)
class _CudaMark(Mark):
    position: int  # position in the compute stream: later marks have greater ones
    event: torch.cuda.Event


class CudaStreams:
    """Order work on CUDA. Steps are on the device's default stream, which is the engine thread's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._compute = torch.cuda.default_stream(device)
        self._positions = itertools.count()
        self._watch = StreamWatch()

    def mark(self) -> Mark:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # waiting for it sleeps
        event.record(self._compute)
        return _CudaMark(next(self._positions), event)

    def reached(self, mark: Mark) -> Future[None]:
        assert isinstance(mark, _CudaMark), "a mark of other streams"
        is_there = mark.event.query()  # type: ignore[no-untyped-call]
        return _done() if is_there else self._watch.tell(mark.position, mark.event.synchronize)

    def lane(self) -> Lane:
        return _CudaLane(self._device)

    def close(self) -> None:
        self._watch.close()

    def host_room(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)


class _CudaLane:
    """A CUDA stream whose events a thread waits for, one after the other: they come in order."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._under_way: queue.SimpleQueue[tuple[torch.cuda.Event, Future[None], Exception | None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name="kv-copies", daemon=True)
        self._thread.start()

    def run(self, work: Work, after: Mark) -> Future[None]:
        assert isinstance(after, _CudaMark), "a mark of other streams"
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after.event)
            error = _error_of(work)
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # waiting for it sleeps
            event.record(self._stream)
        self._under_way.put((event, future, error))  # work launched before an error has to end, too
        return future

    def close(self) -> None:
        if self._thread.is_alive():
            self._under_way.put(None)
            self._thread.join()

    def _watch(self) -> None:
        while (next_one := self._under_way.get()) is not None:
            event, future, error = next_one
            try:
                event.synchronize()
            except Exception as failure:  # noqa: BLE001  a failed device fails everything behind it
                error = failure
            _settle(future, error)


def streams_of(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else InOrder()


def _done() -> Future[None]:
    future: Future[None] = Future()
    _finish(future, None)
    return future


def _error_of(work: Work) -> Exception | None:
    try:
        work()
    except Exception as error:  # noqa: BLE001  the future of the work gets it
        return error
    return None


def _finish(future: Future[None], error: Exception | None) -> None:
    future.set_running_or_notify_cancel()
    _settle(future, error)


def _settle(future: Future[None], error: Exception | None) -> None:
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
