"""Marks that hold on every rank: rank 0's are named by what the ranks were told, and each has marks of its own.

    rank 0   tells command 7 (a step) ── layers 0 to 3 ── reach(4): place (7, 4) ── ... ── begins another: place (8, 0)
    rank 1   hears command 7 ── layer 0: mark (7, 1) ── ... ── mark (7, 4) ── ... ── end: mark (8, 0)

Who copies on rank 1 behind a place waits for the first mark that lies at it or behind it, for as long as it has not been made.
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

_KEPT = 512  # marks of a rank: some steps of prompts, or as many of decoding. Of an older place the oldest one serves


class Place(NamedTuple):
    """Behind `num_layers` layers of a command, counted from 1; behind none: at its beginning, where all before it is over."""

    command: int
    num_layers: int


@dataclass(frozen=True)
class GroupEvent(Mark):
    own: Mark  # of rank 0's compute stream
    place: Place


class Commands:
    """How many commands rank 0 has told. The engine thread counts, any thread asks."""

    def __init__(self) -> None:
        self.num_told = 0

    def place(self, num_layers: int = 0) -> Place:
        """Behind so many layers of the last one; 0: behind all of it."""
        return Place(self.num_told, num_layers) if num_layers else Place(self.num_told + 1, 0)


class GroupEvents(Marks):
    """Rank 0's."""

    def __init__(self, streams: Streams, commands: Commands) -> None:
        self._commands = commands
        super().__init__(streams)

    def now(self) -> GroupEvent:
        return GroupEvent(super().now(), self._commands.place())

    def reached(self, mark: Mark) -> Future[None]:
        """By rank 0; another rank's copy waits for its own mark."""
        assert isinstance(mark, GroupEvent), "a mark of other streams"
        return super().reached(mark.own)

    def _within(self, num_layers: int) -> GroupEvent:
        return GroupEvent(super()._within(num_layers), self._commands.place(num_layers))


class Launched:
    """Another rank's: what it has launched of what it was told. One thread launches, others ask."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._changed = threading.Condition()
        self._command = 0
        self._marks = deque([(Place(1, 0), streams.mark())], maxlen=_KEPT)

    def begin(self) -> None:
        """The next command."""
        self._command += 1

    def reach(self, num_layers: int) -> None:
        self._add(Place(self._command, num_layers))

    def end(self) -> None:
        self._add(Place(self._command + 1, 0))

    def behind(self, place: Place) -> Mark:
        """Wait until it has been launched."""
        with self._changed:
            self._changed.wait_for(lambda: self._marks[-1][0] >= place)
            return self._marks[bisect_left(self._marks, place, key=lambda each: each[0])][1]

    def _add(self, place: Place) -> None:
        mark = self._streams.mark()
        with self._changed:
            self._marks.append((place, mark))
            self._changed.notify_all()
