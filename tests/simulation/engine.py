"""The real engine (scheduler, block pool, reservations, prefix cache), in virtual time, on a model that is a function of KV.

The model keeps no history: it writes each token and a checksum of those before it into the KV slots that it is told, and reads
the whole context back through the block tables. KV that came from another worker, a cached prefix or a copy gives an error at
once if a single slot of it is wrong.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine, EngineStep
from pdmesh.engine.errors import EngineStopped
from pdmesh.engine.hardware import MachineLimits
from pdmesh.engine.kv_cache.events import LayerReadiness
from pdmesh.engine.loader.loader import LoadedModel
from pdmesh.engine.models.registry import model_config
from pdmesh.engine.runner.batch import StepBatch
from pdmesh.planning.latency_model import LatencyModel
from pdmesh.text.block_hash import hash_block
from pdmesh.worker.engines.base import EngineEvents
from pdmesh.worker.engines.builtin import BuiltinEngine
from tests.simulation.world import Process, current_process

NUM_LAYERS = 2
VOCAB_SIZE = 320
_PRIME = 65521  # below 2**24: exact in float32
_MULTIPLIERS = (np.arange(VOCAB_SIZE, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)

STEP = LatencyModel(
    fixed_s=3e-3, per_prefill_token_s=4e-5, per_prefill_context_s=1e-9, per_sequence_s=2e-4, per_context_token_s=1e-7
)


Checksum = TypeVar("Checksum", int, np.ndarray[Any, Any])


class WrongKv(AssertionError):
    """A slot holds the KV of another history."""


def logits_of(checksum: int, length: int) -> np.ndarray[Any, Any]:
    """Return [vocab] float32 after a history with this checksum."""
    seed = np.uint64(zlib.crc32(checksum.to_bytes(4, "little") + length.to_bytes(4, "little")))
    mixed = (_MULTIPLIERS ^ seed) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((mixed >> np.uint64(40)).astype(np.float32)) / np.float32(2**22)


def checksum_after(checksum: Checksum, token_id: Checksum) -> Checksum:
    """Return the checksum after one more token; arrays: of each history with its token."""
    after: Checksum = (checksum * 31 + token_id + 7) % _PRIME
    return after


class HashModel:
    """`forward` of a model whose attention is reading back what was written."""

    def forward(self, batch: StepBatch, kv: Tensor, signal: LayerReadiness | None = None, hidden: Tensor | None = None) -> Tensor:
        """Return logits [R, vocab] float32 of the batch's logits rows."""
        pool = kv.numpy()
        ends: dict[int, tuple[int, int]] = {}
        wanted = set(batch.logits_rows.tolist())
        for index in range(batch.num_seqs):
            self._compute(batch, index, pool, wanted, ends)
        rows = [logits_of(*ends[row]) for row in batch.logits_rows.tolist()]
        return torch.from_numpy(np.stack(rows)) if rows else torch.zeros(0, VOCAB_SIZE)

    def _compute(
        self, batch: StepBatch, index: int, pool: np.ndarray[Any, Any], wanted: set[int], ends: dict[int, tuple[int, int]]
    ) -> None:
        start, end = int(batch.query_starts[index]), int(batch.query_starts[index + 1])
        total = int(batch.context_lens[index])
        size = pool.shape[3]
        positions = np.arange(total)
        table = np.asarray(batch.block_tables[index], dtype=np.int64)
        blocks, offsets = table[positions // size], positions % size
        first = total - (end - start)
        checksum = self._read(pool, blocks[:first], offsets[:first])
        for row, position in zip(range(start, end), range(first, total), strict=True):
            token_id = int(batch.token_ids[row])
            checksum = checksum_after(checksum, token_id)
            pool[:, 0, blocks[position], offsets[position]] = token_id
            pool[:, 1, blocks[position], offsets[position]] = checksum
            if row in wanted:
                ends[row] = (checksum, position + 1)

    def _read(self, pool: np.ndarray[Any, Any], blocks: np.ndarray[Any, Any], offsets: np.ndarray[Any, Any]) -> int:
        """Return the checksum of a history, read from its slots [length]; each must follow from the one before."""
        if not len(blocks):
            return 0
        content = pool[:, :, blocks, offsets]  # [layers, 2, length, heads, dim]
        if not (content == content[:1, :, :, :1, :1]).all():
            raise WrongKv("layers or heads of one slot differ")
        token_ids, written = content[0, :, :, 0, 0].astype(np.int64)
        expected = checksum_after(np.concatenate(([0], written[:-1])), token_ids)
        if not np.array_equal(written, expected):
            raise WrongKv(f"position {int((written != expected).argmax())} holds the KV of another history")
        return int(written[-1])


def seconds_of(step: EngineStep) -> float:
    """Return the time that the kernels of a step take."""
    context = sum(piece.sequence.num_computed + piece.num_rows for piece in step.plan.pieces)
    return STEP.fixed_s + STEP.per_prefill_token_s * step.plan.num_tokens + STEP.per_context_token_s * context


def make_engine(
    folder: str, *, num_blocks: int, block_size: int, max_num_seqs: int, max_num_batched_tokens: int, kv_shared: bool = False
) -> Engine:
    """Return an engine on the model, whose folder has a tokenizer and a config.json."""
    config = EngineConfig(
        model=folder,
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        steps_ahead=False,
        num_threads=1,
        kv_shared=kv_shared,
    )
    loaded = LoadedModel(
        config=model_config(CONFIG),
        model=HashModel(),  # type: ignore[arg-type]  # it has the one method that the engine calls
        weights_hash="hash",
        dtype=torch.float32,
        kv_dtype=torch.float32,
        numeric_mode="hash",
    )
    return Engine(config, hash_block=hash_block, loaded=loaded, proposers=())


CONFIG: dict[str, object] = {
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 4,
    "intermediate_size": 4,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "eos_token_id": 300,
}


class VirtualThread:
    """What `EngineLoop` does, as a task: commands between steps, results when a step's time has passed.

    Other calls come while the kernels of a step run: they read and write the pool when their time has passed, or before, as the
    seed says."""

    def __init__(self, engine: Engine, events: EngineEvents) -> None:
        process = current_process()
        assert process is not None
        self._engine, self._events, self._process = engine, events, process
        self._commands: deque[tuple[Callable[[Engine], Any], asyncio.Future[Any]]] = deque()
        self._closed_reason: str | None = None
        self._wake = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def now(self, fn: Callable[[Engine], Any]) -> Any:
        if self._closed_reason is not None:
            raise EngineStopped(self._closed_reason)
        try:
            return fn(self._engine)
        finally:
            self._wake.set()

    async def call(self, fn: Callable[[Engine], Any]) -> Any:
        if self._closed_reason is not None:
            raise EngineStopped(self._closed_reason)
        future = asyncio.get_running_loop().create_future()
        self._commands.append((fn, future))
        self._wake.set()
        return await future

    async def stop(self) -> None:
        if self._closed_reason is None:
            self._closed_reason = "the engine loop was stopped"
            self._wake.set()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            while True:
                self._wake.clear()
                self._run_commands()
                if self._closed_reason is not None:
                    return
                if not await self._step():
                    await self._wake.wait()
        except Exception as error:  # noqa: BLE001  reported, never swallowed
            self._process.world.note("engine failed", self._process.name, repr(error))
            self._closed_reason = f"the engine failed: {error!r}"
            self._run_commands()
            self._events.on_failure(error)

    async def _step(self) -> bool:
        step = self._engine.schedule_step()
        if step is None:
            return False
        rng = self._process.world.rng
        jitter, is_early = 0.7 + 0.6 * rng.random(), rng.random() < 0.5
        if is_early:
            self._engine.run_step(step)
        await asyncio.sleep(seconds_of(step) * jitter * self._process.slowness)
        if not is_early:
            self._engine.run_step(step)
        self._events.on_step(self._engine.postprocess_step(step))
        return True

    def _run_commands(self) -> None:
        while self._commands:
            fn, future = self._commands.popleft()
            if future.done():
                continue
            if self._closed_reason is not None and "failed" in self._closed_reason:
                future.set_exception(EngineStopped(self._closed_reason))
                continue
            try:
                future.set_result(fn(self._engine))
            except Exception as error:  # noqa: BLE001  the caller gets it, whatever it is
                future.set_exception(error)


class SimulatedEngine(BuiltinEngine):
    """Our engine, stepping in virtual time."""

    async def open(self, events: EngineEvents, cpus: Sequence[int]) -> LatencyModel:
        self._loop = VirtualThread(self.engine, events)  # type: ignore[assignment]
        return STEP

    def limits(self) -> MachineLimits | None:
        return None


def process_of() -> Process:
    """Return the process whose code runs."""
    process = current_process()
    assert process is not None
    return process
