"""Where a modelled worker gets KV from before it computes a prompt: its own tiers, or another worker's pool.

    bring ─┬─ compute   what its pool lacks            ─────────────────────────► go
           ├─ restore   what its tiers hold            ─── after restore_s ─────► go
           └─ fetch     what the holder's pool holds   ─── after fetch_s ───────► go       as prefill_service/kv_pull.py decides
                        or its tiers behind that       ─── after both ──────────► go

The least predicted time is taken; a fetch only where it takes less than WORTH of what it saves. What comes is published in the
worker's prefix cache, where the prompt finds it. Each transfer has the whole bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pdmesh.simulator.events import EventQueue
from pdmesh.simulator.settings import MeshSettings
from pdmesh.simulator.workers.worker import ModelledWorker

WORTH = 0.8
"""The number of prefill_service/kv_pull.py, whose module needs what a simulator does not have."""


class Brought(NamedTuple):
    """Hold the tokens that came for one prompt."""

    num_fetched: int = 0
    num_restored: int = 0


NOTHING = Brought()
Go = Callable[[Brought], None]


class Way(NamedTuple):
    """Hold one way to have a prompt: after `move_s` its first `num_blocks` prefix blocks are in the pool, and it is computed
    within `total_s` from now."""

    total_s: float
    move_s: float
    num_blocks: int


def way_of(worker: ModelledWorker, num_tokens: int, num_blocks: int, move_s: float) -> Way:
    """Return the way by which the first `num_blocks` prefix blocks of a prompt come in `move_s`. Other prompts are left out of
    the computation: they come first either way."""
    spec = worker.spec
    first = min(num_blocks * spec.prefix_tokens, num_tokens - 1)
    return Way(move_s + spec.speed.prefill_s(first, num_tokens, chunk=spec.max_num_batched_tokens), move_s, num_blocks)


class KvSources:
    """Bring KV to workers."""

    def __init__(self, events: EventQueue, settings: MeshSettings) -> None:
        self._events, self._fetching, self._tiers = events, settings.fetching, settings.tiers

    def bring(
        self, worker: ModelledWorker, hashes: Sequence[int], num_tokens: int, holder: ModelledWorker | None, go: Go
    ) -> None:
        """Call `go` when the worker is to take up a prompt of `num_tokens`: now, or once what it lacks has come. `holder`: the
        worker that may have more of it; None: none."""
        spec = worker.spec
        usable = hashes[: (num_tokens - 1) // spec.prefix_tokens] if spec.prefix_tokens else ()
        if not usable or (holder is None and self._tiers is None):
            go(NOTHING)
            return
        here = worker.room.num_leading(usable)
        computed = way_of(worker, num_tokens, here, 0.0)
        restored = self._restored(worker, usable, num_tokens, here)
        fetched = None if holder is None else self._fetched(worker, usable, num_tokens, here, holder)
        if fetched is not None and fetched.move_s >= WORTH * (computed.total_s - fetched.total_s + fetched.move_s):
            fetched = None
        if fetched is not None and holder is not None and fetched.total_s < (restored or computed).total_s:
            self._fetch(worker, usable[: fetched.num_blocks], fetched.move_s, holder, go)
        elif restored is not None and restored.total_s < computed.total_s:
            self._events.after(restored.move_s, self._restore, worker, usable[: restored.num_blocks], go)
        else:
            go(NOTHING)

    def fetched_s(self, worker: ModelledWorker, num_fetched: int, num_tokens: int) -> float:
        """Return how long the worker takes to fetch the first tokens of a prompt and to compute the rest."""
        spec = worker.spec
        fetch_s = 0.0 if self._fetching is None else num_fetched * spec.kv_bytes_per_token / self._fetching.bytes_per_s
        first = min(num_fetched, num_tokens - 1)
        return fetch_s + spec.speed.prefill_s(first, num_tokens, chunk=spec.max_num_batched_tokens)

    def _restored(self, worker: ModelledWorker, hashes: Sequence[int], num_tokens: int, here: int) -> Way | None:
        if self._tiers is None:
            return None
        held = worker.room.num_leading(hashes, with_tiers=True)
        num_missing = worker.room.num_missing(hashes[here:held])
        if not num_missing:
            return None
        return way_of(worker, num_tokens, held, self._tiers.restore_s(_bytes(worker, num_missing)))

    def _fetched(
        self, worker: ModelledWorker, hashes: Sequence[int], num_tokens: int, here: int, holder: ModelledWorker
    ) -> Way | None:
        if self._fetching is None or holder.is_dead or holder.num_sends >= self._fetching.max_sends:
            return None
        held = holder.room.num_leading(hashes)
        found = [way_of(worker, num_tokens, held, self._fetching.fetch_s(_bytes(worker, held - here)))] if held > here else []
        in_tiers = held if self._tiers is None else holder.room.num_leading(hashes, with_tiers=True)
        if self._tiers is not None and in_tiers > max(held, here):
            num_missing = holder.room.num_missing(hashes[max(held, here) : in_tiers])
            moves_s = self._fetching.fetch_s(_bytes(worker, in_tiers - here)) + self._tiers.restore_s(_bytes(worker, num_missing))
            found.append(way_of(worker, num_tokens, in_tiers, moves_s))
        return min(found, default=None)

    def _fetch(self, worker: ModelledWorker, hashes: Sequence[int], move_s: float, holder: ModelledWorker, go: Go) -> None:
        """Fetch; a prompt that wants the same meanwhile waits for it."""
        names = tuple(hashes)
        waiting = worker.fetches.get(names)
        if waiting is not None:
            waiting.append(lambda: go(NOTHING))
            return
        worker.fetches[names] = []
        holder.num_sends += 1
        self._events.after(move_s, self._came, worker, names, holder, go)

    def _came(self, worker: ModelledWorker, names: tuple[int, ...], holder: ModelledWorker, go: Go) -> None:
        holder.num_sends -= 1
        if self._tiers is not None and not holder.is_dead and holder.room.num_leading(names) < len(names):
            holder.take_in(names)  # it has restored them
        num_taken = 0 if holder.is_dead else worker.take_in(names)
        go(Brought(num_fetched=num_taken * worker.spec.prefix_tokens))
        for goes_on in worker.fetches.pop(names):
            goes_on()

    def _restore(self, worker: ModelledWorker, names: Sequence[int], go: Go) -> None:
        go(Brought(num_restored=worker.take_in(names) * worker.spec.prefix_tokens))


def _bytes(worker: ModelledWorker, num_blocks: int) -> int:
    return num_blocks * worker.spec.prefix_tokens * worker.spec.kv_bytes_per_token
