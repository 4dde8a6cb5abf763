"""Waiting for something to change without missing it."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import TypeVar

T = TypeVar("T")


class ChangeNotifier:
    """Take `next` before looking at the state, then wait for it: a change in between is not lost."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    @property
    def next(self) -> asyncio.Event:
        """Set at the next change from now on."""
        return self._next

    def fire(self) -> None:
        """Something changed."""
        changed, self._next = self._next, asyncio.Event()
        changed.set()


async def wait_at_most(event: asyncio.Event, timeout_s: float) -> bool:
    """Whether `event` was set within `timeout_s` seconds."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)
    return event.is_set()


class Signal(asyncio.Event):
    """An event that can call back: waiting for it beside some other work needs no task of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.callbacks: set[Callable[[], object]] = set()
        """Who is in it is called, once, when the signal is set."""

    def set(self) -> None:
        """Wake who waits, call who asked for it."""
        super().set()
        callbacks, self.callbacks = self.callbacks, set()
        for callback in callbacks:
            callback()


async def unless(signal: Signal, work: Coroutine[object, object, T]) -> T | None:
    """The result of `work`; None when `signal` was set before, and then `work` is cancelled.

    As `asyncio.timeout` does, it cancels the task that waits here and takes the cancellation back: two of these stand on the way
    of each request, and tasks for both sides cost more than the rest of it.
    """
    task = asyncio.current_task()
    assert task is not None
    if signal.is_set():
        work.close()
        return None
    cancelled_before, cancels = task.cancelling(), list[bool]()

    def give_up() -> None:
        cancels.append(task.cancel())

    signal.callbacks.add(give_up)
    try:
        return await work
    except asyncio.CancelledError:
        if cancels and task.cancelling() == cancelled_before + 1:  # nobody else wants it to end
            return None
        raise
    finally:
        signal.callbacks.discard(give_up)
        if cancels:
            task.uncancel()
