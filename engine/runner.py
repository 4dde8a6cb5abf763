"""From a plan to drawn tokens: block copies, one forward pass, one draw per choice that reached its end."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.batch import StepBatch
from engine.blocks import num_blocks_for
from engine.exports import LayerSignal
from engine.grammar import Bits
from engine.sampling import SampledToken, SampleRow
from engine.scheduler import Piece, Plan
from engine.sequence import Sequence


class ForwardModel(Protocol):
    """What the runner needs of a model."""

    def forward(self, batch: StepBatch, kv: Tensor, signal: LayerSignal | None = None, hidden: Tensor | None = None) -> Tensor:
        """Writes the KV of the batch's T tokens into `kv`, telling `signal` of each layer; logits [R, vocab] float32."""
        ...


class TokenSampler(Protocol):
    """What the runner needs of a sampler: see engine/sampling.py."""

    def sample(self, logits: Tensor, rows: list[SampleRow]) -> list[SampledToken]: ...


@dataclass(frozen=True)
class Draw:
    """A token drawn for one choice."""

    choice: int
    token: SampledToken


class ModelRunner:
    """Runs one model on one KV pool tensor [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]."""

    def __init__(self, model: ForwardModel, kv: Tensor, sampler: TokenSampler, eos_token_ids: Collection[int]) -> None:
        self._model = model
        self._kv = kv
        self._sampler = sampler
        self._eos_token_ids = frozenset(eos_token_ids)

    @torch.inference_mode()
    def run(self, plan: Plan, signal: LayerSignal | None = None) -> dict[Sequence, list[Draw]]:
        """Computes the plan's pieces; the draws of the sequences that reach their end."""
        pieces = plan.pieces
        self._copy_blocks(pieces)
        logits = self._model.forward(build_batch(pieces, self._kv.shape[3], self._kv.device), self._kv, signal)
        return self._draw(pieces, logits)

    def _copy_blocks(self, pieces: list[Piece]) -> None:
        copies = [copy for piece in pieces for copy in piece.copies]
        if copies:
            # All sources are read before any target is written: a source may have been freed and be a target by now.
            self._kv[:, :, [copy.target for copy in copies]] = self._kv[:, :, [copy.source for copy in copies]]

    def _draw(self, pieces: list[Piece], logits: Tensor) -> dict[Sequence, list[Draw]]:
        """`logits` [R, vocab]: a row for each piece that draws; the choices of a trunk draw from the same row."""
        drawing = [piece.sequence for piece in pieces if _draws(piece)]
        if not drawing:
            return {}
        owners = [(row, sequence, choice) for row, sequence in enumerate(drawing) for choice in sequence.choices_to_draw]
        if len(owners) > len(drawing):
            logits = logits[[row for row, _, _ in owners]]
        allowed = {sequence: _allowed(sequence) for sequence in drawing}  # choices that have not parted share theirs
        rows = [self._sample_row(sequence, choice, allowed[sequence]) for _, sequence, choice in owners]
        tokens = self._sampler.sample(logits, rows)
        draws: dict[Sequence, list[Draw]] = {}
        for (_, sequence, choice), token in zip(owners, tokens, strict=True):
            draws.setdefault(sequence, []).append(Draw(choice, token))
        return draws

    def _sample_row(self, sequence: Sequence, choice: int, allowed: Bits | None) -> SampleRow:
        request = sequence.group.request
        return SampleRow(
            params=request.sampling,
            choice=choice,
            index=len(sequence.output),
            prompt=request.prompt,
            output=sequence.output,
            eos_token_ids=self._eos_token_ids,
            allowed=allowed,
        )


def _allowed(sequence: Sequence) -> Bits | None:
    """What the sequence's grammar allows. On an accelerator the forward pass, which was only launched, still runs meanwhile."""
    matcher = sequence.matcher()
    return None if matcher is None else matcher.allowed()


def build_batch(pieces: list[Piece], block_size: int, device: torch.device) -> StepBatch:
    """The flat batch of a plan's pieces, in their order."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_starts = [0]
    for piece in pieces:
        sequence, start = piece.sequence, piece.sequence.num_computed
        end = start + piece.num_tokens
        token_ids += sequence.tokens(start, end)
        positions += range(start, end)
        slots += [sequence.block_ids[p // block_size] * block_size + p % block_size for p in range(start, end)]
        query_starts.append(end - start + query_starts[-1])
    context_lens = [piece.sequence.num_computed + piece.num_tokens for piece in pieces]
    logits_rows = [end - 1 for piece, end in zip(pieces, query_starts[1:], strict=True) if _draws(piece)]
    return StepBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        query_starts=query_starts,
        context_lens=context_lens,
        block_tables=[
            piece.sequence.block_ids[: num_blocks_for(context_len, block_size)]
            for piece, context_len in zip(pieces, context_lens, strict=True)
        ],
        logits_rows=torch.tensor(logits_rows, dtype=torch.int64, device=device),
    )


def _draws(piece: Piece) -> bool:
    return piece.reaches_end and bool(piece.sequence.choices_to_draw)
