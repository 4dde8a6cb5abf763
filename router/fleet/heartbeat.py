"""Detection of a silent stream, which counts only time in which this process could have received something."""

import asyncio
from collections.abc import Callable


class HeartbeatClock:
    """Count silence in ticks. A tick that comes late, because this process was stalled, counts at most twice its period.

    Otherwise a router that was stopped for a second would believe that all of its workers had died.
    """

    def __init__(self, timeout_s: float, tick_s: float) -> None:
        self._timeout_s = timeout_s
        self._tick_s = tick_s
        self._silence_s = 0.0
        self._last: float | None = None

    def heard(self) -> None:
        """Record that a message came."""
        self._silence_s = 0.0

    def tick(self, now: float) -> bool:
        """Return whether the silence has lasted `timeout_s`. Call it every `tick_s`."""
        elapsed = 0.0 if self._last is None else now - self._last
        self._last = now
        self._silence_s += min(elapsed, 2 * self._tick_s)
        return self._silence_s >= self._timeout_s


def being_cancelled() -> bool:
    """Return whether the current task is being cancelled; else a CancelledError comes from a call that it made."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Watchdog:
    """Call `on_silence` once, on the running event loop, when nothing was heard for `timeout_s`. Use it as a context manager."""

    def __init__(self, timeout_s: float, on_silence: Callable[[], object]) -> None:
        self._tick_s = min(0.1, timeout_s / 5)
        self._clock = HeartbeatClock(timeout_s, self._tick_s)
        self._on_silence = on_silence
        self._handle: asyncio.TimerHandle | None = None
        self.heard = self._clock.heard

    def __enter__(self) -> "Watchdog":
        self._tick()
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        if self._clock.tick(loop.time()):
            self._on_silence()
        else:
            self._handle = loop.call_later(self._tick_s, self._tick)
