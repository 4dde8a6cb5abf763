"""One simulated router's view of the fleet, as old as reports are, and the real policy's answers to it."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from kvtransfer.layout import EVERYWHERE, Layout, Transports
from pdmesh.planning.latency_model import NO_DRAFTS
from pdmesh.simulator.request import Request
from pdmesh.simulator.settings import MeshSettings
from pdmesh.simulator.workers.kv_room import CacheChanges
from pdmesh.simulator.workers.spec import WorkerSpec
from pdmesh.simulator.workers.worker import Figures
from router.fleet.worker import Dispatched, counted
from router.flow_control.slo_admission import Forecast
from router.kv_index.block_map import BlockMap, WorkerSlots
from router.kv_index.index import IN_FLIGHT_S, NO_TOKENS, Part, PrefixMemory, PromptTokens, together
from router.routing.filters import NoPlacement, PeerTiers, Placement, RoutingRequest, free_elsewhere, peer_tiers
from router.routing.fleet_snapshot import FleetSnapshot
from router.routing.learned import OutputLengths, Overheads
from router.routing.policy import make_policy
from router.routing.worker_reports import NOTHING, tightest
from router.routing.worker_snapshot import WorkerKey, WorkerSnapshot

# The prefix index of one router: what workers report, and what was just sent. On the real index.


NOTHING_HELD = PromptTokens(NO_TOKENS, NO_TOKENS)


class Prefixes:
    """Index prefixes. `max_blocks` bounds the pairs of block and worker, as `--prefix-index-blocks` does; `prefix_tokens` of each
    block."""

    def __init__(self, max_blocks: int, prefix_tokens: int) -> None:
        slots = WorkerSlots()
        self._told, self._tiers = BlockMap(max_blocks, slots), BlockMap(max_blocks, slots)
        self._sent = PrefixMemory(max_blocks, IN_FLIGHT_S)
        self._prefix_tokens = prefix_tokens

    def look_up(self, hashes: Sequence[int], now: float) -> PromptTokens:
        """Return what workers are thought to have of the prompt. Use it at once."""
        if not hashes or not self._prefix_tokens:
            return NOTHING_HELD
        maps = (self._told, *self._sent.maps(now))
        parts = [Part(blocks, levels, self._prefix_tokens) for blocks in maps if (levels := blocks.levels(hashes))]
        return PromptTokens(together(parts) if parts else NO_TOKENS, self._restorable(hashes))

    def _restorable(self, hashes: Sequence[int]) -> Mapping[WorkerKey, int]:
        levels = self._told.levels_of_either(self._tiers, hashes) if len(self._tiers) else []
        return together([Part(self._told, levels, self._prefix_tokens)]) if levels else NO_TOKENS

    def sent(self, worker: WorkerKey, hashes: Sequence[int], now: float) -> None:
        """Note blocks that it computes or receives, and will soon report."""
        if hashes and self._prefix_tokens:
            self._sent.record(worker, hashes, now, keep=False)

    def tell(self, worker: WorkerKey, changes: CacheChanges) -> None:
        """Note what its cache and its tiers have stored and evicted."""
        told = ((self._told, changes.stored, changes.evicted), (self._tiers, changes.tier_stored, changes.tier_evicted))
        for blocks, stored, evicted in told:
            if stored:
                blocks.add(worker, stored)
            if evicted:
                blocks.remove(worker, evicted)
        if changes.evicted:
            self._sent.evicted(worker, changes.evicted)

    def forget(self, worker: WorkerKey) -> None:
        """Forget a worker."""
        self._told.forget(worker)
        self._tiers.forget(worker)
        self._sent.forget(worker)


# One router's view of one worker: its latest report, and what was sent there since. As `router/fleet/worker.py`.


MODEL = "simulated"
IDENTITY: tuple[object, ...] = (MODEL,)
TRANSPORTS = Transports.of({"simulated": EVERYWHERE})
EPOCH = 1


class Ledger:
    """Hold one worker's state. `figures` None: the router has not heard of it, or no longer does."""

    def __init__(self, name: str, spec: WorkerSpec, settings: MeshSettings | None = None) -> None:
        self.name, self.spec = name, spec
        fetching, tiers = (None, None) if settings is None else (settings.fetching, settings.tiers)
        self._fetch_token_s = 0.0 if fetching is None else spec.kv_bytes_per_token / fetching.bytes_per_s
        self._restore_token_s = 0.0 if tiers is None else spec.kv_bytes_per_token / tiers.bytes_per_s
        self.key: WorkerKey = (name, EPOCH)
        self.figures: Figures | None = None
        self._layout = _layout(spec.block_size)
        self._dispatched: list[Dispatched] = []

    def dispatched(self, sent: Dispatched, now: float) -> None:
        """Count what was just sent, until the reports contain it or `done`."""
        sent.sent_at = now
        self._dispatched.append(sent)

    def released(self, sent: Dispatched, now: float) -> None:
        """Note the end of what was sent: a report may still contain it."""
        self.dispatched(sent.ended(now), now)

    def done(self, sent: Dispatched) -> bool:
        """Remove finished work; False: it was removed before."""
        if sent not in self._dispatched:
            return False
        self._dispatched.remove(sent)
        return True

    def report(self, figures: Figures) -> None:
        """Store a report."""
        self.figures = figures
        if self._dispatched:
            self._dispatched = [sent for sent in self._dispatched if not sent.is_contained(figures.taken_at)]

    @property
    def is_settled(self) -> bool:
        """Return whether the report contains everything that was sent."""
        return not self._dispatched

    def view(self) -> WorkerSnapshot | None:
        """Return the policy's snapshot; None while it accepts no work."""
        figures, spec = self.figures, self.spec
        if figures is None or figures.draining:
            return None
        sent, drafts = counted(self._dispatched) if self._dispatched else NOTHING, figures.drafts or NO_DRAFTS
        num_seqs = figures.num_running + figures.num_waiting + figures.num_reserved + figures.num_held
        return WorkerSnapshot(
            worker_id=self.name,
            address=self.name,
            epoch=EPOCH,
            model=MODEL,
            prefill=figures.prefill,
            decode=figures.decode,
            identity=IDENTITY,
            layout=self._layout,
            transports=TRANSPORTS,
            host_id=spec.host or self.name,
            block_size=spec.block_size,
            max_context=spec.max_context,
            max_num_seqs=spec.max_num_seqs,
            num_total_blocks=figures.num_total_blocks,
            num_free_blocks=figures.num_free_blocks,
            num_seqs=num_seqs,
            num_waiting_tokens=figures.num_waiting_tokens,
            num_prefilling=figures.num_prefilling,
            num_oldest_tokens=figures.num_oldest_tokens,
            num_decoding=figures.num_decoding,
            decode_context=figures.decode_context,
            num_starting=figures.num_reserved + figures.num_prefilling,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            latency=spec.speed,
            figures_at=figures.taken_at,
            pace_s=tightest(figures.pace_s, sent.pace_s) if spec.keeps_pace else 0.0,
            slack_s=figures.slack_s,
            tokens_per_row=drafts.tokens_per_row,
            computed_per_row=drafts.computed_per_row,
            dispatched_seqs=max(sent.seqs, -num_seqs),
            dispatched_blocks=max(sent.blocks, figures.num_free_blocks - figures.num_total_blocks),
            dispatched_tokens=sent.tokens,
            dispatched_decodes=sent.decodes,
            dispatched_context=sent.context,
            dispatched_longest=sent.longest,
            dispatched_since=sent.since,
            dispatched_latest=sent.latest,
            dispatched_latest_at=sent.latest_at,
            keeps_pace=spec.keeps_pace,
            fetch_token_s=self._fetch_token_s,
            restore_token_s=self._restore_token_s,
        )


@lru_cache(maxsize=64)
def _layout(block_size: int) -> Layout:
    """Return equal layouts as one object: comparing them is then free."""
    return Layout(block_size, "float32")


IDLE_FOR_S, MAX_IDLE, CONTEXT_STEP = 1.0, 256, 256
"""The values of router/flow_control/ttft_predictor.py."""
NO_WORKERS: frozenset[WorkerKey] = frozenset()


class Decided(NamedTuple):
    """Hold the policy's input and its answer."""

    demand: RoutingRequest
    choice: Placement | NoPlacement


class SimulatedRouting:
    """Hold the ledgers by worker, and what follows from them."""

    def __init__(self, settings: MeshSettings, prefix_tokens: int) -> None:
        self.overheads, self.output_lengths = Overheads(), OutputLengths()
        self.prefixes = Prefixes(settings.prefix_index_blocks, prefix_tokens)
        self.policy = make_policy(settings.policy, self.overheads, settings.local_prefill_tokens)
        self.max_context = 0
        self._settings = settings
        self._ledgers: dict[str, Ledger] = {}
        self._roster = FleetSnapshot()
        self._outdated: dict[str, None] = {}
        self._latest: tuple[Request, float, Decided] | None = None
        self._idle: dict[tuple[int, int], float | None] = {}
        self._idle_until = 0.0

    # Updates

    def meet(self, name: str, spec: WorkerSpec) -> None:
        """Expect reports of a worker."""
        self._ledgers[name] = Ledger(name, spec, self._settings)
        self.max_context = max(self.max_context, spec.largest)

    def lose(self, name: str) -> None:
        """Forget a worker."""
        ledger = self._ledgers.pop(name, None)
        if ledger is not None:
            self.prefixes.forget(ledger.key)
            self._changed(name)

    def report(self, name: str, figures: Figures) -> None:
        """Store a report."""
        ledger = self._ledgers.get(name)
        if ledger is not None:
            ledger.report(figures)
            self._changed(name)

    def dispatched(self, name: str, sent: Dispatched, now: float) -> None:
        """Count what is being sent there."""
        ledger = self._ledgers.get(name)
        if ledger is not None:
            ledger.dispatched(sent, now)
            self._changed(name)

    def done(self, name: str, sent: Dispatched | None) -> None:
        """Remove finished work; idempotent."""
        ledger = self._ledgers.get(name)
        if ledger is not None and sent is not None and ledger.done(sent):
            self._changed(name)

    def released(self, name: str, sent: Dispatched, now: float) -> None:
        """Note the end of work there; a report may still contain it."""
        ledger = self._ledgers.get(name)
        if ledger is not None:
            ledger.released(sent, now)
            self._changed(name)

    def told(self, name: str, changes: CacheChanges) -> None:
        """Note what its prefix cache and its tiers have stored and evicted."""
        ledger = self._ledgers.get(name)
        if ledger is not None and any(changes):
            self.prefixes.tell(ledger.key, changes)
            self._latest = None

    def sent_prompt(self, name: str, request: Request, now: float) -> None:
        """Note that its prompt's blocks are, or will soon be, there."""
        ledger = self._ledgers.get(name)
        if ledger is not None and request.arrival.hashes:
            self.prefixes.sent(ledger.key, request.arrival.hashes, now)
            self._latest = None

    # Queries

    def is_settled(self, name: str) -> bool:
        """Return whether its reports contain everything that was sent there."""
        ledger = self._ledgers.get(name)
        return ledger is None or ledger.is_settled

    @property
    def roster(self) -> FleetSnapshot:
        """Return the fleet snapshot, updated on demand."""
        if self._outdated:
            for name in self._outdated:
                ledger = self._ledgers.get(name)
                self._roster.put(name, None if ledger is None else ledger.view())
            self._outdated.clear()
        return self._roster

    def choose(self, request: Request, now: float, refused: frozenset[WorkerKey] = NO_WORKERS) -> Decided:
        """Return the policy's answer, without the `refused` decode workers. Asked twice about one request in one moment (its
        forecast, then its placement) it answers once."""
        latest = self._latest
        if latest is not None and latest[0] is request and latest[1] == now and not refused:
            return latest[2]
        demand = self.demand(request, now, excluded_decode=refused)
        decided = Decided(demand, self.policy.choose(self.roster, demand, now))
        self._latest = None if refused else (request, now, decided)
        return decided

    def choose_prefill(self, request: Request, decode: str, tried: frozenset[WorkerKey], now: float) -> WorkerSnapshot | None:
        """Return another worker to compute the prompt of a request that `decode` has reserved; None without one."""
        engine = self.roster.get(decode)
        if engine is None:
            return None
        choice = self.policy.choose_prefill(self.roster, engine.view, self.demand(request, now, excluded_prefill=tried), now)
        return None if choice is None else choice.prefill

    def demand(
        self,
        request: Request,
        now: float,
        *,
        excluded_decode: frozenset[WorkerKey] = NO_WORKERS,
        excluded_prefill: frozenset[WorkerKey] = NO_WORKERS,
    ) -> RoutingRequest:
        """Return the routing request, as router/routing/routing_request.py builds it."""
        max_tokens, objective = self.max_tokens(request), self._settings.objective
        expected = self.output_lengths.expected(MODEL, request.arrival.tenant, max_tokens)
        held = self.prefixes.look_up(request.arrival.hashes, now)
        return RoutingRequest(
            model=MODEL,
            num_tokens=request.num_tokens,
            max_total_tokens=request.num_input + max_tokens,
            cached_tokens=held.cached,
            excluded_decode=excluded_decode,
            excluded_prefill=excluded_prefill,
            expected_tokens=max(1.0, expected - request.num_emitted),
            ttft_goal_s=request.ttft_goal_s,
            tpot_goal_s=request.tpot_goal_s,
            running_tpot_goal_s=None if objective is None else objective.tpot_ms / 1e3,
            restorable_tokens=held.restorable,
        )

    def max_tokens(self, request: Request) -> int:
        """Return the most tokens that its client asks for."""
        most = self.max_context - request.num_input
        asked = self._settings.max_tokens
        return max(1, most if asked is None else min(most, max(asked, request.num_output)))

    def forecast(self, request: Request, now: float) -> Forecast | None:
        """Return admission's forecast, as router/flow_control/ttft_predictor.py computes it."""
        asked, choice = self.choose(request, now)
        if isinstance(choice, NoPlacement):
            return None
        best = choice.chosen
        if best is None or best.prediction is None:
            return None
        predicted, goal_s = best.prediction, request.tpot_goal_s
        slow = goal_s is not None and predicted.tpot_s > goal_s
        idle_tpot_s = self._idle_tpot_s(request.num_tokens, now) if slow else None
        elsewhere = free_elsewhere(choice, asked)
        return Forecast(predicted.ttft_s, predicted.tpot_s, best.has_room, predicted.ahead_s, idle_tpot_s, elsewhere)

    def cached_tokens(self, request: Request, worker: WorkerKey, now: float) -> int:
        """Return its prompt's tokens that `worker` is thought to have cached."""
        return self.prefixes.look_up(request.arrival.hashes, now).cached.get(worker, 0)

    def holders(self, request: Request, now: float) -> Mapping[WorkerKey, int]:
        """Return the workers that are thought to have some of its prompt cached, with the number of tokens."""
        return self.prefixes.look_up(request.arrival.hashes, now).cached

    def peer_tiers(
        self, request: Request, worker: WorkerKey, able: Callable[[WorkerKey], bool], least: int, now: float
    ) -> PeerTiers | None:
        """Return the worker with most of its prompt in pool and tiers, of those that are `able`: more than `least` tokens, and
        than `worker` has itself."""
        held = self.prefixes.look_up(request.arrival.hashes, now)
        if not held.restorable:
            return None
        least = max(least, held.cached.get(worker, 0), held.restorable.get(worker, 0))
        demand = RoutingRequest(MODEL, request.num_tokens, cached_tokens=held.cached, restorable_tokens=held.restorable)

        def view_of(key: WorkerKey) -> WorkerSnapshot | None:
            estimate = self.roster.get(key[0]) if able(key) else None
            return None if estimate is None else estimate.view

        return peer_tiers(demand, view_of, least, request.num_tokens - 1)

    def _idle_tpot_s(self, context: int, now: float) -> float | None:
        """Return the TPOT of the fastest idle worker; cached for a while, as it scans all."""
        if now >= self._idle_until or len(self._idle) > MAX_IDLE:
            self._idle, self._idle_until = {}, now + IDLE_FOR_S
        key = (1, context // CONTEXT_STEP)
        if key not in self._idle:
            speeds = [view.idle_tpot_s(1, context) for view in self.roster.views() if view.decode]
            self._idle[key] = min([tpot_s for tpot_s in speeds if tpot_s is not None], default=None)
        return self._idle[key]

    def _changed(self, name: str) -> None:
        self._outdated[name] = None
        self._latest = None
