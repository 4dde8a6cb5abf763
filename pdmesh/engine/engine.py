"""The engine: requests go in, and every step returns a batch of new tokens.

A request enters by reserve() (its KV comes from another worker, or is computed here after all) or by add() (computed here), and
leaves when its last choice ends or by release().

One thread runs steps. The others' calls do not wait for them: one lock guards blocks, lists and requests, and a step holds it
only while it plans and while it applies what was computed.

    step()      schedule_step ─────── run_step ─────── postprocess_step
    lock        ███ (drafts) ████     kernels          ██████
    another     ·····reserve, restate, start, run_local, add, try_release·····

Sequences that ran when the step began, or that it schedules, belong to it until its end (`Scheduler.in_step`): nothing else
changes them, takes their blocks or releases them. Their blocks are not free, so that what is granted meanwhile is none that the
step reads or writes; a prefix is found only when it was computed by an earlier step. What the plan copies is copied before the
lock is released, since the source of a copy may be free by then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

from torch import Tensor

from pdmesh.engine.block_sharing import BlockSharing
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.hardware import cost_of
from pdmesh.engine.interface import ReservedBlocks
from pdmesh.engine.kernels.cpu.library import default_threads
from pdmesh.engine.kernels.cpu.model import NativeModel
from pdmesh.engine.kernels.cpu.sampling import NativeSampler
from pdmesh.engine.kv_cache.block_manager import BlockManager, HashBlock
from pdmesh.engine.kv_cache.block_pool import BlockChanges, BlockLog, BlockPool, num_blocks_for
from pdmesh.engine.kv_cache.events import KVEvents, LayerReadiness
from pdmesh.engine.kv_cache.pool import KVPool
from pdmesh.engine.kv_cache.retention import RetentionBounds
from pdmesh.engine.loader.loader import LoadedModel, load_model
from pdmesh.engine.lora.adapter import Adapter
from pdmesh.engine.lora.registry import AdapterRegistry
from pdmesh.engine.memory import effective_max_context, free_memory, kv_shape
from pdmesh.engine.outputs import CoreSeconds, EngineStats, StartClock, StepResult
from pdmesh.engine.parallel.model import ParallelModel
from pdmesh.engine.parallel.tp_protocol import RankFailed
from pdmesh.engine.request import EngineRequest
from pdmesh.engine.request_validation import Limits
from pdmesh.engine.runner.model_runner import ModelRunner, SampledOutput
from pdmesh.engine.runner.overlap import overlap_scheduler
from pdmesh.engine.runner.prompt_outputs import Pooler, final_norm
from pdmesh.engine.scheduler.requests import RequestTable, Reservations, check_integrity
from pdmesh.engine.scheduler.scheduler import Scheduler, SchedulerOutput
from pdmesh.engine.scheduler.sequence import Phase
from pdmesh.engine.scheduler.sequence import Sequence as EngineSequence
from pdmesh.engine.scheduler.stats import Counters, EngineStatsCollector, OutputProcessor
from pdmesh.engine.scheduler.tpot_limiter import TpotLimiter
from pdmesh.engine.sleep import EngineSleep
from pdmesh.engine.speculation.calibration import LONGEST, Circumstances, measure_curve, processor_name
from pdmesh.engine.speculation.draft import Draft
from pdmesh.engine.speculation.handover import unpacked
from pdmesh.engine.speculation.proposer import Proposer
from pdmesh.engine.speculation.setup import Drafts, Parts, check_speculation, load_drafts, make_proposers, names_for
from pdmesh.engine.speculation.speculator import Bounds, Speculator
from pdmesh.engine.weight_versions import WeightVersion, check_new_weights


@dataclass
class EngineStep:
    """Hold a step under way: its plan, and what was drawn for it in `compute_ns`."""

    plan: SchedulerOutput
    started_ns: int
    signal: LayerReadiness | None
    draws: dict[EngineSequence, list[SampledOutput]] = field(default_factory=dict)
    compute_ns: int = 0


PROMPT_LOGITS_BYTES = 64 << 20
"""Memory for logits of prompts' tokens in a step on a CPU, where prompts' log-probabilities or a mean of states are wanted."""


class Engine:
    """Own a model, its KV pool and the requests on it."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        hash_block: HashBlock,
        loaded: LoadedModel | None = None,
        proposers: Sequence[Proposer] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Load the model unless one is given, and make the proposers that `config` names unless some are given.

        `hash_block(parent, token_ids) -> bytes` chains the hashes of the prefix cache. `clock`: seconds, by which retention ends.
        Raises ValueError for impossible settings, and what the loader and the KV pool raise.
        """
        config.validate()
        config.check_own_ranks()
        if loaded is None and proposers is None:
            check_speculation(config)
        loaded = load_model(config) if loaded is None else loaded
        self.config = config
        self._loaded = loaded
        self.model_config = loaded.config
        self.weights_hash = loaded.weights_hash
        self.numeric_mode = loaded.numeric_mode
        self.kv_scales = loaded.kv_scales
        self.kv_arrangement = "panels" if isinstance(loaded.model, NativeModel) else "plain"  # see kvtransfer/conversion.py
        self.eos_token_ids = frozenset(loaded.config.eos_token_ids)
        self._parallel = loaded.model if isinstance(loaded.model, ParallelModel) else None
        drafts = load_drafts(config, loaded) if proposers is None else Drafts()
        self.kv = _open_pool(config, loaded, drafts)
        loaded.prepare(self.kv.tensor)  # before the speculator times steps
        self.cost = cost_of(loaded, self.kv.shape)
        self.sampler = sampler = loaded.sampler()
        bounds = RetentionBounds.of(self.kv.shape.num_blocks, config.max_retained_share if config.prefix_caching else 0.0)
        self.can_retain = bounds.tenant > 0
        self._pool = BlockPool(self.kv.shape.num_blocks, bounds, clock)
        self._final_norm = final_norm(loaded.model)
        limits = self._limits()
        self._allocator = BlockManager(self._pool, config.block_size, hash_block, prefix_caching=config.prefix_caching)
        self._lock = self._allocator.lock
        if proposers is None:
            parts = Parts(config, loaded, drafts, self.kv, self._allocator, sampler, lambda: len(self._scheduler.running))
            proposers = make_proposers(parts)
        self.speculator = self._make_speculator(proposers, loaded) if proposers else None
        slots = (config.num_adapter_slots, loaded.adapter_slots)
        self.adapters = AdapterRegistry(*slots, lambda: (group.request.adapter for group in self._table))
        self._runner = self._make_runner(loaded)
        self.pacer = TpotLimiter(is_on=config.keep_pace)
        self._scheduler = Scheduler(self._allocator, config.max_num_batched_tokens, self.pacer, self._num_logits_rows())
        # Drafts are made from tokens that the host has read: with a proposer no step is launched ahead.
        steps = (self._runner, loaded, sampler, self._scheduler, self._allocator, config)
        self._overlap = None if self.speculator else overlap_scheduler(*steps)
        self.versions, self._clock = self._runner.versions, clock
        self._table = RequestTable(limits, self._allocator, self._scheduler, self.adapters.may_have, self.versions.check)
        self._reservations = Reservations(limits, self._table, self._allocator, self._scheduler)
        self._counters = counters = Counters()
        tally = self.speculator.tally if self.speculator else None
        self._stats = EngineStatsCollector(counters, self._table, self._scheduler, self._allocator, self.pacer, tally)
        self._postprocess = OutputProcessor(self._table, self._allocator, counters, self._stats)
        self._handed_over: list[tuple[EngineSequence, Tensor]] = []  # states for the speculator, until the next step
        self.exports = KVEvents(loaded.config.num_layers)
        for adapter in loaded.adapters:
            self.adapters.load(adapter)

    def reserve(self, request: EngineRequest) -> ReservedBlocks | None:
        """Hold blocks for prompt and history, cached prefix first and pinned; None: no room now, and nothing is held.

        Raises InvalidRequest, RequestTooLarge (it never fits) or DuplicateRequest.
        """
        with self._lock:
            reserved = self._reservations.reserve(request)
            self.kv.reach(self._pool.highest_used)
            return reserved

    @cached_property
    def sharing(self) -> BlockSharing:
        """Return what moves blocks of the prefix cache from and to other workers."""
        return BlockSharing(self._table, self._allocator, self.reserve)

    @cached_property
    def sleep(self) -> EngineSleep:
        """Return what gives memory back while nothing is to be computed."""
        return EngineSleep(self.kv, self._allocator, self.versions)

    def restate(self, request_id: str, request: EngineRequest) -> ReservedBlocks | None:
        """Return the same reservation for a request with more history, grown if it needs more blocks; None: no room, nothing
        changed.

        Raises UnknownRequest, InvalidState (not reserved any more) or InvalidRequest (not the tokens that were reserved for).
        """
        with self._lock:
            return self._reservations.restate(request_id, request)

    def start(
        self,
        request_id: str,
        first_tokens: Mapping[int, int],
        finished: Collection[int] = (),
        draft_states: Mapping[int, bytes] = MappingProxyType({}),
        *,
        is_exact: bool = True,
    ) -> None:
        """Continue by decoding: the reservation's KV has arrived, and these tokens (choice → token id) were emitted elsewhere.

        Every unfinished choice has a first token here, or is in `finished`: it ended with its first token. A choice whose first
        token ends it by the rules of outputs.py has ended too, without an update. The full blocks become shareable, unless the
        KV is not `is_exact`: it is rounded, or was computed from rounded KV.
        `draft_states` (speculation/handover.py) of choices come from the prefill worker: one that does not fit is ignored.
        Raises UnknownRequest, InvalidState or InvalidRequest; the reservation is then unchanged.
        """
        with self._lock:
            group = self._reservations.start(request_id, first_tokens, finished, time.monotonic_ns(), is_exact=is_exact)
            if self.speculator is not None and self.speculator.wants_hidden:
                for sequence in group.sequences:
                    state = draft_states.get(sequence.choices[0])
                    hidden = unpacked(state, self.model_config.hidden_size) if state else None
                    if hidden is not None:
                        self._handed_over.append((sequence, hidden))

    def run_local(self, request_id: str, request: EngineRequest) -> int:
        """Compute here what the reservation lacks, as no push comes. `request` restates it, perhaps with more history.

        Returns the monotonic nanoseconds of now, its PrefillTiming's `opened_ns`.
        Raises UnknownRequest, InvalidState, InvalidRequest or RequestTooLarge; the reservation is then unchanged.
        """
        now_ns = time.monotonic_ns()
        with self._lock:
            self._reservations.run_local(request_id, request, now_ns)
        return now_ns

    def reserve_local(self, request: EngineRequest) -> tuple[ReservedBlocks, int] | None:
        """Do `reserve` and `run_local` in one turn; return what both do. None: no room now."""
        with self._lock:
            blocks = self.reserve(request)
            return None if blocks is None else (blocks, self.run_local(request.request_id, request))

    def add(self, request: EngineRequest) -> bool:
        """Queue a request to be computed here; it gets blocks when its turn comes. False: max_num_seqs are taken.

        Raises InvalidRequest, RequestTooLarge or DuplicateRequest.
        """
        with self._lock:
            group = self._table.open(request, Phase.ACTIVE, StartClock(time.monotonic_ns(), remote=False))
            if group is None:
                return False
            self._table.put(group)
            self._scheduler.wait(group.sequences[0])
            return True

    def release(self, request_id: str) -> bool:
        """End a request in any state and free everything it has, between two steps. False: it is not here (any more)."""
        released = self.try_release(request_id)
        assert released is not None, f"{request_id} is released in a step that computes it"
        return released

    def try_release(self, request_id: str) -> bool | None:
        """Do `release` now, also while a step runs. None: the step computes the request, so release it behind the step."""
        with self._lock:
            if self._table.has_any(request_id, self._scheduler.in_step):
                return None
            return self._table.release(request_id)

    @property
    def holds_back(self) -> bool:
        """Return whether a step runs that may keep blocks of drafts which could be taken back behind it."""
        return self.speculator is not None and bool(self._scheduler.in_step)

    def release_retained(self, tenant: str, session: str) -> int:
        """Give up what is retained for a session; return how many blocks that were. Requests of it that are here retain nothing
        any more, later ones do; its blocks stay in the prefix cache as others do."""
        with self._lock:
            return self._table.release_retained(tenant, session)

    def load_adapter(self, adapter: Adapter) -> None:
        """Load between two steps: see AdapterRegistry.load. Adapters that leave, and that no request has any more, make room."""
        with self._lock:
            self.adapters.sweep()
        self.adapters.load(adapter)

    def unload_adapter(self, name: str) -> int | None:
        """Unload between two steps: see AdapterRegistry.unload."""
        with self._lock:  # no request may come with it between the count of those that have it and its end
            return self.adapters.unload(name)

    def update_weights(self, loaded: LoadedModel, model: str) -> None:
        """Compute what comes with other weights, of the folder `model`, between two steps; what is here ends on its own. Raises
        WeightsRefused."""
        drafts = set(names_for(self.config, loaded)) - {"prompt_lookup"} if self.speculator else ()
        check_new_weights(self._loaded, loaded, has_ranks=self._parallel is not None, has_drafts=bool(drafts))
        self._final_norm = norm = final_norm(loaded.model)
        pooler = None if norm is None else Pooler(norm, loaded.config.hidden_size)
        with self._lock:
            self.versions.update(WeightVersion(loaded.weights_hash, loaded.model, pooler), self._clock())
            self._runner.forget_input()
            self._loaded, self.weights_hash = loaded, loaded.weights_hash
            if isinstance(self.sampler, NativeSampler):
                self.sampler.owner = loaded.model  # it computes with the same threads: the first model need not stay for it
            self.config = replace(self.config, model=model)

    def held_blocks(self, request_id: str) -> tuple[int, ...]:
        """Return the blocks of a prefill_only request after its first tokens, in the order of its tokens, held until release().

        Raises UnknownRequest, or InvalidState before the first tokens.
        """
        return tuple(self._table.find(request_id, Phase.HELD).sequences[0].block_ids)

    def step(self) -> StepResult | None:
        """Run one step for all sequences that fit into it. None: nothing to do until another call changes that."""
        step = self.schedule_step()
        if step is None:
            self._loaded.rest()
            return None
        self.run_step(step)
        return self.postprocess_step(step)

    def schedule_step(self) -> EngineStep | None:
        """Plan a step, and copy the blocks that it writes to and others share. None: nothing to do until another call changes
        that."""
        started_ns = time.monotonic_ns()
        with self._lock:
            if self.adapters.leaving:
                self.adapters.sweep()
            if len(self.versions) > 1:
                self.versions.drop_unused({group.weights_hash for group in self._table}, self._clock())
            running = list(self._scheduler.running)
            self._scheduler.in_step = frozenset(running)
            has_waiting = bool(self._scheduler.waiting)
        drafts = self._drafts(running, has_waiting=has_waiting) if self.speculator is not None else {}
        with self._lock:
            plan = self._next_plan(started_ns, drafts)
            if not plan.pieces:
                self._scheduler.in_step = frozenset()
                self._runner.forget_input()
                self.check_integrity()
                return None
            self.kv.reach(self._pool.highest_used)
            if not plan.num_repeats:  # else they are those that run, and write into blocks of their own
                self._scheduler.in_step |= {piece.sequence for piece in plan.pieces}
                self._runner.copy_blocks(plan.pieces)
            return EngineStep(plan, started_ns, self.exports.begin(plan))

    def run_step(self, step: EngineStep) -> None:
        """Compute what is planned, and draw tokens."""
        began_ns = time.monotonic_ns()
        if self._overlap is not None:
            step.draws = self._overlap.run(step.plan, step.signal)
        else:
            step.draws = self._runner.run(step.plan, step.signal, keep_hidden=self._wants_hidden(step.plan))
        step.compute_ns = time.monotonic_ns() - began_ns

    def postprocess_step(self, step: EngineStep) -> StepResult:
        """Apply what was computed to the sequences, and return it."""
        with self._lock:
            num_prefilled = self._counters.num_prefilled_tokens
            result = self._postprocess.postprocess(step.plan, step.draws, step.started_ns, self.exports.end())
            num_prompt_tokens = self._counters.num_prefilled_tokens - num_prefilled
        if self.speculator is not None:
            self.speculator.learn(step.plan, step.draws, step.started_ns, step.compute_ns, num_prompt_tokens)
        with self._lock:
            self._scheduler.in_step = frozenset()
        return result

    @property
    def has_work(self) -> bool:
        """Return whether something runs or waits. If all wait for blocks that reservations hold, step() still returns None."""
        return bool(self._scheduler.running or self._scheduler.waiting)

    def _make_runner(self, loaded: LoadedModel) -> ModelRunner:
        hidden_size = loaded.config.hidden_size
        return ModelRunner(
            loaded.model,
            self.kv.tensor,
            self.sampler,
            self.eos_token_ids,
            hidden_size=hidden_size if self.speculator and self.speculator.wants_hidden else None,
            arrangement=self.kv_arrangement,
            others=self.ranks_with_pools,
            adapter_slots=self.adapters.slots,
            reads_plain_draws=self.speculator is not None and self.speculator.reads_plain_draws,
            pooler=None if self._final_norm is None else Pooler(self._final_norm, hidden_size),
            weights_hash=loaded.weights_hash,
        )

    def _num_logits_rows(self) -> int:
        """Return how many rows of logits a step may have: on a GPU those that its memory was planned for."""
        num_seqs, bound = self.config.max_num_seqs, PROMPT_LOGITS_BYTES // (4 * self.model_config.vocab_size)
        return num_seqs if self.config.device == "cuda" else max(num_seqs, bound)

    @property
    def can_pool(self) -> bool:
        """Return whether requests may have pooling."""
        return self._final_norm is not None

    def expert_counts(self) -> Tensor | None:
        """Return the tokens that each expert got since start, [layers with experts, num_experts] int64; None for a model without
        experts, or where its kernels do not count. It may be called on any thread: what a step adds meanwhile may be missing."""
        return self._loaded.expert_counts()

    def core_seconds(self) -> CoreSeconds | None:
        """Return for how long others held its cores and it others'; None: it shares none."""
        return self._loaded.core_seconds()

    def stats(self) -> EngineStats:
        """Return counts of now and since start. Sequences count by choice, so running + waiting + reserved is at most
        max_num_seqs."""
        with self._lock:
            return self._stats.take(time.monotonic_ns())

    def watch_blocks(self, max_changes: int) -> BlockLog:
        """Log the prefix cache's changes from now on, at most `max_changes` at a time. Call it before the first request."""
        self._pool.log = log = BlockLog(max_changes)
        return log

    def take_block_changes(self) -> BlockChanges | None:
        """Return what the prefix cache gained and lost since the last call; None: nothing, or watch_blocks() was not called."""
        with self._lock:
            return self._pool.log.take() if self._pool.log is not None else None

    def published_blocks(self) -> tuple[int, tuple[bytes, ...]]:
        """Return hashes of all blocks with a reusable prefix, and the sequence number of the last changes that they contain."""
        with self._lock:
            return self._pool.log.sequence if self._pool.log is not None else 0, self._pool.published()

    @property
    def ranks_with_pools(self) -> ParallelModel | None:
        """Return the model where each rank has a pool of its own heads, so that the engine's pool is rank 0's."""
        return None if self._parallel is None or self._parallel.shares_pool else self._parallel

    def watch_ranks(self, on_failure: Callable[[RankFailed], object]) -> None:
        """Call `on_failure`, from some thread, when a tensor-parallel rank has ended by itself: no step can succeed any more."""
        if self._parallel is not None:
            self._parallel.watch(on_failure)

    def close(self) -> None:
        """End the other ranks, if there are any, and free the memory. Nothing may run on it any more; idempotent."""
        if self._parallel is not None:
            self._parallel.close()
        self.sleep.close()
        self.kv.close()

    def check_integrity(self) -> None:
        """Raise IntegrityError unless free + used == total and every reference is accounted for. Also runs whenever idle."""
        with self._lock:
            check_integrity(self._allocator, self._table, self._scheduler)

    def _make_speculator(self, proposers: Sequence[Proposer], loaded: LoadedModel) -> Speculator:
        limits, config = self._limits(), self.config
        self.kv.reach(min(self._pool.num_total, num_blocks_for(LONGEST, config.block_size)) - 1)
        curve = measure_curve(loaded.model, self.sampler, self.kv.tensor, self._circumstances(loaded))
        longest = config.draft_length or config.max_draft_tokens
        bounds = Bounds(longest, config.max_num_batched_tokens, limits.max_context, config.draft_length, limits.vocab_size)
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

    def _next_plan(self, now_ns: int, drafts: Mapping[EngineSequence, Draft]) -> SchedulerOutput:
        """Return the plan that is under way already, else the scheduler's next."""
        plan = self._overlap.planned() if self._overlap is not None else None
        if plan is not None:
            self.pacer.start([piece.sequence for piece in plan.pieces], now_ns)
            return plan
        plan = self._scheduler.schedule(now_ns, drafts)
        if self._overlap is not None:
            self._overlap.note_refusal(plan)
        return plan

    def _drafts(self, running: list[EngineSequence], *, has_waiting: bool) -> Mapping[EngineSequence, Draft]:
        assert self.speculator is not None, "without one there are no drafts"
        if self._handed_over:
            with self._lock:
                handed_over, self._handed_over = self._handed_over, []
            for sequence, hidden in handed_over:
                if sequence in running:
                    self.speculator.take_over(sequence, hidden)
        return self.speculator.draft(running, has_waiting=has_waiting)

    def _wants_hidden(self, plan: SchedulerOutput) -> bool:
        """Return whether the hidden states are needed, by a draft proposer or for a hand-off."""
        if self.speculator is None:
            return False
        if self.speculator.wants_hidden_now or plan.num_repeats:  # a prefill_only request has only one step that draws
            return self.speculator.wants_hidden_now
        return any(piece.sequence.group.request.prefill_only for piece in plan.pieces)

    def _limits(self) -> Limits:
        return Limits(
            block_size=self.config.block_size,
            num_blocks=self._pool.num_total,
            max_num_seqs=self.config.max_num_seqs,
            max_context=effective_max_context(self.config, self.model_config),
            vocab_size=self.model_config.vocab_size,
            eos_token_ids=self.eos_token_ids,
            can_pool=self.can_pool,
        )


def _open_pool(config: EngineConfig, loaded: LoadedModel, drafts: Drafts) -> KVPool:
    """Open a pool with all heads; where each tensor-parallel rank has a device, only with this rank's."""
    model = loaded.model
    heads_of = model.config if isinstance(model, ParallelModel) and not model.shares_pool else loaded.config
    step_bytes = loaded.step_bytes(config) + drafts.step_bytes
    free_bytes = max(0, free_memory(config.device) - loaded.mapped_bytes - drafts.mapped_bytes)
    shape = kv_shape(config, heads_of, loaded.kv_dtype, free_bytes, step_bytes, drafts.block_bytes)
    if isinstance(model, ParallelModel):
        return model.open_pool(shape)
    return KVPool(shape, config.device, shared=config.kv_shared)
