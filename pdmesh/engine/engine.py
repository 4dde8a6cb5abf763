"""The engine: requests in, a batch of new tokens out of every step. One thread owns it; nothing here is safe to call from two.

A request enters by reserve() (its KV comes from elsewhere, or is computed here after all) or by add() (computed here), and leaves
when its last choice ends or by release(), which is right at any time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.errors import IntegrityError
from pdmesh.engine.hardware import cost_of
from pdmesh.engine.kernels.cpu.model import NativeModel
from pdmesh.engine.kernels.cpu.threads import default_threads
from pdmesh.engine.kv_cache.block_manager import BlockAllocator, HashBlock
from pdmesh.engine.kv_cache.block_pool import BlockChanges, BlockLog, BlockPool, num_blocks_for
from pdmesh.engine.kv_cache.events import KVEvents, LayerReadiness
from pdmesh.engine.kv_cache.pool import KVPool
from pdmesh.engine.loader.loader import LoadedModel, load_model
from pdmesh.engine.memory import effective_max_context, free_memory, kv_shape
from pdmesh.engine.outputs import EngineStats, StartClock, StepResult
from pdmesh.engine.parallel.model import ParallelModel
from pdmesh.engine.parallel.tp_protocol import RankFailed
from pdmesh.engine.request import EngineRequest
from pdmesh.engine.request_validation import Limits
from pdmesh.engine.runner.model_runner import ModelRunner, SampledOutput
from pdmesh.engine.runner.overlap import overlap_scheduler
from pdmesh.engine.scheduler.postprocess import OutputProcessor
from pdmesh.engine.scheduler.requests import RequestTable, Reservations, ReservedBlocks
from pdmesh.engine.scheduler.scheduler import Scheduler, SchedulerOutput, TpotLimiter
from pdmesh.engine.scheduler.sequence import Phase, SequenceGroup
from pdmesh.engine.scheduler.sequence import Sequence as EngineSequence
from pdmesh.engine.scheduler.stats import Counters, EngineStatsCollector
from pdmesh.engine.speculation.calibration import LONGEST, Circumstances, measure_curve, processor_name
from pdmesh.engine.speculation.draft import Draft
from pdmesh.engine.speculation.handover import unpacked
from pdmesh.engine.speculation.proposer import Proposer
from pdmesh.engine.speculation.setup import Drafts, Parts, check_speculation, load_drafts, make_proposers
from pdmesh.engine.speculation.speculator import Bounds, Speculator

# Is every block where the bookkeeping says? Cheap enough to ask whenever the engine idles.


def check_integrity(pool: BlockPool, groups: Iterable[SequenceGroup], scheduler: Scheduler) -> None:
    """Raises IntegrityError unless blocks are held as often as sequences hold them, and every sequence has its one place."""
    groups = list(groups)
    pool.check(Counter(block_id for group in groups for sequence in group.sequences for block_id in sequence.block_ids))
    active = [sequence for group in groups if group.phase is Phase.ACTIVE for sequence in group.sequences]
    scheduled = scheduler.running + scheduler.waiting
    if len(scheduled) != len(active) or set(scheduled) != set(active):
        raise IntegrityError(f"{len(scheduled)} sequences are scheduled, {len(active)} of known requests are active")
    if any(sequence.block_ids for sequence in scheduler.waiting):
        raise IntegrityError("a waiting sequence holds blocks")


class Engine:
    """A model, its KV pool and the requests on it."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        hash_block: HashBlock,
        loaded: LoadedModel | None = None,
        proposers: Sequence[Proposer] | None = None,
    ) -> None:
        """Loads the model unless one is given, and makes the proposers that `config` names unless some are given.

        `hash_block(parent, token_ids) -> bytes` chains the hashes of the prefix cache.

        Raises ValueError for settings that cannot be, and what the loader and the KV pool raise.
        """
        config.validate()
        if loaded is None:
            if proposers is None:
                check_speculation(config)
            loaded = load_model(config)
        self.config = config
        self.model_config = loaded.config
        self.weights_hash = loaded.weights_hash
        self.numeric_mode = loaded.numeric_mode
        self.kv_scales = loaded.kv_scales
        self.kv_arrangement = "panels" if isinstance(loaded.model, NativeModel) else "plain"  # see kv_cache/format.py
        self.eos_token_ids = frozenset(loaded.config.eos_token_ids)
        self._parallel = loaded.model if isinstance(loaded.model, ParallelModel) else None
        drafts = load_drafts(config, loaded) if proposers is None else Drafts()
        self.kv = _open_pool(config, loaded, drafts)
        loaded.prepare(self.kv.tensor)  # before steps are timed for the speculator
        self.cost = cost_of(loaded, self.kv.shape)
        self.sampler = sampler = loaded.sampler()
        self._pool = BlockPool(self.kv.shape.num_blocks)
        limits = self._limits()
        self._allocator = BlockAllocator(self._pool, config.block_size, hash_block, prefix_caching=config.prefix_caching)
        if proposers is None:
            parts = Parts(config, loaded, drafts, self.kv, self._allocator, sampler, lambda: len(self._scheduler.running))
            proposers = make_proposers(parts)
        self.speculator = self._make_speculator(proposers, loaded) if proposers else None
        hidden_size = loaded.config.hidden_size if self.speculator and self.speculator.wants_hidden else None
        self._runner = ModelRunner(
            loaded.model,
            self.kv.tensor,
            sampler,
            self.eos_token_ids,
            hidden_size=hidden_size,
            arrangement=self.kv_arrangement,
            others=self.ranks_with_pools,
        )
        self.pacer = TpotLimiter(is_on=config.keep_pace)
        self._scheduler = Scheduler(self._allocator, config.max_num_batched_tokens, self.pacer)
        # Guesses are made from tokens that the host has seen: with a proposer no step is ahead of them.
        self._ahead = (
            None
            if self.speculator
            else overlap_scheduler(self._runner, loaded, sampler, self._scheduler, self._allocator, config)
        )
        self._table = RequestTable(limits, self._allocator, self._scheduler)
        self._reservations = Reservations(limits, self._table, self._allocator, self._scheduler)
        self._counters = counters = Counters()
        tally = self.speculator.tally if self.speculator else None
        self._census = EngineStatsCollector(counters, self._table, self._scheduler, self._allocator, self.pacer, tally)
        self._progress = OutputProcessor(self._table, self._allocator, counters, self._census)
        self.exports = KVEvents(loaded.config.num_layers)

    def reserve(self, request: EngineRequest) -> ReservedBlocks | None:
        """Holds blocks for prompt and history, cached prefix first and pinned; None: no room now, nothing is held.

        Raises InvalidRequest, RequestTooLarge (it never fits) or DuplicateRequest.
        """
        reserved = self._reservations.reserve(request)
        self.kv.reach(self._pool.highest_used)
        return reserved

    def restate(self, request_id: str, request: EngineRequest) -> ReservedBlocks | None:
        """The same reservation for a request with more history, grown if it needs more blocks; None: no room, nothing changed.

        Raises UnknownRequest, InvalidState (not reserved any more) or InvalidRequest (not the tokens that were reserved for).
        """
        return self._reservations.restate(request_id, request)

    def start(
        self,
        request_id: str,
        first_tokens: Mapping[int, int],
        finished: Collection[int] = (),
        draft_states: Mapping[int, bytes] = MappingProxyType({}),
    ) -> None:
        """The reservation's KV has arrived, and these tokens (choice → token id) were emitted elsewhere: decoding goes on.

        Every unfinished choice has a first token here, or is in `finished`: it ended with its first token. A choice whose first
        token ends it by the rules of finish.py is over too, without an update. The full blocks become shareable.
        `draft_states` (speculation/handover.py) of choices, as prefill gave them: one that does not fit is ignored.
        Raises UnknownRequest, InvalidState or InvalidRequest; the reservation is then as it was.
        """
        group = self._reservations.start(request_id, first_tokens, finished, time.monotonic_ns())
        if self.speculator is not None and self.speculator.wants_hidden:
            for sequence in group.sequences:
                state = draft_states.get(sequence.choices[0])
                hidden = unpacked(state, self.model_config.hidden_size) if state else None
                if hidden is not None:
                    self.speculator.take_over(sequence, hidden)

    def run_local(self, request_id: str, request: EngineRequest) -> int:
        """Nobody will push: what the reservation lacks is computed here. `request` restates it, with more history perhaps.

        Returns when (monotonic nanoseconds): its PrefillTiming's `opened_ns`.
        Raises UnknownRequest, InvalidState, InvalidRequest or RequestTooLarge; the reservation is then as it was.
        """
        now_ns = time.monotonic_ns()
        self._reservations.run_local(request_id, request, now_ns)
        return now_ns

    def add(self, request: EngineRequest) -> bool:
        """Queues a request to be computed here; it gets blocks when its turn comes. False: max_num_seqs are taken.

        Raises InvalidRequest, RequestTooLarge or DuplicateRequest.
        """
        group = self._table.open(request, Phase.ACTIVE, StartClock(time.monotonic_ns(), remote=False))
        if group is None:
            return False
        self._table.put(group)
        self._scheduler.wait(group.sequences[0])
        return True

    def release(self, request_id: str) -> bool:
        """Ends a request in any state and frees everything it has. False: it is not here (any more)."""
        return self._table.release(request_id)

    def held_blocks(self, request_id: str) -> tuple[int, ...]:
        """The blocks of a prefill_only request after its first tokens, in the order of its tokens; they stay until release().

        Raises UnknownRequest, or InvalidState before the first tokens.
        """
        return tuple(self._table.find(request_id, Phase.HELD).sequences[0].block_ids)

    def step(self) -> StepResult | None:
        """One step for all sequences that fit into it. None: nothing to do until another call changes that."""
        started_ns = time.monotonic_ns()
        plan = self._next_plan(started_ns)
        if not plan.pieces:
            self.check_integrity()
            return None
        self.kv.reach(self._pool.highest_used)
        planned_ns = time.monotonic_ns()
        draws = self._run(plan, self.exports.begin(plan))
        computed_ns = time.monotonic_ns()
        num_prefilled = self._counters.num_prefilled_tokens
        result = self._progress.postprocess(plan, draws, started_ns, self.exports.end())
        if self.speculator is not None:
            num_prompt_tokens = self._counters.num_prefilled_tokens - num_prefilled
            self.speculator.learn(plan, draws, computed_ns - planned_ns, num_prompt_tokens)
        return result

    @property
    def has_work(self) -> bool:
        """Something runs or waits. If all that waits is waiting for blocks that reservations hold, step() still returns None."""
        return bool(self._scheduler.running or self._scheduler.waiting)

    def stats(self) -> EngineStats:
        """Counts now and since start. Sequences count by choice, so running + waiting + reserved is at most max_num_seqs."""
        return self._census.take(time.monotonic_ns())

    def watch_blocks(self, max_changes: int) -> BlockLog:
        """From now on the prefix cache's changes are logged, at most so many at a time. Before the first request."""
        self._pool.log = BlockLog(max_changes)
        return self._pool.log

    def take_block_changes(self) -> BlockChanges | None:
        """What the prefix cache gained and lost since the last time; None: nothing, or nobody watches."""
        return self._pool.log.take() if self._pool.log is not None else None

    def published_blocks(self) -> tuple[int, tuple[bytes, ...]]:
        """Hashes of all blocks that hold a reusable prefix, and the sequence of the last changes taken that they contain."""
        return self._pool.log.sequence if self._pool.log is not None else 0, self._pool.published()

    @property
    def ranks_with_pools(self) -> ParallelModel | None:
        """The model where each rank has a pool of its own, of its heads: the engine's is then rank 0's."""
        return None if self._parallel is None or self._parallel.shares_pool else self._parallel

    def watch_ranks(self, on_failure: Callable[[RankFailed], object]) -> None:
        """`on_failure` hears, from some thread, of a rank of tensor parallelism that has ended by itself: no step can succeed."""
        if self._parallel is not None:
            self._parallel.watch(on_failure)

    def close(self) -> None:
        """Ends the other ranks, if there are any, and gives the memory back. Nothing may run on it any more; idempotent."""
        if self._parallel is not None:
            self._parallel.close()
        self.kv.close()

    def check_integrity(self) -> None:
        """Raises IntegrityError unless free + used == total and every reference is accounted for. Also made whenever idle."""
        check_integrity(self._pool, self._table, self._scheduler)

    def _make_speculator(self, proposers: Sequence[Proposer], loaded: LoadedModel) -> Speculator:
        limits, config = self._limits(), self.config
        self.kv.reach(min(self._pool.num_total, num_blocks_for(LONGEST, config.block_size)) - 1)
        curve = measure_curve(loaded.model, self.sampler, self.kv.tensor, self._circumstances(loaded))
        bounds = Bounds(
            config.draft_length or config.max_draft_tokens,
            config.max_num_batched_tokens,
            limits.max_context,
            config.draft_length,
            limits.vocab_size,
        )
        return Speculator(proposers, curve, bounds, device=self.kv.tensor.device)

    def _circumstances(self, loaded: LoadedModel) -> Circumstances:
        return Circumstances(
            weights_hash=loaded.weights_hash,
            numeric_mode=loaded.numeric_mode,
            processor=processor_name(self.kv.tensor.device)
            + (f" x{ranks}" if (ranks := self.config.tensor_parallel) > 1 else ""),
            num_threads=self.config.num_threads or default_threads(),
            kv_dtype=str(self.kv.tensor.dtype),
            block_size=self.config.block_size,
            max_context=self._limits().max_context,
            max_rows=self.config.max_num_batched_tokens,
        )

    def _next_plan(self, now_ns: int) -> SchedulerOutput:
        """What is under way already, else what the scheduler says."""
        plan = self._ahead.planned() if self._ahead is not None else None
        if plan is None:
            return self._scheduler.schedule(now_ns, self._drafts())
        self.pacer.start([piece.sequence for piece in plan.pieces], now_ns)
        return plan

    def _run(self, plan: SchedulerOutput, signal: LayerReadiness | None) -> dict[EngineSequence, list[SampledOutput]]:
        if self._ahead is not None:
            return self._ahead.run(plan, signal)
        return self._runner.run(plan, signal, keep_hidden=self._wants_hidden(plan))

    def _drafts(self) -> dict[EngineSequence, Draft]:
        if self.speculator is None:
            return {}
        scheduler = self._scheduler
        has_prompts = bool(scheduler.waiting) or not all(sequence.is_going_on for sequence in scheduler.running)
        return self.speculator.draft(scheduler.running, has_prompts=has_prompts)

    def _wants_hidden(self, plan: SchedulerOutput) -> bool:
        """For who guesses next here, or takes a hand-off."""
        if self.speculator is None:
            return False
        return self.speculator.wants_hidden_now or any(piece.sequence.group.request.prefill_only for piece in plan.pieces)

    def _limits(self) -> Limits:
        return Limits(
            block_size=self.config.block_size,
            num_blocks=self._pool.num_total,
            max_num_seqs=self.config.max_num_seqs,
            max_context=effective_max_context(self.config, self.model_config),
            vocab_size=self.model_config.vocab_size,
            eos_token_ids=self.eos_token_ids,
        )


def _open_pool(config: EngineConfig, loaded: LoadedModel, drafts: Drafts) -> KVPool:
    """With all heads; where each rank of tensor parallelism has a device, only with this one's."""
    model = loaded.model
    has_own_heads = isinstance(model, ParallelModel) and not model.shares_pool
    heads_of = model.config if has_own_heads else loaded.config
    step_bytes = loaded.step_bytes(config) + drafts.step_bytes
    shape = kv_shape(config, heads_of, loaded.kv_dtype, free_memory(config.device), step_bytes, drafts.block_bytes)
    if isinstance(model, ParallelModel):
        return model.open_pool(shape)
    return KVPool(shape, config.device, shared=config.kv_shared)
