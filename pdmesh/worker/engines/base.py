"""What a worker needs of an engine beyond what its services do: facts, memory for transports, measurements, life cycle.

What an engine cannot do it declares (`Lack`): the worker registers that, routers plan around it, and where that is impossible a
client is refused with the name.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from torch import Tensor

from kvtransfer.conversion import FP8Scales
from kvtransfer.manifest import KVMemory
from pdmesh.adapter_id import AdapterId
from pdmesh.engine.hardware import MachineLimits, ModelCost
from pdmesh.engine.interface import KVSharing, ServingEngine
from pdmesh.engine.kv_cache.block_events import BlockEvents, StoredBlock
from pdmesh.engine.kv_cache.block_pool import BlockChanges
from pdmesh.engine.outputs import CoreSeconds, EngineStats, KVReady, StepResult
from pdmesh.planning.latency_model import LatencyModel, ModelShape
from pdmesh.v1 import worker_pb2


class Lack(enum.Enum):
    """Name what an engine cannot do. The values are those of `worker_pb2.EngineLack`."""

    CHOICES_HANDOFF = worker_pb2.ENGINE_LACK_CHOICES_HANDOFF  # several choices of a request in one hand-off
    DRAFT_STATES = worker_pb2.ENGINE_LACK_DRAFT_STATES  # hidden states for draft proposers travel with the first token
    PACES = worker_pb2.ENGINE_LACK_PACES  # steps hold back prompts so that running sequences keep their TPOT objective
    EMBEDDINGS = worker_pb2.ENGINE_LACK_EMBEDDINGS  # pooled hidden states of a prompt
    REPRODUCIBLE = worker_pb2.ENGINE_LACK_REPRODUCIBLE  # equal logits for equal input, whatever else is in the batch
    RETENTION = worker_pb2.ENGINE_LACK_RETENTION  # blocks that requests ask to retain are evicted after all others
    PROMPT_SHARES = worker_pb2.ENGINE_LACK_PROMPT_SHARES  # a prompt much shorter than the oldest one shares its steps


@dataclass(frozen=True)
class EngineFacts:
    """Hold what does not change while an engine runs. Sizes in tokens, but for `num_blocks` and `max_num_seqs`."""

    name: str  # of the engine, as in `ENGINES` (registry.py); people see it, nothing decides by it
    model: str  # the folder or file
    weights_hash: str
    numeric_mode: str
    num_layers: int
    num_kv_heads: int  # in the pool, of all ranks together
    head_dim: int
    block_size: int
    kv_dtype: str
    arrangement: str  # of a block's numbers: see kvtransfer/conversion.py
    num_blocks: int
    vocab_size: int
    max_context: int  # the longest sequence of prompt and output
    max_num_seqs: int
    max_num_batched_tokens: int
    eos_token_ids: frozenset[int]
    cost: ModelCost
    lacks: frozenset[Lack] = frozenset()


@dataclass(frozen=True)
class EngineEvents:
    """Hold what an engine calls, all on the event loop: the result of each step; the KV of prefill_only requests that is final
    in the middle of one; and, at most once, the error that ended the engine."""

    on_step: Callable[[StepResult], None]
    on_ready: Callable[[tuple[KVReady, ...]], None]
    on_failure: Callable[[BaseException], None]


class PreparedWeights(Protocol):
    """Weights that were loaded and not taken yet."""

    @property
    def weights_hash(self) -> str: ...


class StepPacer(Protocol):
    """Take the fitted cost of steps, by which an engine limits the prompt tokens of a step."""

    def set_cost(self, model: LatencyModel) -> None: ...


Loaded: TypeAlias = "Sequence[tuple[AdapterId, int]]"  # adapters with their ranks, by name


class EngineAdapters(Protocol):
    """Load and unload LoRA adapters."""

    @property
    def max_adapters(self) -> int:
        """Return how many may be loaded at once; 0: none."""

    @property
    def at_start(self) -> Loaded:
        """Return the adapters that were loaded with the engine."""

    async def load(self, name: str, folder: Path) -> Loaded:
        """Load, and return all that requests may ask for now. Raises AdapterRefused (no place, or the name is taken), ValueError
        or OSError about the folder."""

    async def unload(self, name: str) -> int:
        """Take no new requests with it; return how many still run."""


class PrefixCache(Protocol):
    """Tell which blocks the prefix cache holds."""

    @property
    def has_changes(self) -> bool:
        """Return whether `take_changes` would return something; cheap, on the event loop."""

    async def take_changes(self) -> BlockChanges | None:
        """Return what it gained and lost since the last call."""

    async def blocks(self) -> tuple[int, tuple[bytes, ...]]:
        """Return the hashes of all blocks, and the sequence number of the last changes that they contain."""


class BlockEventSource(Protocol):
    """Tell which blocks the prefix cache holds, with their token ids, to one reader."""

    @property
    def has_changes(self) -> bool:
        """Return whether `take` would return something; cheap, on the event loop."""

    async def take(self) -> BlockEvents | None:
        """Return what it gained and lost since the last call of this or `take_all`. Raises EngineStopped."""

    async def take_all(self) -> tuple[BlockEvents | None, tuple[StoredBlock, ...]]:
        """Return the same, and all blocks, these changes included. Raises EngineStopped."""


def shape_of(cost: ModelCost) -> ModelShape:
    """Return the cost as the latency model's prior takes it."""
    return ModelShape(
        num_layers=cost.num_layers,
        num_weights=cost.num_weights,
        num_head_weights=cost.num_head_weights,
        weight_bytes=cost.weight_bytes,
        kv_bytes_per_token=cost.kv_bytes_per_token,
        attention_operations=cost.attention_operations,
        expert_bytes=cost.expert_bytes,
        num_experts=cost.num_experts,
        top_k=cost.top_k,
        reaches=cost.reaches,
    )


class WorkerEngine(ServingEngine, Protocol):
    """An engine as a worker composes it. It is loaded when the worker gets it, and belongs to the worker from `open` on."""

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def memory(self) -> KVMemory:
        """Return the KV pool as transports see it, with all heads; a StagedMemory where it cannot be viewed."""

    @property
    def fp8_scales(self) -> FP8Scales:
        """Return the scales of KV in float8; empty: none."""

    @property
    def adapters(self) -> EngineAdapters: ...

    @property
    def pacer(self) -> StepPacer | None: ...

    @property
    def sharing(self) -> KVSharing | None:
        """Return what moves blocks of the prefix cache from and to other workers; None: the engine cannot."""

    def prefix_cache(self, max_changes: int) -> PrefixCache:
        """Return the prefix cache, which logs at most `max_changes` between two calls (0: it logs none). Call it once, before
        `open`."""

    def block_events(self) -> BlockEventSource:
        """Return the prefix cache with token ids, which the engine keeps from then on. Call it once at most, before `open`."""

    async def release_retained(self, tenant: str, session: str) -> int:
        """Give up what is retained for a session; return how many blocks that were (0: none, or the engine lacks retention).
        Requests of it that are in the engine retain nothing any more, later ones do."""

    async def load_weights(self, folder: str) -> PreparedWeights:
        """Load other weights of the same model beside the present ones. Raises WeightsRefused, ValueError, OSError or
        MemoryError."""

    def holds_weights(self, weights_hash: str) -> bool:
        """Return whether requests may ask for these: the present ones, or earlier ones that have not been dropped."""

    async def take_weights(self, prepared: PreparedWeights) -> float:
        """Compute with these what comes from now on, and change `facts`; return the seconds for which no step could run. Raises
        WeightsRefused."""

    async def pause(self) -> None:
        """Run no step from now on, everything else as before. It returns when the step under way has ended; idempotent."""

    async def resume(self) -> None:
        """Run steps again; idempotent."""

    def check_sleep(self) -> None:
        """Raise SleepRefused where the engine cannot sleep, whatever it does now."""

    async def fall_asleep(self) -> int:
        """Give the memory of KV and weights back while paused and without requests; return the bytes. Raises SleepRefused,
        InvalidState."""

    async def wake(self) -> None:
        """Take the memory again, before `resume`; idempotent. Raises ValueError or OSError when the weights cannot be read: it
        stays asleep."""

    def first_stats(self) -> EngineStats:
        """Return the counts before the first step. Call it before `open`."""

    async def open(self, events: EngineEvents, cpus: Sequence[int]) -> LatencyModel:
        """Start to step, in threads bound to `cpus` (none: any cores); return the latency model before the first step."""

    def limits(self) -> MachineLimits | None:
        """Return the limits of the machine that were measured by `open`; None before it."""

    def notify_every(self, num_layers: int) -> None:
        """Set the number of layers of a step between two calls of `on_ready`, from the next step on."""

    def expert_counts(self) -> Tensor | None:
        """Return the tokens of each expert, [layers, num_experts] int64, since start; None: it has no experts, or cannot tell."""

    def core_seconds(self) -> CoreSeconds | None:
        """Return for how long, since start, others held its cores and it others'; None: it shares none."""

    async def stop(self) -> None:
        """Run what was called before, and end the stepping; idempotent. Calls from then on raise EngineStopped."""

    def close(self) -> None:
        """Free the memory, after `stop`; idempotent."""
