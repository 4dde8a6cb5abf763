"""A thread that sends spans in batches, so that nobody waits for a collector, whatever it does.

put ─► queue, bounded ─► thread: gather for a moment, encode, send ─┬─ taken
            └─ full: dropped, counted                               ├─ refused: dropped, counted
                                                                    └─ no answer: the batch is tried again after a pause

A call costs both ends as much as dozens of spans. So it is made once a second, which one span alone does not have to wait for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from pdmesh.runtime.telemetry.spans import Span

MAX_QUEUED = 8192
BATCH = 128
"""Encoding them takes the interpreter for a few milliseconds, during which an event loop waits."""
MANY = 4 * BATCH
"""For these no second is waited."""
GATHER_S = 0.2
PERIOD_S = 1.0
CALL_TIMEOUT_S = 3.0
PAUSE_S = 2.0
_YIELD_S = 0.002

logger = logging.getLogger(__name__)


class Answer(Enum):
    """What became of a batch."""

    TAKEN = "taken"
    REFUSED = "refused"
    MISSING = "missing"


class Exporter(Protocol):
    """The way to a collector. Used by one thread, but for `close`."""

    def send(self, spans: Sequence[Span], timeout_s: float) -> tuple[Answer, str]:
        """Waits for the answer, for so long; with what the collector or the way to it says. Never raises."""

    def close(self) -> None:
        """A call under way ends."""


class Sender:
    """A queue and its thread, which begins with the first span."""

    def __init__(
        self, exporter: Exporter, *, max_queued: int = MAX_QUEUED, gather_s: float = GATHER_S, period_s: float = PERIOD_S
    ) -> None:
        """`gather_s`: behind the first span. `period_s`: from one call to the next."""
        self.num_sent = 0
        self.num_dropped = 0
        self._exporter = exporter
        self._max_queued = max_queued
        self._many = min(MANY, max_queued // 2)
        self._gather_s, self._period_s = gather_s, period_s
        self._queue: deque[Span] = deque()
        self._filled, self._hurry, self._closing = threading.Event(), threading.Event(), threading.Event()
        self._close_at = 0.0
        self._is_reachable = True
        self._thread: threading.Thread | None = None

    def put(self, span: Span) -> None:
        """On one thread."""
        if len(self._queue) >= self._max_queued or self._closing.is_set():
            self.num_dropped += 1
            return
        self._queue.append(span)
        if len(self._queue) >= self._many and not self._hurry.is_set():
            self._hurry.set()
        if not self._filled.is_set():
            self._filled.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
                self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Sends what is left for at most so many seconds; what is left then is dropped."""
        if self._closing.is_set():
            return
        self._close_at = time.monotonic() + timeout_s
        self._closing.set()
        self._filled.set()
        self._hurry.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
        self._exporter.close()
        self.num_dropped += len(self._queue)
        if self.num_dropped:
            logger.warning("%d spans of %d were never sent", self.num_dropped, self.num_dropped + self.num_sent)

    def _run(self) -> None:
        called_at = float("-inf")
        while self._filled.wait():
            self._hurry.wait(max(self._gather_s, called_at + self._period_s - time.monotonic()))
            self._hurry.clear()
            self._filled.clear()  # before the queue is looked at: what comes from now on sets it again
            is_last, left = self._closing.is_set(), len(self._queue)
            while left and not self._is_over():  # not what comes meanwhile: each would get a call of its own
                batch = [self._queue.popleft() for _ in range(min(BATCH, left))]
                left -= len(batch)
                self._send(batch)
                called_at = time.monotonic()
                time.sleep(_YIELD_S)
            if is_last:
                return

    def _is_over(self) -> bool:
        return self._closing.is_set() and time.monotonic() >= self._close_at

    def _send(self, batch: list[Span]) -> None:
        """Until it is taken or refused. Once it is time to end, a batch that meets nobody is dropped."""
        while True:
            answer, words = self._exporter.send(batch, self._patience_s())
            self._note(answer, words)
            if answer is Answer.TAKEN:
                self.num_sent += len(batch)
                return
            if answer is Answer.REFUSED or self._closing.wait(PAUSE_S):
                self.num_dropped += len(batch)
                return

    def _patience_s(self) -> float:
        if not self._closing.is_set():
            return CALL_TIMEOUT_S
        return max(0.01, min(CALL_TIMEOUT_S, self._close_at - time.monotonic()))

    def _note(self, answer: Answer, words: str) -> None:
        """One line when it begins to fail and one when it is over: a collector that is away must not fill the log."""
        is_reachable = answer is Answer.TAKEN
        if is_reachable != self._is_reachable:
            self._is_reachable = is_reachable
            if is_reachable:
                logger.info("the collector takes spans again; %d were dropped so far", self.num_dropped)
            else:
                logger.warning("the collector does not take spans: %s; requests go on, their traces may be lost", words)
