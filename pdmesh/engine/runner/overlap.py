"""Overlap scheduling: the next decode step is launched before this one's tokens are read.

    device   | step n        | step n + 1    | step n + 2    |          one after the other, without a gap
    host       launch n + 1 ─┤ wait for n, return its tokens, run commands, launch n + 2 ─┤ wait for n + 1 ...

A decode step needs of the step before it only the tokens, and those lie on the device. Everything else is known: a sequence gets
one token more, in the next slot of its blocks. So step n + 1 is planned when step n is launched, for the same sequences less
those whose last token n draws; the scheduler is asked again when a step cannot be planned so.

What is found out too late: a sequence that ended with a token (or was released) has its row computed once more in vain: its
draw is dropped. The row writes one slot of a block that the sequence held when it was launched; launches behind this one write
the block's next content. Other writers must not write under a step: what arrives from another worker
waits for a mark behind all that was launched when its blocks were freed (`pdmesh/engine/kv_cache/staging.py`,
`kvtransfer/receiver/push.py`).

A request that arrives meanwhile waits for the step that is under way, as always, and for one more. No step is launched ahead
while prompts are computed in the middle, since the scheduler decides how much of them; behind their last tokens one is. Nor while
a request waits that the scheduler has not refused yet, or that waits for blocks which another computes. One that it has refused,
for want of blocks, waits until another sequence leaves.

The token counts that a draw needs are kept on the device (penalties), and its log-probabilities are computed there. Grammars run
on the host: where one of the sequences has one, no step is ahead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.kv_cache.block_manager import BlockManager
from pdmesh.engine.kv_cache.events import LayerReadiness
from pdmesh.engine.loader.loader import LoadedModel
from pdmesh.engine.memory import effective_max_context
from pdmesh.engine.runner.batch import StepBatch
from pdmesh.engine.runner.model_runner import ModelRunner, SampledOutput, TokenSampler
from pdmesh.engine.sampling.sampler import SampledToken, SampleRow, Unseen
from pdmesh.engine.scheduler.scheduler import ScheduledSequence, Scheduler, SchedulerOutput
from pdmesh.engine.scheduler.sequence import Sequence
from pdmesh.engine.speculation.draft import NOTHING, Verified
from pdmesh.engine.weight_versions import ForwardModel


class Drawing(Protocol):
    """Draws that were launched."""

    tokens: Tensor  # [R] int32, on the device

    def finish(self) -> list[SampledToken]:
        """Wait for these draws, and for nothing behind them."""
        ...


class OverlapModel(ForwardModel, Protocol):
    """A model whose decode steps take tokens that the host has not read: token -1 - r is what row r of the last draws drew."""

    def is_graph_step(self, batch: StepBatch, kv: Tensor) -> bool:
        """Return whether `forward` takes this batch that way."""
        ...

    def keep_drawn(self, tokens: Tensor) -> None:
        """Keep the last draws for the next step."""
        ...


class OverlapSampler(Protocol):
    def start(self, logits: Tensor, rows: list[SampleRow], unseen: Unseen | None = None) -> Drawing:
        """Launch draws. `unseen`: one token of each row beyond its `output`."""
        ...


class _Refused(NamedTuple):
    """The first waiting request, and why the scheduler would still refuse it: no sequence left, and no block became free."""

    first: Sequence
    running: frozenset[Sequence]
    num_free: int


@dataclass(frozen=True)
class _InFlightStep:
    """A step that was launched: `sequences[r]` draws row r."""

    sequences: list[Sequence]
    drawing: Drawing

    def draws(self) -> dict[Sequence, list[SampledOutput]]:
        tokens = self.drawing.finish()
        return {
            sequence: [SampledOutput(sequence.choices[0], (token,), Verified(NOTHING, (token.token_id,)))]
            for sequence, token in zip(self.sequences, tokens, strict=True)
        }


class OverlapScheduler:
    """Run plans like a ModelRunner. For one engine, on its thread."""

    def __init__(
        self,
        runner: ModelRunner,
        model: OverlapModel,
        sampler: OverlapSampler,
        scheduler: Scheduler,
        allocator: BlockManager,
        *,
        max_num_batched_tokens: int,
        max_context: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._runner, self._model, self._sampler, self._kv = runner, model, sampler, runner.kv
        self._scheduler, self._allocator = scheduler, allocator
        self._budget, self._max_context, self._eos_token_ids = max_num_batched_tokens, max_context, eos_token_ids
        self._flight: _InFlightStep | None = None
        self._plan: SchedulerOutput | None = None  # the plan of the step in flight
        self._refused: _Refused | None = None
        self.num_ahead = 0  # steps that were launched before the tokens that they continue were read

    def planned(self) -> SchedulerOutput | None:
        """Return the step that is under way, for those of its sequences that still run; None: there is none, so ask the
        scheduler."""
        if self._flight is None:
            return None
        running = set(self._scheduler.running)
        left = [sequence for sequence in self._flight.sequences if sequence in running]
        if not left:
            self._flight = None
            return None
        self._plan = SchedulerOutput(self._budget)
        for sequence in left:
            self._plan.add(ScheduledSequence(sequence, 1))
        return self._plan

    @torch.inference_mode()
    def run(self, plan: SchedulerOutput, signal: LayerReadiness | None = None) -> dict[Sequence, list[SampledOutput]]:
        """Run like ModelRunner.run: launch the plan unless it is under way, then the step behind it; then wait."""
        if plan is self._plan:
            flight = self._flight
        else:
            flight = self._launched(plan) if signal is None else None
        self._flight = self._plan = None
        if flight is None:
            return self._runner.run(plan, signal)
        self._flight = self._next(flight, plan)
        draws = flight.draws()
        return {piece.sequence: draws[piece.sequence] for piece in plan.pieces}

    def note_refusal(self, plan: SchedulerOutput) -> None:
        """Record whether the scheduler, whose plan this is, tried to admit a request and had no blocks for it. Call it before
        another request can arrive."""
        has_tried = bool(self._scheduler.waiting) and plan.budget > 0 and not (plan.preempted or self._scheduler.has_followers)
        self._refused = self._circumstances() if has_tried else None

    def _circumstances(self) -> _Refused:
        scheduler = self._scheduler
        return _Refused(scheduler.waiting[0], frozenset(scheduler.running), self._allocator.pool.num_free)

    def _launched(self, plan: SchedulerOutput) -> _InFlightStep | None:
        """Launch the plan; None: no step could follow it without its tokens."""
        pieces = plan.pieces
        if not all(piece.reaches_end and not piece.draft and _is_simple(piece) for piece in pieces):
            return None
        batch = self._runner.batch_of(pieces)
        sequences = [piece.sequence for piece in pieces]
        return self._fly(batch, sequences, [len(sequence.output) for sequence in sequences])

    def _next(self, flight: _InFlightStep, plan: SchedulerOutput) -> _InFlightStep | None:
        """Launch the step behind a flight whose tokens are not read yet, if it has all sequences that could be in it, and their
        blocks."""
        with self._allocator.lock:
            pieces = self._pieces_behind(plan)
        if pieces is None:
            return None
        rows = {sequence: row for row, sequence in enumerate(flight.sequences)}
        batch = self._batch(pieces, rows)
        if not self._model.is_graph_step(batch, self._kv):
            return None
        self._runner.copy_blocks(pieces)
        self.num_ahead += 1
        sequences = [piece.sequence for piece in pieces]
        unseen = Unseen(flight.drawing.tokens, [rows[sequence] for sequence in sequences])
        return self._fly(batch, sequences, [len(sequence.output) + 1 for sequence in sequences], unseen)

    def _pieces_behind(self, plan: SchedulerOutput) -> list[ScheduledSequence] | None:
        staying = [piece for piece in plan.pieces if not self._is_last(piece.sequence)]
        if not staying or not set(self._scheduler.running) <= {piece.sequence for piece in plan.pieces}:
            return None
        if self._scheduler.waiting and not (len(staying) == len(plan.pieces) and self._would_refuse()):
            return None
        return self._extended(staying)

    def _would_refuse(self) -> bool:
        now, refused = self._circumstances(), self._refused
        return refused is not None and now[:2] == refused[:2] and now.num_free <= refused.num_free

    def _fly(
        self, batch: StepBatch, sequences: list[Sequence], indices: list[int], unseen: Unseen | None = None
    ) -> _InFlightStep:
        logits = self._model.forward(batch, self._kv)
        rows = [self._sample_row(sequence, index) for sequence, index in zip(sequences, indices, strict=True)]
        drawing = self._sampler.start(logits, rows, unseen)
        self._model.keep_drawn(drawing.tokens)
        return _InFlightStep(sequences, drawing)

    def _is_last(self, sequence: Sequence) -> bool:
        """Return whether the choice ends with the token that is drawn now, whatever it is."""
        request = sequence.group.request
        most = min(request.sampling.max_tokens, self._max_context - len(request.prompt))
        return len(sequence.output) + 1 >= most

    def _extended(self, pieces: list[ScheduledSequence]) -> list[ScheduledSequence] | None:
        """Return the scheduled sequences with blocks for one token behind those that are computed now; None: there are not enough
        blocks."""
        num_missing = sum(self._allocator.num_missing(piece.sequence, piece.num_tokens + 1) for piece in pieces)
        if num_missing + len(pieces) > self._allocator.pool.num_free:
            return None
        return [replace(piece, copies=self._allocator.extend(piece.sequence, piece.num_tokens + 1)) for piece in pieces]

    def _batch(self, pieces: list[ScheduledSequence], rows: dict[Sequence, int]) -> StepBatch:
        """Return a batch of each sequence's token behind those that are computed now, which row `rows[sequence]` draws."""
        block_size, sequences = self._kv.shape[3], [piece.sequence for piece in pieces]
        positions = [piece.sequence.num_computed + piece.num_tokens for piece in pieces]
        tables = [s.block_ids[: p // block_size + 1] for s, p in zip(sequences, positions, strict=True)]
        slots = [table[-1] * block_size + p % block_size for table, p in zip(tables, positions, strict=True)]
        return StepBatch(
            token_ids=torch.tensor([-1 - rows[sequence] for sequence in sequences]),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            query_starts=list(range(len(sequences) + 1)),
            context_lens=[position + 1 for position in positions],
            block_tables=tables,
            logits_rows=torch.arange(len(sequences)),
            adapter_slots=self._runner.adapters_of(pieces),
        )

    def _sample_row(self, sequence: Sequence, index: int) -> SampleRow:
        request = sequence.group.request
        return SampleRow(
            params=request.sampling,
            choice=sequence.choices[0],
            index=index,
            prompt=request.prompt,
            output=sequence.output,  # the known part; the rest is `Unseen`
            eos_token_ids=self._eos_token_ids,
            owner=sequence,
        )


def _is_simple(piece: ScheduledSequence) -> bool:
    """Return whether the next token needs nothing of the host: no grammar, no reader of the blocks, one choice, no
    log-probabilities of its prompt."""
    sequence, request = piece.sequence, piece.sequence.group.request
    is_alone = len(sequence.choices) == 1 and not request.prefill_only
    needs_more = request.grammar is not None or request.pooling is not None or sequence.needs_prompt_rows
    return is_alone and not needs_more and _is_penalized_alike(sequence)


def _is_penalized_alike(sequence: Sequence) -> bool:
    """Return whether penalties of the next token are known: two of them begin with the second token, not before the first is
    known."""
    params = sequence.group.request.sampling
    return bool(sequence.output) or not params.penalizes_output


def overlap_scheduler(
    runner: ModelRunner,
    loaded: LoadedModel,
    sampler: TokenSampler,
    scheduler: Scheduler,
    allocator: BlockManager,
    config: EngineConfig,
) -> OverlapScheduler | None:
    """Return the overlap scheduler; None: it is switched off, or the model does not support it."""
    if not config.steps_ahead or not loaded.runs_ahead:
        return None
    return OverlapScheduler(
        runner,
        cast(OverlapModel, loaded.model),
        cast(OverlapSampler, sampler),
        scheduler,
        allocator,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_context=effective_max_context(config, loaded.config),
        eos_token_ids=frozenset(loaded.config.eos_token_ids),
    )
