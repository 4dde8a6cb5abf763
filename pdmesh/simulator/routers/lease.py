"""Events between one simulated router and its workers, from Submit to the last token.

It mirrors `router/lifecycle/prefill_stage.py` and `router/lifecycle/decode_stage.py`. A placement that is over ignores its late
events.
"""

import zlib
from typing import Protocol

from pdmesh.simulator.events import EventQueue
from pdmesh.simulator.request import Stay, Trail
from pdmesh.simulator.routers.routing import EPOCH, SimulatedRouting
from pdmesh.simulator.settings import MeshSettings
from pdmesh.simulator.workers.kv_room import Sequence
from pdmesh.simulator.workers.kv_sources import Brought, KvSources
from pdmesh.simulator.workers.worker import ModelledWorker
from router.fleet.worker import Dispatched
from router.routing.filters import blocks_for
from router.routing.worker_snapshot import WorkerKey

MAX_HOLDERS = 256
"""The number of router/lifecycle/prefill_stage.py."""


class Floor(Protocol):
    """Find workers."""

    def worker(self, name: str) -> ModelledWorker | None:
        """Return the worker of that name, if it lives."""

    def takes_work(self, name: str) -> bool:
        """Return whether it lives and does not drain."""


class Owner(Protocol):
    """Receive the outcome of placements."""

    def placed(self, stay: Stay) -> None:
        """Note that the worker has reserved."""

    def turned_down(self, stay: Stay, refused: frozenset[WorkerKey]) -> None:
        """Note that the worker rejected it; `refused` have rejected it so far."""

    def interrupted(self, stay: Stay) -> None:
        """Note that its decode worker is lost."""

    def finished(self, stay: Stay) -> None:
        """Note that its last token has arrived."""


class SimulatedLease:
    """Run the placements of one router's requests."""

    def __init__(self, events: EventQueue, settings: MeshSettings, outlook: SimulatedRouting, floor: Floor, owner: Owner) -> None:
        self._events, self._settings, self._outlook, self._floor, self._owner = events, settings, outlook, floor, owner
        self._token_s = settings.call_s if settings.token_s is None else settings.token_s
        self._stays: dict[Stay, None] = {}
        self._sources = KvSources(events, settings)

    def begin(self, stay: Stay) -> None:
        """Send Submit."""
        self._stays[stay] = None
        now = self._events.now
        self._outlook.dispatched(stay.decode, stay.sent, now)
        if stay.prefill is not None and stay.sent_prompt is not None:
            self._outlook.dispatched(stay.prefill, stay.sent_prompt, now)
        self._events.after(self._settings.call_s, self._at_decode, stay)

    def lost(self, name: str) -> None:
        """Handle the loss of a worker."""
        for stay in list(self._stays):
            if stay.decode == name and stay.owned is not None and not stay.owned.num_left:
                continue  # its last token is on its way
            if stay.decode == name:
                self._interrupt(stay)
            elif stay.prefill == name and not stay.is_running and stay.prompt is not None:
                self._not_computed(stay, stay.prompt)

    # Submit

    def _at_decode(self, stay: Stay) -> None:
        worker = self._floor.worker(stay.decode)
        if worker is None or not self._floor.takes_work(stay.decode):
            self._events.after(self._settings.call_s, self._answered, stay, False)
        elif stay.prefill is not None:
            worker.call(lambda at_s: self._reserve(stay, worker, at_s))
        else:
            request, began_s = stay.request, self._events.now

            def brought_here(brought: Brought) -> None:
                stay.brought, stay.brought_s = brought, self._events.now - began_s
                worker.call(lambda at_s: self._reserve(stay, worker, at_s))

            self._sources.bring(worker, request.arrival.hashes, request.num_tokens, None, brought_here)

    def _reserve(self, stay: Stay, worker: ModelledWorker, at_s: float) -> None:
        if stay.is_over:
            return
        request = stay.request
        num_left = request.num_output - request.num_emitted
        goal_s = request.tpot_goal_s or 0.0
        owned = Sequence(self, stay, request.num_tokens, num_left, goal_s=goal_s, hashes=request.arrival.hashes)
        is_taken = worker.reserve(owned)
        if is_taken:
            stay.owned, stay.entered_at = owned, at_s
            if stay.prefill is None:
                worker.run_local(owned)
        self._events.at(at_s + self._settings.call_s, self._answered, stay, is_taken)

    def _answered(self, stay: Stay, is_taken: bool) -> None:
        if stay.is_over:
            return
        if not is_taken:
            self._end(stay)
            self._outlook.done(stay.decode, stay.sent)
            self._prompt_is_done(stay)
            self._owner.turned_down(stay, stay.refused | {(stay.decode, EPOCH)})
            return
        stay.sent.arrived_at = stay.placed_at = self._events.now
        self._owner.placed(stay)
        if stay.prefill is None:
            self._outlook.sent_prompt(stay.decode, stay.request, self._events.now)
        else:
            self._events.after(self._settings.call_s, self._at_prefill, stay)

    # Prefill

    def _at_prefill(self, stay: Stay) -> None:
        if stay.is_over or stay.prefill is None:
            return
        request = stay.request
        prompt = stay.prompt = Sequence(self, stay, request.num_tokens, 1, hashes=request.arrival.hashes, prefill_only=True)
        worker = self._floor.worker(stay.prefill)
        if worker is None or not self._floor.takes_work(stay.prefill):
            self._events.after(self._settings.call_s, self._not_computed, stay, prompt)
        else:
            holder = self._holder(stay, worker) if self._settings.fetching is not None else None
            began_s = self._events.now

            def brought_there(brought: Brought) -> None:
                if not stay.is_over and stay.prompt is prompt:
                    stay.brought, stay.brought_s = brought, self._events.now - began_s
                    worker.call(lambda at_s: self._compute(stay, prompt, worker, at_s))

            self._sources.bring(worker, request.arrival.hashes, request.num_tokens, holder, brought_there)

    def _holder(self, stay: Stay, worker: ModelledWorker) -> ModelledWorker | None:
        """Return the worker that is asked for KV, as router/lifecycle/kv_holder.py names it: the one that has most in its pool,
        or one that restores more first where that is quicker."""
        in_pool, num_in_pool = self._pool_holder(stay, worker)
        key, now = (worker.name, EPOCH), self._events.now

        def is_able(other: WorkerKey) -> bool:
            return other != key and other not in stay.tried and self._floor.worker(other[0]) is not None

        found = self._outlook.peer_tiers(stay.request, key, is_able, num_in_pool, now)
        if found is None:
            return in_pool
        num_tokens, plain_s = stay.request.num_tokens, self._sources.fetched_s(worker, num_in_pool, stay.request.num_tokens)
        restored_s = found.restore_s + self._sources.fetched_s(worker, found.num_tokens, num_tokens)
        return self._floor.worker(found.key[0]) if in_pool is None or restored_s < plain_s else in_pool

    def _pool_holder(self, stay: Stay, worker: ModelledWorker) -> tuple[ModelledWorker | None, int]:
        """Return the decode worker, which has its part pinned, or another one that has more by the index, with its tokens; equals
        take turns."""
        known = self._outlook.holders(stay.request, self._events.now)
        at_decode = 0 if stay.owned is None else stay.owned.num_cached
        found = [(at_decode, 0, stay.decode)]
        if len(known) <= MAX_HOLDERS:
            most = stay.request.num_tokens - 1
            others = [(key, tokens) for key, tokens in known.items() if tokens > at_decode and key[0] != stay.decode]
            found += [(min(tokens, most), _turn_of(stay.request.number, key[0]), key[0]) for key, tokens in others]
        here = known.get((worker.name, EPOCH), 0)
        for num_tokens, _, name in sorted(found, reverse=True):
            if num_tokens > here and name != worker.name and (name, EPOCH) not in stay.tried:
                holder = self._floor.worker(name)
                if holder is not None:
                    return holder, num_tokens
        return None, 0

    def _compute(self, stay: Stay, prompt: Sequence, worker: ModelledWorker, at_s: float) -> None:
        stay.entered_at = at_s
        if not worker.prefill(prompt):
            self._events.at(at_s + self._settings.call_s, self._not_computed, stay, prompt)

    def _not_computed(self, stay: Stay, prompt: Sequence) -> None:
        """Try another prefill worker for the same reservation, or the decode worker itself, after telling it."""
        if stay.is_over or stay.prompt is not prompt or stay.prefill is None:
            return
        self._prompt_is_done(stay)
        request, tried = stay.request, stay.tried | {(stay.prefill, EPOCH)}
        view = self._outlook.choose_prefill(request, stay.decode, tried, self._events.now)
        stay.tried, stay.prompt, stay.prefill = tried, None, None if view is None else view.address
        if view is None:
            request.is_local = True
            self._events.after(self._settings.call_s, self._go_local, stay)
            return
        cached = self._outlook.cached_tokens(request, view.key, self._events.now)
        stay.sent_prompt = Dispatched(1, blocks_for(request.num_tokens, view), max(1, request.num_tokens - cached))
        self._outlook.dispatched(view.address, stay.sent_prompt, self._events.now)
        self._events.after(3 * self._settings.call_s, self._at_prefill, stay)

    def _go_local(self, stay: Stay) -> None:
        worker, owned = self._floor.worker(stay.decode), stay.owned
        if worker is not None and owned is not None and not stay.is_over:
            worker.call(lambda _: worker.run_local(owned))

    # Tokens: workers' notifications

    def on_prompt(self, sequence: Sequence, at_s: float) -> None:
        """Handle a computed prompt; see `Watcher`."""
        stay = _stay_of(sequence)
        _note_cached(stay, sequence.num_cached)
        if sequence.prefill_only:
            self._computed_elsewhere(stay, sequence, at_s)
        elif not stay.is_over:
            stay.computed_at, stay.compute_s = at_s, sequence.compute_s
            self._events.at(at_s + self._token_s, self._first, stay)
            if not sequence.num_left:
                self._events.at(at_s + self._token_s, self._finish, stay)

    def on_end(self, sequence: Sequence, at_s: float) -> None:
        """Handle the end of a sequence; see `Watcher`."""
        self._events.at(at_s + self._token_s, self._finish, _stay_of(sequence))

    def _computed_elsewhere(self, stay: Stay, prompt: Sequence, at_s: float) -> None:
        request = stay.request
        if stay.is_over or stay.prompt is not prompt or stay.owned is None:
            self._events.at(at_s, self._let_go, prompt)
            return
        stay.computed_at, stay.compute_s = at_s, prompt.compute_s
        self._events.at(at_s + self._token_s, self._first, stay)
        if request.num_output - request.num_emitted == 1:
            self._events.at(at_s + self._token_s, self._finish, stay)
            return
        self._events.at(at_s + self._exposed_s(stay.owned, prompt, stay), self._commit, stay, prompt)

    def _exposed_s(self, owned: Sequence, prompt: Sequence, stay: Stay) -> float:
        """Return the delay added by transferring the KV that the decode worker lacks."""
        worker = self._floor.worker(stay.prefill or "")
        if worker is None:
            return 0.0
        spec = worker.spec
        compute_s = spec.speed.prefill_s(prompt.num_cached, prompt.num_tokens, chunk=spec.max_num_batched_tokens)
        return self._settings.handoff.exposed_s((owned.num_tokens - owned.num_cached) * spec.kv_bytes_per_token, compute_s)

    def _commit(self, stay: Stay, prompt: Sequence) -> None:
        self._let_go(prompt)
        worker, owned = self._floor.worker(stay.decode), stay.owned
        if stay.is_over or stay.prompt is not prompt or worker is None or owned is None:
            return
        stay.is_running = True
        worker.call(lambda at_s: self._start(stay, worker, owned, at_s))
        if stay.prefill is not None:
            self._outlook.sent_prompt(stay.prefill, stay.request, self._events.now)
        self._outlook.sent_prompt(stay.decode, stay.request, self._events.now)

    def _start(self, stay: Stay, worker: ModelledWorker, owned: Sequence, at_s: float) -> None:
        stay.after_s = at_s - stay.computed_at
        worker.start(owned, owned.num_left - 1)

    def _let_go(self, sequence: Sequence) -> None:
        """Release it on its worker."""
        worker = self._floor.worker(sequence.where)
        if worker is not None:
            worker.call(lambda _: worker.let_go(sequence))

    # Tokens: arrival at the router

    def _first(self, stay: Stay) -> None:
        self._prompt_is_done(stay)
        stay.has_first = True
        if stay.request.first_at is None:
            stay.request.first_at = self._events.now

    def _finish(self, stay: Stay) -> None:
        if stay.is_over:
            return
        now = self._events.now
        stay.request.last_at = now
        stay.request.trail = Trail(stay.decided_at, stay.placed_at, stay.computed_at, stay.compute_s, stay.after_s)
        self._end(stay)
        self._outlook.released(stay.decode, stay.sent, now)
        # a single token: the hand-off is cancelled
        if stay.prompt is not None and not stay.is_running and stay.owned is not None:
            self._let_go(stay.prompt)
            self._let_go(stay.owned)
        self._forget(stay)
        self._owner.finished(stay)

    def _interrupt(self, stay: Stay) -> None:
        """Interrupt: the client keeps the tokens drawn so far."""
        self._end(stay)
        self._prompt_is_done(stay)
        request, owned = stay.request, stay.owned
        if owned is not None:
            num_drawn = request.num_output - owned.num_left
            num_drawn = max(num_drawn, request.num_emitted + stay.has_first)
            request.num_emitted = min(request.num_output - 1, max(request.num_emitted, num_drawn))
        self._forget(stay)
        self._owner.interrupted(stay)

    def _prompt_is_done(self, stay: Stay) -> None:
        if stay.prefill is not None:
            self._outlook.done(stay.prefill, stay.sent_prompt)

    def _end(self, stay: Stay) -> None:
        stay.is_over = True
        self._stays.pop(stay, None)

    def _forget(self, stay: Stay) -> None:
        """Drop the placement from its sequences, so that memory is freed without cycle collection."""
        stay.owned = stay.prompt = None


def _turn_of(number: int, name: str) -> int:
    return zlib.crc32(f"{number} {name}".encode())


def _note_cached(stay: Stay, num_cached: int) -> None:
    """Record where its prompt's KV came from. What was evicted again before the prompt's turn had to be computed."""
    request = stay.request
    request.num_cached = num_cached
    request.num_fetched = min(num_cached, stay.brought.num_fetched)
    request.num_restored = min(num_cached - request.num_fetched, stay.brought.num_restored)


def _stay_of(sequence: Sequence) -> Stay:
    assert isinstance(sequence.tag, Stay)
    return sequence.tag
