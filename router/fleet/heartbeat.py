"""Detection of silence, which counts only time in which this process could have received something.

A worker is heard whenever its event loop sends something, on any stream. It is suspected after half of its limit: what can go
elsewhere does. At the limit it is lost, for all requests at once. The limit follows from the worker's own pauses, so that a slow
worker on a busy machine is not taken for a dead one.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

MAX_TICK_S = 0.1


def tick_s_of(timeout_s: float) -> float:
    """Return the seconds between two looks at a silence that may last `timeout_s`."""
    return min(MAX_TICK_S, timeout_s / 5)


class HeartbeatClock:
    """Count silence in ticks. A tick that comes late, because this process was stalled, counts at most twice its period.

    Otherwise a router that was stopped for a second would believe that all of its workers had died.
    """

    def __init__(self, timeout_s: float, tick_s: float) -> None:
        self._timeout_s = timeout_s
        self._tick_s = tick_s
        self._silence_s = 0.0
        self._last: float | None = None

    @property
    def silence_s(self) -> float:
        """Return the silence as of the last tick."""
        return self._silence_s

    def heard(self) -> None:
        """Record that a message came."""
        self._silence_s = 0.0

    def tick(self, now: float) -> bool:
        """Return whether the silence has lasted `timeout_s`. Call it every `tick_s`."""
        elapsed = 0.0 if self._last is None else now - self._last
        self._last = now
        self._silence_s += min(elapsed, 2 * self._tick_s)
        return self._silence_s >= self._timeout_s


@dataclass(frozen=True)
class SilenceLimits:
    """Hold how long a worker may be silent. `least_s`: one that answers in time; `most_s`: the slowest that is waited for.

    Between the two, the limit is `factor` times the longest pause of the last `memory_s` to twice that time."""

    least_s: float = 1.0
    most_s: float = 3.0
    factor: float = 2.5
    memory_s: float = 15.0


class SilenceDetector:
    """Judge whether one worker is alive, by the pauses between its messages. Pure: time is passed in."""

    def __init__(self, limits: SilenceLimits, tick_s: float) -> None:
        self._limits = limits
        self._clock = HeartbeatClock(limits.least_s, tick_s)
        self._longest_s = [0.0, 0.0]  # in the present period of `memory_s`, and in the one before
        self._period_end: float | None = None

    @property
    def silence_s(self) -> float:
        """Return how long nothing was heard, as of the last tick."""
        return self._clock.silence_s

    @property
    def limit_s(self) -> float:
        """Return the silence at which the worker is lost."""
        limits = self._limits
        return min(limits.most_s, max(limits.least_s, limits.factor * max(self._longest_s)))

    @property
    def is_suspect(self) -> bool:
        """Return whether the worker has been silent for so long that nothing more should be sent to it."""
        return self.silence_s >= self.limit_s / 2

    @property
    def is_lost(self) -> bool:
        """Return whether the worker has been silent for too long."""
        return self.silence_s >= self.limit_s

    def heard(self) -> None:
        """Record a message. The pause before it counts, unless it was so long that the worker stood still: then it says nothing
        about how slow the worker is when it runs."""
        pause_s = self.silence_s
        if pause_s < 2 * self.limit_s:
            self._longest_s[0] = max(self._longest_s[0], pause_s)
        self._clock.heard()

    def tick(self, now: float) -> None:
        """Count the time up to `now`, in seconds. Call it every `tick_s`."""
        self._clock.tick(now)
        if self._period_end is None or now >= self._period_end:
            self._longest_s = [0.0, self._longest_s[0]]
            self._period_end = now + self._limits.memory_s


def being_cancelled() -> bool:
    """Return whether the current task is being cancelled; else a CancelledError comes from a call that it made."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Watchdog:
    """Call `on_silence` once, on the running event loop, when nothing was heard on a stream for the seconds that `limit_s` gives.
    Use it as a context manager.

    Time in which the worker `is_silent` on all streams does not count: the stream is not at fault, and a new one would hear no
    more."""

    def __init__(
        self, limit_s: Callable[[], float], on_silence: Callable[[], object], is_silent: Callable[[], bool]
    ) -> None:  # fmt: skip
        self._limit_s = limit_s
        self._tick_s = tick_s_of(limit_s())
        self._clock = HeartbeatClock(limit_s(), self._tick_s)
        self._on_silence = on_silence
        self._is_silent = is_silent
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
        if self._is_silent():
            self._clock.heard()
        self._clock.tick(loop.time())
        if self._clock.silence_s >= self._limit_s():
            self._on_silence()
        else:
            self._handle = loop.call_later(self._tick_s, self._tick)
