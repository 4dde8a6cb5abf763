"""One variant of the engine under measurement: logits of whole windows, by prefill and by decode, and greedy text.

`window_logits` is the only place that knows how a model is called.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.engine_runs import GREEDY, run
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.kv_cache.block_pool import num_blocks_for
from pdmesh.engine.loader.loader import load_model
from pdmesh.engine.runner.batch import StepBatch
from pdmesh.text.block_hash import hash_block

# Tokens in a step of prefill. More than one step for a window, so that chunks after the first are measured too.
CHUNK = 128


@dataclass(frozen=True)
class Piece:
    """Tokens of one sequence in one step; the `num_computed` before them are in the pool. Slots are places for sequences."""

    slot: int
    token_ids: Sequence[int]
    num_computed: int


class Variant:
    """A loaded model in an engine that is idle whenever logits are asked for, so that the whole pool can be used here."""

    def __init__(self, folder: Path, overrides: Mapping[str, object], *, slot_tokens: int, num_slots: int) -> None:
        """`num_slots` sequences of `slot_tokens` tokens fit at once. `overrides` are fields of EngineConfig."""
        config = EngineConfig(**{"model": str(folder), **overrides})  # type: ignore[arg-type]
        self._blocks_per_slot = num_blocks_for(slot_tokens, config.block_size)
        self._config = replace(
            config,
            num_blocks=num_slots * self._blocks_per_slot,
            kv_memory_mb=0,
            max_num_seqs=CHUNK,  # a step that returns logits of all its tokens
            max_num_batched_tokens=CHUNK,
            prefix_caching=False,  # blocks are written here behind the allocator's back
            speculation="none",
        )
        self._loaded = load_model(self._config)
        self._engine = Engine(self._config, hash_block=hash_block, loaded=self._loaded)

    @property
    def numeric_mode(self) -> str:
        return self._engine.numeric_mode

    def window_logits(self, pieces: Sequence[Piece]) -> Tensor:
        """Logits [T, vocab] float32 of all T tokens of the pieces, in their order, by one step of the engine's model.

        May be a buffer that the next step writes to.
        """
        return self._loaded.model.forward(self._batch(pieces), self._engine.kv.tensor)

    def prefill(self, slot: int, token_ids: Sequence[int]) -> Tensor:
        """[len(token_ids), vocab]: the sequence from its beginning, in chunks."""
        logits: Tensor | None = None
        for start in range(0, len(token_ids), CHUNK):
            rows = self.window_logits([Piece(slot, token_ids[start : start + CHUNK], start)])
            logits = rows.new_empty(len(token_ids), rows.shape[1]) if logits is None else logits
            logits[start : start + rows.shape[0]] = rows
        if logits is None:
            raise ValueError("token_ids: empty; give at least one token")
        return logits

    def decode(self, windows: Sequence[Sequence[int]], starts: Sequence[int], steps: int) -> Tensor:
        """[sequence, step, vocab]: prefill of `start` tokens of each window, then the text's next tokens, one a step."""
        # Whatever an earlier window left behind must not stand in for keys that a decode step forgets to write.
        self._engine.kv.tensor.zero_()
        for slot, (window, start) in enumerate(zip(windows, starts, strict=True)):
            self.prefill(slot, window[:start])
        logits: Tensor | None = None
        for step in range(steps):
            places = [(slot, start + step) for slot, start in enumerate(starts)]
            rows = self.window_logits([Piece(slot, [windows[slot][place]], place) for slot, place in places])
            logits = rows.new_empty(len(windows), steps, rows.shape[1]) if logits is None else logits
            logits[:, step] = rows
        if logits is None:
            raise ValueError(f"steps: {steps}; give at least 1")
        return logits

    def greedy(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        """Tokens that the engine appends to each prompt, past any end of sequence; all prompts at once."""
        return run(self._engine, prompts, GREEDY.params(new_tokens, ignore_eos=True))

    def close(self) -> None:
        """Gives the KV memory back; the weights go with the object."""
        self._engine.kv.close()

    def _batch(self, pieces: Sequence[Piece]) -> StepBatch:
        block_size = self._config.block_size
        token_ids = [token for piece in pieces for token in piece.token_ids]
        places = [(p.slot, p.num_computed + i) for p in pieces for i in range(len(p.token_ids))]
        slot_tokens = self._blocks_per_slot * block_size
        starts = [0]
        for piece in pieces:
            starts.append(starts[-1] + len(piece.token_ids))
        return StepBatch(
            token_ids=torch.tensor(token_ids),
            positions=torch.tensor([position for _, position in places]),
            # A slot's blocks lie one after the other: here a token's place is its position.
            slot_mapping=torch.tensor([slot * slot_tokens + position for slot, position in places]),
            query_starts=starts,
            context_lens=[piece.num_computed + len(piece.token_ids) for piece in pieces],
            block_tables=[self._table(piece) for piece in pieces],
            logits_rows=torch.arange(len(token_ids)),
        )

    def _table(self, piece: Piece) -> list[int]:
        num_blocks = num_blocks_for(piece.num_computed + len(piece.token_ids), self._config.block_size)
        if num_blocks > self._blocks_per_slot:
            raise ValueError(f"slot_tokens: {piece.num_computed + len(piece.token_ids)} tokens do not fit into a slot")
        first = piece.slot * self._blocks_per_slot
        return list(range(first, first + num_blocks))
