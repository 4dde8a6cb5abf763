"""Readiness of the KV of prefill_only requests, reported to another thread while the step that computes it still runs.

    engine thread                                             reader (the event loop)
    begin(plan): layers = 0, then the snapshot  ───────────►  ready(): the snapshot, then layers
    the model: layers = 1, 2, ...; a byte into the pipe now and then ─► wakes it

Every report stays true: blocks of a prefill_only request keep what they hold until it is released. So a reader that sees a
snapshot of one step and the layers of a later one gets less than is known, or the truth. For a pool on a device it is true
behind a mark (staging.py): steps there are only launched, and not waited for.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from typing import Protocol

from pdmesh.engine.outputs import KVReady
from pdmesh.engine.scheduler.scheduler import SchedulerOutput

SIGNALS_PER_STEP = 3  # until the reader asks for more or fewer


class StepMarks(Protocol):
    """Record what of a step has been launched: see staging.py."""

    def begin(self) -> None: ...
    def reach(self, num_layers: int) -> None: ...


class LayerReadiness:
    """Count the layers of the running step whose KV is in the pool. The model calls, or writes to `address`, from its thread."""

    def __init__(self, num_layers: int) -> None:
        self.every = -(-num_layers // SIGNALS_PER_STEP)
        self.num_layers = num_layers
        self.fd = -1
        self.marks: StepMarks | None = None  # set where layers are only launched: they are read behind a mark
        self._done = array("i", [0])

    def notify_every(self, num_layers: int) -> None:
        """Set the interval from the next step on; from any thread. Each signal wakes a thread that may take a core from the
        step."""
        self.every = max(1, num_layers)

    @property
    def address(self) -> int:
        """Return the address of the int32 that counts."""
        return self._done.buffer_info()[0]

    @property
    def num_done(self) -> int:
        return self._done[0]

    def reset(self) -> None:
        self._done[0] = 0

    def layer_done(self, index: int) -> None:
        """Record that the KV of layer `index` is written, or will be behind the next mark."""
        if self.marks is not None:
            self.marks.reach(index + 1)
        self._done[0] = index + 1
        if self.fd >= 0 and ((index + 1) % self.every == 0 or index + 1 == self.num_layers):
            with contextlib.suppress(BlockingIOError):  # a full pipe wakes the reader as well
                os.write(self.fd, b"\0")


class KVEvents:
    """Report readiness. The engine thread calls `begin` and `end`; `ready` may be called on any."""

    def __init__(self, num_layers: int) -> None:
        self.signal = LayerReadiness(num_layers)
        self._running: tuple[KVReady, ...] = ()

    def begin(self, plan: SchedulerOutput) -> LayerReadiness | None:
        """Begin a step; return the signal for its model, or None when no reader needs its layers."""
        if plan.num_repeats:  # a prefill_only request has only one step that draws
            return self.begin_with(())
        return self.begin_with(
            tuple(
                KVReady(
                    request_id=piece.sequence.group.request.request_id,
                    block_ids=tuple(piece.sequence.block_ids),
                    num_tokens=piece.sequence.num_computed,
                    num_step_tokens=piece.sequence.num_computed + piece.num_tokens,
                    num_layers=0,
                )
                for piece in plan.pieces
                if piece.sequence.group.request.prefill_only
            )
        )

    def begin_with(self, running: tuple[KVReady, ...]) -> LayerReadiness | None:
        """Begin a step that computes KV of these requests, none of its layers yet; return as `begin` does."""
        self._running = ()
        self.signal.reset()
        if running and self.signal.marks is not None:
            self.signal.marks.begin()
        self._running = running
        return self.signal if running else None

    @property
    def is_announcing(self) -> bool:
        """Return whether a reader needs the layers of the running step."""
        return bool(self._running)

    def end(self) -> tuple[KVReady, ...]:
        """End the step; return what it computed, which is final in all layers."""
        ended, self._running = self._running, ()
        return tuple(
            KVReady(ready.request_id, ready.block_ids, ready.num_step_tokens, ready.num_step_tokens, self.signal.num_layers)
            for ready in ended
        )

    def ready(self) -> tuple[KVReady, ...]:
        """Return the part of the running step that is final by now."""
        running, num_layers = self._running, self.signal.num_done  # in this order
        return tuple(
            KVReady(ready.request_id, ready.block_ids, ready.num_tokens, ready.num_step_tokens, num_layers) for ready in running
        )
