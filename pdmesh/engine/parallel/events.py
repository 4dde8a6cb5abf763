"""Marks that hold on every rank: rank 0's are named by the commands sent to the ranks, and each rank has marks of its own.

    rank 0   sends command 7 (a step) ── layers 0 to 3 ── reach(4): place (7, 4) ── ... ── begins another: place (8, 0)
    rank 1   gets command 7 ── layer 0: mark (7, 1) ── ... ── mark (7, 4) ── ... ── end: mark (8, 0)

A copy of rank 1 behind a place waits for the first mark that lies at it or behind it, until that is made.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from pdmesh.engine.kv_cache.staging import Marks
from pdmesh.engine.kv_cache.streams import Mark, Streams

_KEPT = 512  # marks of a rank: some steps of prompts, or as many of decoding. For an older place the oldest one is used


class Place(NamedTuple):
    """A position behind `num_layers` layers of a command, counted from 1; 0: at its beginning, where all before it is over."""

    command: int
    num_layers: int


@dataclass(frozen=True)
class GroupEvent(Mark):
    own: Mark  # mark of rank 0's compute stream
    place: Place


class Commands:
    """Count the commands that rank 0 has sent. The engine thread counts, any thread reads."""

    def __init__(self) -> None:
        self.num_told = 0

    def place(self, num_layers: int = 0) -> Place:
        """Return the place behind so many layers of the last command; 0: behind all of it."""
        return Place(self.num_told, num_layers) if num_layers else Place(self.num_told + 1, 0)


class GroupEvents(Marks):
    """Marks of rank 0."""

    def __init__(self, streams: Streams, commands: Commands) -> None:
        self._commands = commands
        super().__init__(streams)

    def now(self) -> GroupEvent:
        return GroupEvent(super().now(), self._commands.place())

    def reached(self, mark: Mark) -> Future[None]:
        """Return a future that is done when rank 0 has passed the mark; another rank's copy waits for its own mark."""
        assert isinstance(mark, GroupEvent), "a mark of other streams"
        return super().reached(mark.own)

    def _within(self, num_layers: int) -> GroupEvent:
        return GroupEvent(super()._within(num_layers), self._commands.place(num_layers))


class Launched:
    """Marks of another rank: what it has launched of its commands. One thread launches, others read."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._changed = threading.Condition()
        self._command = 0
        self._marks = deque([(Place(1, 0), streams.mark())], maxlen=_KEPT)

    def begin(self) -> None:
        """Begin the next command."""
        self._command += 1

    def reach(self, num_layers: int) -> None:
        self._add(Place(self._command, num_layers))

    def end(self) -> None:
        self._add(Place(self._command + 1, 0))

    def behind(self, place: Place) -> Mark:
        """Return a mark behind `place`, waiting until it has been launched."""
        with self._changed:
            self._changed.wait_for(lambda: self._marks[-1][0] >= place)
            return self._marks[bisect_left(self._marks, place, key=lambda each: each[0])][1]

    def _add(self, place: Place) -> None:
        mark = self._streams.mark()
        with self._changed:
            self._marks.append((place, mark))
            self._changed.notify_all()
