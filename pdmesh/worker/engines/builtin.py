"""Our own engine (pdmesh/engine/) behind the interface that a worker composes.

What needs no step runs on the event loop, at once: reserve, restate, start, run_local, add, and release of what no step computes.
On the engine's thread, between two steps, run the release of a request that a step computes, statistics as they are between
steps, and changes of weights (adapters).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from kvtransfer.conversion import FP8Scales
from kvtransfer.manifest import KVMemory
from kvtransfer.staging import StagedMemory
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.hardware import MachineLimits, measure_limits
from pdmesh.engine.interface import NO_STATES, ExpectedBlocks, ReservedBlocks
from pdmesh.engine.kernels.cpu.model import NativeModel
from pdmesh.engine.kv_cache.block_events import BlockEvents, StoredBlock
from pdmesh.engine.kv_cache.block_pool import BlockChanges
from pdmesh.engine.kv_cache.published_blocks import BlockName, PublishedBlocks
from pdmesh.engine.loader.builder import Progress
from pdmesh.engine.loader.loader import LoadedModel, load_model
from pdmesh.engine.loop import EngineLoop
from pdmesh.engine.lora.folder import load_adapter
from pdmesh.engine.memory import effective_max_context
from pdmesh.engine.outputs import CoreSeconds, EngineStats
from pdmesh.engine.request import EngineRequest
from pdmesh.engine.scheduler.tpot_limiter import StepCost, TpotLimiter
from pdmesh.engine.speculation.setup import check_speculation, names_for
from pdmesh.planning.latency_model import USUAL_CONTEXT, Hardware, LatencyModel, prior_of
from pdmesh.planning.roofline import ALL_REDUCE_S
from pdmesh.text.block_hash import hash_block
from pdmesh.worker.config import WorkerConfig, bind, bound
from pdmesh.worker.engines.base import EngineEvents, EngineFacts, Lack, Loaded, PreparedWeights, shape_of
from pdmesh.worker.kv_memory import staged_memory

T = TypeVar("T")

_GLOO_SUM_S = 2e-4  # to sum a row over two processes; 0.3 to 0.5 ms were measured on two busy cores


class BuiltinEngine:
    """Satisfy `WorkerEngine` with an Engine. It has one thread, which `open` starts."""

    def __init__(self, engine: Engine, staged: StagedMemory | None = None) -> None:
        """`staged`: the memory that transports use for the engine's pool; None: the default for its device."""
        self.engine = engine
        self.facts = facts_of(engine)
        self._staged = staged or staged_memory(engine)
        self.memory: KVMemory = self._staged or engine.kv
        self.fp8_scales: FP8Scales = engine.kv_scales
        self.pacer = Pacer(engine.pacer) if engine.config.keep_pace else None
        self._loop: EngineLoop[Engine] | None = None
        self._limits: MachineLimits | None = None
        self._num_releasing = 0  # requests whose blocks come free at the end of the step
        self.sharing = BuiltinSharing(self)
        self.adapters = BuiltinAdapters(self)

    # What the services call.

    async def reserve(self, request: EngineRequest) -> ReservedBlocks | None:
        return await self._granted(lambda engine: engine.reserve(request))

    async def restate(self, request_id: str, request: EngineRequest) -> ReservedBlocks | None:
        return await self._granted(lambda engine: engine.restate(request_id, request))

    async def start(
        self,
        request_id: str,
        first_tokens: Mapping[int, int],
        draft_states: Mapping[int, bytes] = NO_STATES,
        *,
        is_exact: bool = True,
    ) -> None:
        self.calls.now(lambda engine: engine.start(request_id, first_tokens, draft_states=draft_states, is_exact=is_exact))

    async def run_local(self, request_id: str, request: EngineRequest) -> int:
        return self.calls.now(lambda engine: engine.run_local(request_id, request))

    async def reserve_local(self, request: EngineRequest) -> tuple[ReservedBlocks, int] | None:
        return await self._granted(lambda engine: engine.reserve_local(request))

    async def add(self, request: EngineRequest) -> bool:
        return self.calls.now(lambda engine: engine.add(request))

    async def release(self, request_id: str) -> bool:
        released = self.calls.now(lambda engine: engine.try_release(request_id))
        if released is not None:
            return released
        self._num_releasing += 1
        try:
            return await self.calls.call(lambda engine: engine.release(request_id))
        finally:
            self._num_releasing -= 1

    async def _granted(self, grant: Callable[[Engine], T | None]) -> T | None:
        """Return what is granted now. Only where the end of the step under way gives blocks back that are due, wait for it."""
        granted = self.calls.now(grant)
        if granted is None and (self._num_releasing or self.engine.holds_back):
            return await self.calls.call(grant)
        return granted

    async def stats(self) -> EngineStats:
        return await self.calls.call(Engine.stats)

    # What the worker calls.

    @property
    def calls(self) -> EngineLoop[Engine]:
        """Return the thread's queue. Call it only after `open`."""
        assert self._loop is not None, "the engine has not been opened"
        return self._loop

    def prefix_cache(self, max_changes: int) -> BuiltinPrefixCache:
        return BuiltinPrefixCache(self, max_changes)

    def block_events(self) -> BuiltinBlockEvents:
        return BuiltinBlockEvents(self)

    async def release_retained(self, tenant: str, session: str) -> int:
        return self.calls.now(lambda engine: engine.release_retained(tenant, session))

    async def load_weights(self, folder: str) -> NewWeights:
        present = self.engine.versions.current.model
        beside = present if isinstance(present, NativeModel) else None
        config = replace(self.engine.config, model=folder)
        return NewWeights(folder, await asyncio.to_thread(load_model, config, beside=beside))

    def holds_weights(self, weights_hash: str) -> bool:
        return weights_hash in self.engine.versions

    async def take_weights(self, prepared: PreparedWeights) -> float:
        assert isinstance(prepared, NewWeights)

        def take(engine: Engine) -> float:
            began = time.monotonic()
            engine.update_weights(prepared.loaded, prepared.folder)
            return time.monotonic() - began

        pause_s = await self.calls.call(take)
        self.facts = facts_of(self.engine)
        return pause_s

    async def pause(self) -> None:
        await self.calls.pause()
        await self.calls.call(lambda engine: engine.sleep.rest())

    async def resume(self) -> None:
        await self.calls.resume()

    def check_sleep(self) -> None:
        self.engine.sleep.check()

    async def fall_asleep(self) -> int:
        return await self.calls.call(lambda engine: engine.sleep.fall_asleep())

    async def wake(self) -> None:
        await self.calls.call(lambda engine: engine.sleep.wake())

    def first_stats(self) -> EngineStats:
        return self.engine.stats()

    async def open(self, events: EngineEvents, cpus: Sequence[int]) -> LatencyModel:
        loop = asyncio.get_running_loop()
        self._loop = EngineLoop(self.engine, events.on_step, events.on_failure, events.on_ready)
        self._loop.start(loop)
        self.engine.watch_ranks(lambda error: loop.call_soon_threadsafe(events.on_failure, error))
        await self._loop.call(lambda _engine: bind(cpus))
        prior, self._limits = await self._loop.call(lambda engine: (prior_for(engine), limits_for(engine)))
        return prior

    def limits(self) -> MachineLimits | None:
        return self._limits

    def notify_every(self, num_layers: int) -> None:
        self.engine.exports.signal.notify_every(num_layers)

    def expert_counts(self) -> Tensor | None:
        return self.engine.expert_counts()

    def core_seconds(self) -> CoreSeconds | None:
        return self.engine.core_seconds()

    async def stop(self) -> None:
        if self._loop is not None:
            await self._loop.stop()

    def close(self) -> None:
        if self._staged is not None:
            self._staged.close()
        self.engine.close()


@dataclass(frozen=True)
class NewWeights:
    """Satisfy `PreparedWeights` with a loaded model."""

    folder: str
    loaded: LoadedModel

    @property
    def weights_hash(self) -> str:
        return self.loaded.weights_hash


class BuiltinSharing:
    """Satisfy `KVSharing`: everything is answered at once, also while a step runs."""

    def __init__(self, engine: BuiltinEngine) -> None:
        self._engine = engine
        self._published: PublishedBlocks | None = None

    async def expect(self, request: EngineRequest) -> ExpectedBlocks | None:
        return self._engine.calls.now(lambda engine: engine.sharing.expect(request))

    async def take_in(self, request_id: str, num_tokens: int, *, is_rounded: bool = False) -> None:
        self._engine.calls.now(lambda engine: engine.sharing.take_in(request_id, num_tokens, is_rounded=is_rounded))

    async def claim(self, request: EngineRequest) -> None:
        self._engine.calls.now(lambda engine: engine.sharing.claim(request))

    async def pin(self, pin_id: str, hashes: Sequence[bytes]) -> tuple[int, ...]:
        return self._engine.calls.now(lambda engine: engine.sharing.pin(pin_id, hashes))

    async def coming(self, first: int, hashes: Sequence[bytes]) -> list[tuple[int, int]]:
        return self._engine.calls.now(lambda engine: engine.sharing.coming(first, hashes))

    async def to_compute(self) -> list[tuple[int, int]]:
        return self._engine.calls.now(lambda engine: engine.sharing.to_compute())

    async def unpin(self, pin_id: str) -> None:
        self._engine.calls.now(lambda engine: engine.sharing.unpin(pin_id))

    async def lacking(self, root: bytes, tokens: Sequence[int]) -> tuple[int, tuple[bytes, ...]]:
        return self._engine.calls.now(lambda engine: engine.sharing.lacking(root, tokens))

    async def pin_any(self, pin_id: str, hashes: Sequence[bytes]) -> tuple[int | None, ...]:
        return self._engine.calls.now(lambda engine: engine.sharing.pin_any(pin_id, hashes))

    def watch_published(self, max_blocks: int) -> None:
        self._published = self._engine.engine.sharing.watch_published(max_blocks)

    @property
    def has_published(self) -> bool:
        return self._published is not None and self._published.pending

    async def take_published(self, most: int) -> list[tuple[BlockName, float]]:
        return self._engine.calls.now(lambda engine: engine.sharing.take_published(most))

    async def take_used(self) -> list[tuple[bytes, ...]]:
        return self._engine.calls.now(lambda engine: engine.sharing.take_used())

    async def take_withdrawn(self) -> list[BlockName]:
        return self._engine.calls.now(lambda engine: engine.sharing.take_withdrawn())

    async def note_tiers(self, stored: Sequence[bytes], evicted: Sequence[bytes]) -> None:
        self._engine.calls.now(lambda engine: engine.sharing.note_tiers(stored, evicted))


def load_engine(config: WorkerConfig, progress: Progress) -> BuiltinEngine:
    """Load the engine, on a thread of its own; the kernels' threads start here. Raises ValueError, OSError or MemoryError."""
    check_speculation(config.engine_config)
    with bound(config.cpus):
        loaded = load_model(config.engine_config, progress)
        if names_for(config.engine_config, loaded):
            progress(0.0, "measuring steps: how many drafted tokens pay off")
        return BuiltinEngine(Engine(config.engine_config, hash_block=hash_block, loaded=loaded))


def facts_of(engine: Engine) -> EngineFacts:
    """Return the facts about an engine."""
    config, shape = engine.config, engine.kv.shape
    return EngineFacts(
        name="pdmesh",
        model=config.model,
        weights_hash=engine.weights_hash,
        numeric_mode=engine.numeric_mode,
        num_layers=shape.num_layers,
        num_kv_heads=engine.model_config.pool_heads,
        head_dim=engine.model_config.pool_dim,
        block_size=shape.block_size,
        kv_dtype=str(shape.dtype).removeprefix("torch."),
        arrangement=engine.kv_arrangement,
        num_blocks=shape.num_blocks,
        vocab_size=engine.model_config.vocab_size,
        # The engine refuses a request whose prompt and max_tokens would not fit into an empty pool.
        max_context=min(effective_max_context(config, engine.model_config), shape.num_blocks * shape.block_size),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        eos_token_ids=engine.eos_token_ids,
        cost=engine.cost,
        lacks=_lacks_of(engine),
    )


def _lacks_of(engine: Engine) -> frozenset[Lack]:
    can = {
        Lack.PACES: engine.config.keep_pace,
        Lack.EMBEDDINGS: engine.can_pool,
        Lack.RETENTION: engine.can_retain,
    }
    return frozenset(lack for lack, is_able in can.items() if not is_able)


class Pacer:
    """Give the engine the fitted cost of its steps."""

    def __init__(self, limiter: TpotLimiter) -> None:
        self._limiter = limiter

    def set_cost(self, model: LatencyModel) -> None:
        cost = StepCost(
            model.fixed_s,
            model.per_prefill_token_s,
            model.per_prefill_context_s,
            model.per_sequence_s,
            model.per_context_token_s,
        )
        if all(map(math.isfinite, cost)):
            self._limiter.cost = cost


class BuiltinPrefixCache:
    """Satisfy `PrefixCache` with the engine's log of its block pool."""

    def __init__(self, engine: BuiltinEngine, max_changes: int) -> None:
        self._engine = engine
        self._log = engine.engine.watch_blocks(max_changes) if max_changes else None

    @property
    def has_changes(self) -> bool:
        return self._log is not None and bool(self._log.pending)

    async def take_changes(self) -> BlockChanges | None:
        return self._engine.calls.now(Engine.take_block_changes)

    async def blocks(self) -> tuple[int, tuple[bytes, ...]]:
        return self._engine.calls.now(Engine.published_blocks)


class BuiltinBlockEvents:
    """Satisfy `BlockEventSource` with the engine's log: everything is answered at once, also while a step runs."""

    def __init__(self, engine: BuiltinEngine) -> None:
        self._engine = engine
        self._log = engine.engine.sharing.watch()

    @property
    def has_changes(self) -> bool:
        return self._log.pending

    async def take(self) -> BlockEvents | None:
        return self._engine.calls.now(lambda _engine: self._log.take())

    async def take_all(self) -> tuple[BlockEvents | None, tuple[StoredBlock, ...]]:
        return self._engine.calls.now(lambda _engine: self._log.take_all())


class BuiltinAdapters:
    """Satisfy `EngineAdapters`: files are read and checked in a thread; the engine's thread puts the weights into place."""

    def __init__(self, engine: BuiltinEngine) -> None:
        self._engine = engine
        self.max_adapters = engine.engine.config.num_adapter_slots if engine.engine.adapters.can_load else 0
        self.at_start = _loaded(engine.engine)

    async def load(self, name: str, folder: Path) -> Loaded:
        adapter = await asyncio.to_thread(load_adapter, name, folder, self._engine.engine.model_config)

        def put(engine: Engine) -> Loaded:
            engine.load_adapter(adapter)
            return _loaded(engine)

        return await self._engine.calls.call(put)

    async def unload(self, name: str) -> int:
        return await self._engine.calls.call(lambda engine: engine.unload_adapter(name)) or 0


def _loaded(engine: Engine) -> Loaded:
    return [(each, engine.adapters.rank_of(each)) for each in engine.adapters.loaded]


# What the machine can do for this engine, before its first step.


def limits_for(engine: Engine) -> MachineLimits:
    """Return the machine's limits. Call it on the engine thread, whose cores are measured; it takes some 50 ms, once per
    process."""
    cost, config = engine.cost, engine.config
    return measure_limits(cost.backend, cost.numbers, config.device, config.num_threads, config.tensor_parallel)


def prior_for(engine: Engine) -> LatencyModel:
    """Return the latency model before the first step. Call it on the engine thread."""
    config, measured = engine.config, limits_for(engine)
    return prior_of(
        Hardware(measured.operations_per_s, measured.bytes_per_s, _sum_s(config)),
        shape_of(engine.cost),
        chunk=config.max_num_batched_tokens,
        batch=config.max_num_seqs,
        context=min(USUAL_CONTEXT, effective_max_context(config, engine.model_config)),
    )


def _sum_s(config: EngineConfig) -> float:
    if config.tensor_parallel == 1:
        return 0.0
    return ALL_REDUCE_S if config.device == "cuda" else _GLOO_SUM_S
