"""An engine on a model that is a pure function of the token history, and the oracle that says what it must answer.

The mock keeps no history of its own: it writes each token, and a running checksum of the tokens before it, into the KV slots that
it is told, and reads the whole context back through the block tables. A wrong slot, a missing copy-on-write, a prefix block that
holds something else, a chunk that starts at the wrong place: each gives wrong tokens or fails at once.
"""

from __future__ import annotations

import hashlib
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.kv_cache.events import LayerReadiness
from pdmesh.engine.loader.loader import LoadedModel
from pdmesh.engine.models.config import ModelConfig
from pdmesh.engine.models.registry import model_config
from pdmesh.engine.outputs import FinishReason, StepResult
from pdmesh.engine.request import EngineRequest, finish_reason
from pdmesh.engine.runner.batch import StepBatch
from pdmesh.engine.sampling.sampler import Sampler, SampleRow
from pdmesh.engine.speculation.cost_curve import CostCurve
from pdmesh.engine.speculation.proposer import Proposer

VOCAB_SIZE = 24
EOS = 3
NUM_LAYERS = 2
_PRIME = 65521  # below 2**24: exact in float32


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(parent + np.asarray(token_ids, dtype=np.int64).tobytes(), digest_size=16).digest()


def mock_logits(token_ids: Sequence[int]) -> Tensor:
    """[vocab] float32 after this history."""
    seed = zlib.crc32(np.asarray(token_ids, dtype=np.int64).tobytes())
    mixed = np.arange(VOCAB_SIZE, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy((mixed >> np.uint64(40)).astype(np.float32) / 2**22)


class MockModel:
    """`forward` of a model whose attention is reading back what was written."""

    num_forwards = 0

    def forward(self, batch: StepBatch, kv: Tensor, signal: LayerReadiness | None = None, hidden: Tensor | None = None) -> Tensor:
        """Logits [R, vocab] float32 of the batch's logits rows; their hidden states hold the tokens' positions."""
        if hidden is not None:
            hidden.copy_(batch.positions[batch.logits_rows][:, None].expand(hidden.shape))
        self.num_forwards += 1
        slots = batch.slot_mapping.tolist()
        assert len(set(slots)) == len(slots), "two tokens of a step are written to one slot"
        assert batch.num_tokens == len(slots) == len(batch.token_ids) == len(batch.positions) > 0
        assert len(batch.block_tables) == batch.num_seqs == len(batch.query_starts) - 1
        for index in range(batch.num_seqs):
            self._write(batch, index, kv)
        return torch.stack([self._logits_of(batch, row, kv) for row in batch.logits_rows.tolist()] or [torch.zeros(VOCAB_SIZE)])

    def _write(self, batch: StepBatch, index: int, kv: Tensor) -> None:
        start, end = batch.query_starts[index : index + 2]
        assert batch.positions[start:end].tolist() == list(
            range(batch.context_lens[index] - (end - start), batch.context_lens[index])
        )
        place = _Place(batch, index, kv)
        for row in range(start, end):
            position, token_id = int(batch.positions[row]), int(batch.token_ids[row])
            slot = place.slot(position)
            assert slot == int(batch.slot_mapping[row]), f"position {position} goes to slot {slot}"
            before = place.read(position - 1)[1] if position else 0
            block_id, offset = divmod(slot, kv.shape[3])
            kv[:, 0, block_id, offset] = token_id
            kv[:, 1, block_id, offset] = _next_checksum(before, token_id)

    def _logits_of(self, batch: StepBatch, row: int, kv: Tensor) -> Tensor:
        index = next(i for i in range(batch.num_seqs) if batch.query_starts[i] <= row < batch.query_starts[i + 1])
        place, token_ids, checksum = _Place(batch, index, kv), [], 0
        for position in range(int(batch.positions[row]) + 1):
            token_id, written = place.read(position)
            checksum = _next_checksum(checksum, token_id)
            assert written == checksum, f"position {position} of sequence {index} holds the KV of another history"
            token_ids.append(token_id)
        return mock_logits(token_ids)


def _next_checksum(before: int, token_id: int) -> int:
    return (before * 31 + token_id + 7) % _PRIME


def _slot(table: list[int], position: int, kv: Tensor) -> int:
    block_size = kv.shape[3]
    return table[position // block_size] * block_size + position % block_size


class _Place:
    """Where the KV of one sequence of a batch lies."""

    def __init__(self, batch: StepBatch, index: int, kv: Tensor) -> None:
        self._table, self._tail, self._kv = batch.block_tables[index], batch.tails.get(index), kv
        self._content = kv.numpy()  # the same memory; a slot of it is read many times faster

    def slot(self, position: int) -> int:
        if self._tail is not None and position >= self._tail.first:
            return self._tail.slots[position - self._tail.first]
        return _slot(self._table, position, self._kv)

    def read(self, position: int) -> tuple[int, int]:
        block_id, offset = divmod(self.slot(position), self._kv.shape[3])
        content = self._content[:, :, block_id, offset]
        assert bool((content == content[:1, :, :1, :1]).all()), "layers or heads of one slot differ"
        return int(content[0, 0, 0, 0]), int(content[0, 1, 0, 0])


def write_kv(engine: Engine, block_ids: Sequence[int], token_ids: Sequence[int], start: int = 0) -> None:
    """What a push does: the KV of positions `start` on, written into reserved blocks from outside."""
    checksum, kv = 0, engine.kv.tensor
    for position, token_id in enumerate(token_ids):
        checksum = _next_checksum(checksum, token_id)
        if position >= start:
            block_id, offset = divmod(_slot(list(block_ids), position, kv), kv.shape[3])
            kv[:, 0, block_id, offset], kv[:, 1, block_id, offset] = token_id, checksum


def mock_model_config(max_context: int) -> ModelConfig:
    return model_config(
        {
            "model_type": "llama",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 4,
            "intermediate_size": 4,
            "num_hidden_layers": NUM_LAYERS,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": max_context,
            "eos_token_id": EOS,
        }
    )


class FreeRows(CostCurve):
    """Whatever is guessed is verified: how long the mock's steps take says nothing."""

    def step_s(self, num_rows: int) -> float:
        return 1.0

    def least_row_s(self, num_rows: int) -> float:
        return 0.0

    def saw(self, num_rows: int, attention_s: float, step_s: float) -> CostCurve:
        return self


def make_engine(
    *,
    num_blocks: int = 16,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_context: int = 64,
    prefix_caching: bool = True,
    proposers: Sequence[Proposer] = (),
    draft_length: int = 0,
    steps_ahead: bool = True,
    model: MockModel | None = None,
    max_retained_share: float = 0.25,
    clock: Callable[[], float] = time.monotonic,
) -> Engine:
    """An engine on the mock model, or on one like it."""
    config = EngineConfig(
        model="mock",
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        prefix_caching=prefix_caching,
        draft_length=draft_length,
        steps_ahead=steps_ahead,
        max_retained_share=max_retained_share,
    )
    loaded = LoadedModel(
        config=mock_model_config(max_context),
        model=model or MockModel(),  # type: ignore[arg-type]  # it has the one method that the engine calls
        weights_hash="mock",
        dtype=torch.float32,
        kv_dtype=torch.float32,
        numeric_mode="mock",
    )
    engine = open_engine(config, loaded, proposers, clock)
    if engine.speculator is not None:
        engine.speculator.curve = FreeRows((1,), (1.0,))
    return engine


def open_engine(
    config: EngineConfig,
    loaded: LoadedModel,
    proposers: Sequence[Proposer] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Engine:
    """An engine whose KV pool (a file descriptor) is closed when the test has dropped it."""
    engine = Engine(config, hash_block=hash_block, loaded=loaded, proposers=proposers, clock=clock)
    weakref.finalize(engine, engine.kv.close)
    return engine


@dataclass(frozen=True)
class Answer:
    """What one choice must get: new tokens behind its history, and why it ended."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None


def answer(request: EngineRequest, choice: int, *, max_context: int = 64, max_new: int | None = None) -> Answer:
    """The naive oracle: one token at a time, the whole history through mock_logits each time."""
    output = list(request.emitted[choice]) if request.emitted else []
    first, reason = len(output), None
    while reason is None and (max_new is None or len(output) < first + max_new):
        row = SampleRow(request.sampling, choice, len(output), request.prompt, tuple(output), frozenset({EOS}))
        [drawn] = Sampler().sample(mock_logits([*request.prompt, *output])[None], [row])
        output.append(drawn.token_id)
        reason = finish_reason(
            request.sampling,
            prompt_length=len(request.prompt),
            output=output,
            eos_token_ids={EOS},
            max_context=max_context,
        )
    return Answer(tuple(output[first:]), reason)


@dataclass
class Collected:
    """Tokens of one choice as updates brought them."""

    first_index: int
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class Collector:
    """Gathers updates by (request id, choice) and insists on order: each index once, nothing behind the end."""

    def __init__(self) -> None:
        self.choices: dict[tuple[str, int], Collected] = {}
        self.started: list[str] = []

    def take(self, result: StepResult | None) -> None:
        for update in result.updates if result else ():
            got = self.choices.setdefault((update.request_id, update.choice), Collected(update.index))
            assert got.finish_reason is None, f"{update} comes behind the end"
            assert update.index == got.first_index + len(got.token_ids), f"{update} is out of order"
            got.token_ids += update.token_ids
            got.finish_reason = update.finish_reason
        self.started += [started.request_id for started in result.started] if result else []

    def answer(self, request_id: str, choice: int = 0) -> Answer:
        got = self.choices.get((request_id, choice), Collected(0))
        return Answer(tuple(got.token_ids), got.finish_reason)


def run_to_end(engine: Engine, collector: Collector | None = None, max_steps: int = 2000) -> Collector:
    """Steps until the engine has nothing to do."""
    collector = collector or Collector()
    for _ in range(max_steps):
        result = engine.step()
        if result is None:
            return collector
        collector.take(result)
    raise AssertionError(f"not idle after {max_steps} steps: {engine.stats()}")
