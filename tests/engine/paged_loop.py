"""The smallest loop that drives a model over a paged pool: no scheduler, so that model tests test the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.kernels.cpu.model import kv_head_size
from pdmesh.engine.kv_cache.pool import KVPool, KVShape
from pdmesh.engine.loader.loader import LoadedModel, load_model
from pdmesh.engine.runner.batch import StepBatch


@dataclass
class Chunk:
    """Tokens of one sequence to compute in a step; earlier ones (`num_computed`) are in the pool."""

    table: list[int]
    token_ids: Sequence[int]
    num_computed: int
    every_row: bool = False  # logits of all tokens, else of the last
    wanted: bool = True  # False: logits of none, as in the middle of a prompt


@dataclass
class PagedLoop:
    """A model with a pool of its own. Blocks are dealt out scattered, as they would be after a while of serving."""

    loaded: LoadedModel
    num_blocks: int = 512
    block_size: int = 16
    pool: KVPool = field(init=False)

    def __post_init__(self) -> None:
        config, dtype = self.loaded.config, self.loaded.kv_dtype
        head = kv_head_size(config.pool_dim, dtype)
        shape = KVShape(config.num_layers, self.num_blocks, self.block_size, config.pool_heads, head, dtype)
        device = getattr(self.loaded.model, "device", None)  # the CPU's backend has none
        self.pool = KVPool(shape, "cpu" if device is None else device.type)
        # What a pool holds before it is written must not matter; NaN shows it if it does, and these bytes are NaN in every
        # format (int8: -1 with a scale of NaN).
        self.pool.tensor.view(torch.uint8).fill_(0xFF)
        generator = torch.Generator().manual_seed(self.num_blocks)
        self._free = torch.randperm(self.num_blocks, generator=generator).tolist()

    def table(self, num_tokens: int) -> list[int]:
        return [self._free.pop() for _ in range(-(-num_tokens // self.block_size))]

    def release(self, table: list[int]) -> None:
        """Its blocks are the next to be dealt out, with what they hold."""
        self._free += table

    def fill_free_blocks(self, byte: int) -> None:
        self.pool.tensor.view(torch.uint8)[:, :, self._free] = byte

    def step(self, chunks: Sequence[Chunk]) -> Tensor:
        return self.loaded.model.forward(make_batch(chunks, self.block_size), self.pool.tensor)

    def step_into(self, chunks: Sequence[Chunk], hidden: Tensor) -> Tensor:
        return self.loaded.model.forward(make_batch(chunks, self.block_size), self.pool.tensor, None, hidden)

    def logits(self, token_ids: Sequence[int], chunk_size: int = 10**9) -> Tensor:
        """[len(token_ids), vocab]: logits of every token, computed in chunks."""
        table = self.table(len(token_ids))
        starts = range(0, len(token_ids), chunk_size)
        chunks = [Chunk(table, token_ids[start : start + chunk_size], start, every_row=True) for start in starts]
        return torch.cat([self.step([chunk]) for chunk in chunks])

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Greedy, all prompts in one batch: one step of prefill, then decode steps."""
        tables = [self.table(len(prompt) + num_tokens) for prompt in prompts]
        chunks = [Chunk(table, prompt, 0) for table, prompt in zip(tables, prompts, strict=True)]
        outputs: list[list[int]] = [[] for _ in prompts]
        for _ in range(num_tokens):
            for output, token in zip(outputs, self.step(chunks).argmax(-1).tolist(), strict=True):
                output.append(token)
            chunks = [
                Chunk(c.table, [out[-1]], c.num_computed + len(c.token_ids)) for c, out in zip(chunks, outputs, strict=True)
            ]
        return outputs


def make_batch(chunks: Sequence[Chunk], block_size: int) -> StepBatch:
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    rows: list[int] = []
    starts = [0]
    for chunk in chunks:
        first = len(token_ids)
        for offset, token in enumerate(chunk.token_ids):
            position = chunk.num_computed + offset
            token_ids.append(token)
            positions.append(position)
            slots.append(chunk.table[position // block_size] * block_size + position % block_size)
        starts.append(len(token_ids))
        if chunk.wanted:
            rows += range(first if chunk.every_row else len(token_ids) - 1, len(token_ids))
    return StepBatch(
        token_ids=torch.tensor(token_ids),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        query_starts=starts,
        context_lens=[chunk.num_computed + len(chunk.token_ids) for chunk in chunks],
        block_tables=[chunk.table for chunk in chunks],
        logits_rows=torch.tensor(rows, dtype=torch.int64),
    )


def load(folder: object, **overrides: object) -> LoadedModel:
    return load_model(EngineConfig(model=str(folder), **overrides))  # type: ignore[arg-type]
