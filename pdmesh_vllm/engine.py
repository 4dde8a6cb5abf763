"""vLLM behind the interface that a worker composes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvtransfer.conversion import FP8Scales
from kvtransfer.manifest import KVMemory
from kvtransfer.staging import StagedMemory
from pdmesh.adapter_id import named_folder
from pdmesh.engine.errors import EngineStopped, SleepRefused, WeightsRefused
from pdmesh.engine.hardware import MachineLimits, measure_limits
from pdmesh.engine.interface import NO_STATES, ReservedBlocks
from pdmesh.engine.kernels.cpu import library
from pdmesh.engine.kernels.cpu.sampling import NativeSampler
from pdmesh.engine.kernels.triton.support import why_not_here
from pdmesh.engine.kv_cache.block_events import BlockEventLog, BlockEvents, StoredBlock
from pdmesh.engine.kv_cache.block_pool import BlockChanges, BlockLog
from pdmesh.engine.kv_cache.streams import streams_of
from pdmesh.engine.loader.builder import Progress
from pdmesh.engine.loop import EngineLoop
from pdmesh.engine.outputs import CoreSeconds, EngineStats, StepResult
from pdmesh.engine.request import EngineRequest
from pdmesh.engine.request_validation import Limits
from pdmesh.engine.sampling.sampler import Sampler
from pdmesh.planning.latency_model import USUAL_CONTEXT, Hardware, LatencyModel, prior_of
from pdmesh.worker.config import WorkerConfig, bind
from pdmesh.worker.engines.base import EngineEvents, EngineFacts, Lack, PreparedWeights, shape_of
from pdmesh.worker.engines.vllm_settings import engine_args, environment
from pdmesh_vllm.adapters import AdapterTable, VllmAdapters, load_all
from pdmesh_vllm.calibration import OUTPUT_TOKENS, PROMPT_TOKENS, measured_steps, slowdown
from pdmesh_vllm.core import Sample, VllmCore
from pdmesh_vllm.kv_pool import JoinedPool, adopt
from pdmesh_vllm.loading import (
    LoadedCore,
    cost_of,
    dtype_name,
    eos_of,
    hash_of,
    is_batch_invariant,
    kv_shape,
    layout_name,
    load_core,
    numeric_mode,
)
from pdmesh_vllm.prefix_cache import PrefixIndex
from pdmesh_vllm.staging import raw_blocks, stage, zero

logger = logging.getLogger(__name__)
LACKS = frozenset({Lack.CHOICES_HANDOFF, Lack.DRAFT_STATES, Lack.EMBEDDINGS, Lack.PACES, Lack.PROMPT_SHARES, Lack.RETENTION})


class VllmEngine:
    """Satisfy `WorkerEngine` with an EngineCore. It has one thread, which `open` starts; after `stop` it may be opened again."""

    def __init__(self, loaded: LoadedCore, *, num_threads: int = 0, max_adapters: int = 0, shared: bool = True) -> None:
        """`shared`: other processes may map the KV pool, if it is in the host's memory. Raises ValueError for a model whose KV
        cannot be handed off."""
        self.loaded = loaded
        self._num_threads = num_threads
        self.device = next(iter(loaded.link.caches.values())).device
        self.memory: KVMemory
        if self.device.type == "cpu":
            self.memory = pool = loaded.ranks.pool if loaded.ranks is not None else adopt(loaded.link.caches, shared=shared)
            clear = pool.zero
        else:
            blocks = raw_blocks(loaded.link.caches)
            self.memory, clear = stage(blocks, streams_of(self.device)), partial(zero, blocks)
        self.fp8_scales: FP8Scales = ()
        self.pacer = None
        self.sharing = None  # its blocks are found by hashes of its own
        self.facts = facts_of(loaded)
        self.index = PrefixIndex()
        loaded.core.scheduler.kv_event_publisher = self.index
        self.table = AdapterTable(max_adapters)
        limits = limits_of(self.facts)
        self.core = VllmCore(
            loaded.core,
            loaded.link,
            limits,
            sample=sampler(self.device, num_threads, self.facts.max_num_seqs),
            lora_of=self.table.of,
            admit_lora=self.table.admit,
            index=self.index,
            zero=clear,
        )
        if isinstance(self.memory, StagedMemory):
            self.core.exports.signal.marks = self.memory.marks
        self._loop: EngineLoop[VllmCore] | None = None
        self._limits: MachineLimits | None = None
        self._first_steps: list[StepResult] = []
        self.adapters = VllmAdapters(self.table)

    def calibrate(self) -> None:
        """Run a few steps, by which the latency model begins with the engine's own speed. Call it before `open`."""
        facts = self.facts
        num_tokens = max(1, min(PROMPT_TOKENS, facts.max_num_batched_tokens, facts.max_context - OUTPUT_TOKENS))
        self._first_steps = measured_steps(self.core, num_tokens, facts.vocab_size)

    # What the services call.

    async def reserve(self, request: EngineRequest) -> ReservedBlocks | None:
        return await asyncio.wrap_future(await self.calls.call(lambda core: core.reserve(request)))

    async def restate(self, request_id: str, request: EngineRequest) -> ReservedBlocks | None:
        return await asyncio.wrap_future(await self.calls.call(lambda core: core.restate(request_id, request)))

    async def start(
        self,
        request_id: str,
        first_tokens: Mapping[int, int],
        draft_states: Mapping[int, bytes] = NO_STATES,
        *,
        is_exact: bool = True,  # not used: vLLM takes KV from workers with its own layout only, which have no tiers
    ) -> None:
        await self.calls.call(lambda core: core.start(request_id, first_tokens))

    async def run_local(self, request_id: str, request: EngineRequest) -> int:
        return await self.calls.call(lambda core: core.run_local(request_id, request))

    async def reserve_local(self, request: EngineRequest) -> tuple[ReservedBlocks, int] | None:
        return await self.calls.call(lambda core: core.reserve_local(request))

    async def add(self, request: EngineRequest) -> bool:
        return await self.calls.call(lambda core: core.add(request))

    async def release(self, request_id: str) -> bool:
        return await self.calls.call(lambda core: core.release(request_id))

    async def stats(self) -> EngineStats:
        return await self.calls.call(VllmCore.stats)

    # What the worker calls.

    @property
    def calls(self) -> EngineLoop[VllmCore]:
        """Return the thread's queue. Call it only after `open`."""
        assert self._loop is not None, "the engine has not been opened"
        return self._loop

    def prefix_cache(self, max_changes: int) -> VllmPrefixCache:
        return VllmPrefixCache(self, max_changes)

    def block_events(self) -> VllmBlockEvents:
        return VllmBlockEvents(self)

    async def release_retained(self, tenant: str, session: str) -> int:
        return 0  # Lack.RETENTION

    async def load_weights(self, folder: str) -> PreparedWeights:
        raise WeightsRefused("model: vLLM as the engine of a worker takes no other weights; start a worker with them")

    def holds_weights(self, weights_hash: str) -> bool:
        return False

    async def take_weights(self, prepared: PreparedWeights) -> float:
        raise AssertionError("nothing was loaded")

    async def pause(self) -> None:
        await self.calls.pause()
        await self.calls.call(lambda core: core.set_paused(is_paused=True))

    async def resume(self) -> None:
        await self.calls.call(lambda core: core.set_paused(is_paused=False))
        await self.calls.resume()

    def check_sleep(self) -> None:
        raise SleepRefused("state: vLLM as the engine of a worker does not sleep; pause it, or stop the worker")

    async def fall_asleep(self) -> int:
        raise AssertionError("it was asked before whether it sleeps")

    async def wake(self) -> None:
        return  # it is never asleep

    def first_stats(self) -> EngineStats:
        return self.core.stats()

    async def open(self, events: EngineEvents, cpus: Sequence[int]) -> LatencyModel:
        def on_failure(error: BaseException) -> None:
            self.core.abandon(f"the engine failed: {error!r}")
            events.on_failure(error)

        self._loop = self.adapters.calls = EngineLoop(self.core, events.on_step, on_failure, events.on_ready)
        self._loop.start(asyncio.get_running_loop())
        self._watch_ranks(on_failure)
        await self._loop.call(lambda _core: bind(cpus))
        self._limits = await self._loop.call(lambda _core: self._measured())
        prior = prior_of(
            Hardware(self._limits.operations_per_s, self._limits.bytes_per_s, 0.0),
            shape_of(self.facts.cost),
            chunk=self.facts.max_num_batched_tokens,
            batch=self.facts.max_num_seqs,
            context=min(USUAL_CONTEXT, self.facts.max_context),
        )
        return slowdown(self._first_steps, prior).applied(prior)

    def _watch_ranks(self, on_failure: Callable[[BaseException], None]) -> None:
        """Report a rank that ends while no step runs: a step fails by itself."""
        if self.loaded.ranks is None:
            return
        loop, died = asyncio.get_running_loop(), EngineStopped("a rank of vLLM has ended")
        executor: Any = self.loaded.core.model_executor
        executor.register_failure_callback(lambda: loop.call_soon_threadsafe(on_failure, died))

    def limits(self) -> MachineLimits | None:
        return self._limits

    def notify_every(self, num_layers: int) -> None:
        self.core.exports.signal.notify_every(num_layers)

    def expert_counts(self) -> Tensor | None:
        return None

    def core_seconds(self) -> CoreSeconds | None:
        return None

    async def stop(self) -> None:
        if self._loop is not None:
            await self._loop.stop()
            self.core.abandon("the engine loop was stopped")

    def close(self) -> None:
        self.loaded.close()
        if isinstance(self.memory, (JoinedPool, StagedMemory)):
            self.memory.close()

    def _measured(self) -> MachineLimits:
        return measure_limits(self.facts.cost.backend, self.facts.cost.numbers, self.device.type, self._num_threads)


class VllmPrefixCache:
    """Satisfy `PrefixCache` with vLLM's KV events."""

    def __init__(self, engine: VllmEngine, max_changes: int) -> None:
        self._engine = engine
        engine.index.log = self._log = BlockLog(max_changes) if max_changes else None

    @property
    def has_changes(self) -> bool:
        return self._log is not None and self._log.pending

    async def take_changes(self) -> BlockChanges | None:
        return await self._engine.calls.call(lambda core: core.index.take())

    async def blocks(self) -> tuple[int, tuple[bytes, ...]]:
        return await self._engine.calls.call(lambda core: core.index.blocks())


class VllmBlockEvents:
    """Satisfy `BlockEventSource` with vLLM's KV events, in the names of the mesh."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        engine.index.events = self._log = BlockEventLog(nullcontext())  # written and read on the engine's thread

    @property
    def has_changes(self) -> bool:
        return self._log.pending

    async def take(self) -> BlockEvents | None:
        return await self._engine.calls.call(lambda _core: self._log.take())

    async def take_all(self) -> tuple[BlockEvents | None, tuple[StoredBlock, ...]]:
        return await self._engine.calls.call(lambda _core: self._log.take_all())


def sampler(device: torch.device, num_threads: int, num_seqs: int) -> Sample:
    """Return the function that draws: our kernels' for the device, where they run, else torch's operators."""
    if device.type != "cpu":
        if why_not_here(device.type):
            return Sampler().sample
        from pdmesh.engine.kernels.triton.sampling.sampler import DeviceSampler  # imports triton

        return DeviceSampler(num_seqs=num_seqs).sample
    try:
        return NativeSampler(library.shared_library(), num_threads or 1).sample
    except (OSError, RuntimeError, ValueError) as error:
        logger.warning("tokens are drawn by torch's operators, which is slower: %s", error)
        return Sampler().sample


def facts_of(loaded: LoadedCore) -> EngineFacts:
    """Return the facts about a loaded EngineCore."""
    config, caches = loaded.config, loaded.link.caches
    first, model = next(iter(caches.values())), config.model_config
    num_blocks, num_kv_heads, block_size, twice_dim = kv_shape(caches)
    return EngineFacts(
        name="vllm",
        model=model.model,
        weights_hash=hash_of(config),
        numeric_mode=numeric_mode(config),
        num_layers=len(caches),
        num_kv_heads=num_kv_heads,
        head_dim=twice_dim // 2,
        block_size=block_size,
        kv_dtype=dtype_name(first.dtype),
        arrangement=layout_name(config, caches),
        num_blocks=num_blocks - 1,  # the first one is vLLM's own
        vocab_size=model.get_vocab_size(),
        max_context=min(model.max_model_len, (num_blocks - 1) * block_size),
        max_num_seqs=config.scheduler_config.max_num_seqs,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        eos_token_ids=eos_of(config),
        cost=cost_of(loaded),
        lacks=LACKS if is_batch_invariant(first.device.type) else LACKS | {Lack.REPRODUCIBLE},
    )


def limits_of(facts: EngineFacts) -> Limits:
    """Return what bounds a request."""
    return Limits(
        block_size=facts.block_size,
        num_blocks=facts.num_blocks,
        max_num_seqs=facts.max_num_seqs,
        max_context=facts.max_context,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
    )


def load_engine(config: WorkerConfig, progress: Progress) -> VllmEngine:
    """Load vLLM for a worker, on a thread of its own. Raises ValueError ("field: what is wrong") or OSError."""
    progress(0.0, "loading vLLM: compiling takes up to a minute or two")
    settings = config.engine_config
    os.environ.update(environment(config))
    from vllm.engine.arg_utils import EngineArgs  # imports vLLM, which reads its variables then

    loaded = load_core(engine_args(config, {field.name for field in fields(EngineArgs)}))
    engine = VllmEngine(
        loaded, num_threads=settings.num_threads, max_adapters=settings.num_adapter_slots, shared=settings.kv_shared
    )
    load_all(engine.core, engine.table, [(name, Path(folder)) for name, folder in map(named_folder, settings.lora)])
    engine.adapters.at_start = engine.table.loaded()
    progress(0.0, "measuring steps")
    engine.calibrate()
    return engine
