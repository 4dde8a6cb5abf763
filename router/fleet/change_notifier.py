"""Events for changes of state, which callers can wait for without missing one."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import TypeVar

T = TypeVar("T")


class ChangeNotifier:
    """Notify of changes. A caller takes `next` before it looks at the state, then waits for it, so that a change in between is
    not lost."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    @property
    def next(self) -> asyncio.Event:
        """Return an event that is set at the next change from now on."""
        return self._next

    def fire(self) -> None:
        """Report a change."""
        changed, self._next = self._next, asyncio.Event()
        changed.set()


async def wait_at_most(event: asyncio.Event, timeout_s: float) -> bool:
    """Return whether `event` was set within `timeout_s` seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()


class Signal(asyncio.Event):
    """Add callbacks to an event: waiting for it beside some other work needs no task of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.callbacks: set[Callable[[], object]] = set()
        """Holds the functions to call once, when the signal is set."""

    def set(self) -> None:
        """Wake the waiting tasks, and call the callbacks."""
        super().set()
        callbacks, self.callbacks = self.callbacks, set()
        for callback in callbacks:
            callback()


async def unless(signal: Signal, work: Coroutine[object, object, T]) -> T | None:
    """Return the result of `work`; None when `signal` was set first, in which case `work` is cancelled.

    Like `asyncio.timeout`, it cancels the task that waits here and takes the cancellation back: each request passes two of these,
    and two tasks for each would cost more than the rest of it.
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
        if cancels and task.cancelling() == cancelled_before + 1:  # no other cancellation is pending
            return None
        raise
    finally:
        signal.callbacks.discard(give_up)
        if cancels:
            task.uncancel()
