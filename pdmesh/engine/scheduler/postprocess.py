"""Postprocessing of a step: sequences advance, choices take their tokens, and updates for the caller are made."""

from __future__ import annotations

import time

from pdmesh.engine.kv_cache.block_manager import BlockAllocator
from pdmesh.engine.outputs import KVReady, RequestStarted, SequenceUpdate, StepResult, StepWork, TokenLogprobs
from pdmesh.engine.runner.model_runner import SampledOutput
from pdmesh.engine.scheduler.requests import Gain, RequestTable
from pdmesh.engine.scheduler.scheduler import ScheduledSequence, SchedulerOutput
from pdmesh.engine.scheduler.sequence import Sequence, SequenceGroup
from pdmesh.engine.scheduler.stats import Counters, EngineStatsCollector
from pdmesh.engine.speculation.handover import packed


class OutputProcessor:
    """Apply a step's output, and count."""

    def __init__(self, table: RequestTable, allocator: BlockAllocator, counters: Counters, census: EngineStatsCollector) -> None:
        self._table = table
        self._allocator = allocator
        self._counters = counters
        self._census = census

    def postprocess(
        self, plan: SchedulerOutput, draws: dict[Sequence, list[SampledOutput]], started_ns: int, ready: tuple[KVReady, ...] = ()
    ) -> StepResult:
        """Apply a step of which all scheduled sequences are computed."""
        pieces = plan.pieces
        work = work_of(pieces)
        self._counters.num_steps += 1
        self._counters.num_prefilled_tokens += _num_to_prefill(pieces)
        updates = [update for piece in pieces for update in self._advance(piece, draws.get(piece.sequence, []))]
        self._counters.num_generated_tokens += sum(len(update.token_ids) for update in updates)
        ended_ns = time.monotonic_ns()
        return StepResult(
            step=self._counters.num_steps,
            started_ns=started_ns,
            ended_ns=ended_ns,
            num_tokens=plan.num_tokens,
            work=work,
            updates=tuple(updates),
            started=tuple(_started(plan, draws, started_ns, ended_ns)),
            ready=ready,
            stats=self._census.take_if_due(ended_ns),
        )

    def _advance(self, piece: ScheduledSequence, draws: list[SampledOutput]) -> list[SequenceUpdate]:
        sequence, index = piece.sequence, len(piece.sequence.output) - piece.sequence.num_unreported
        sequence.num_computed += piece.num_tokens
        self._allocator.publish(sequence)
        if sequence.num_remaining:
            return []
        proceed = self._table.hold if sequence.group.request.prefill_only else self._table.go_on
        gains = proceed(sequence, {draw.choice: tuple([token.token_id for token in draw.tokens]) for draw in draws})
        return [_update(piece, index, draw, gains[draw.choice]) for draw in draws]


def _update(piece: ScheduledSequence, index: int, draw: SampledOutput, gain: Gain) -> SequenceUpdate:
    """Return the update; `index` of the first token that the choice's caller does not have."""
    return SequenceUpdate(
        request_id=piece.sequence.group.request.request_id,
        choice=draw.choice,
        index=index,
        token_ids=gain.token_ids,
        logprobs=_logprobs(draw, gain.num_drawn),
        finish_reason=gain.finish_reason,
        num_drafted=len(piece.draft),
        num_accepted=min(gain.num_drawn, len(draw.tokens) - 1),  # the last drawn token is no draft token
        draft_state=_draft_state(piece.sequence, draw),
    )


def _draft_state(sequence: Sequence, draw: SampledOutput) -> bytes:
    return packed(draw.hidden) if sequence.group.request.prefill_only and draw.hidden is not None else b""


def _logprobs(draw: SampledOutput, num_tokens: int) -> tuple[TokenLogprobs, ...]:
    """Return log-probabilities of as many tokens as the choice took: it may have ended before the last that was drawn."""
    return tuple([token.logprobs for token in draw.tokens[:num_tokens] if token.logprobs is not None])


def work_of(pieces: list[ScheduledSequence]) -> StepWork:
    """Return the work of a step, before its tokens count as computed."""
    prefill_tokens = prefill_context = num_decoding = decode_context = 0
    for piece in pieces:
        sequence, num_tokens = piece.sequence, piece.num_tokens
        first = sequence.num_computed
        if num_tokens == 1 and sequence.output and first + 1 == sequence.num_tokens:  # is_decoding
            num_decoding += piece.num_rows
            decode_context += first + 1
        else:
            prefill_tokens += piece.num_rows
            prefill_context += num_tokens * first + num_tokens * (num_tokens + 1) // 2
            prefill_context += sum([first + num_tokens + depth for depth in piece.draft.depths])
    return StepWork(prefill_tokens, prefill_context, num_decoding, decode_context)


def _num_to_prefill(pieces: list[ScheduledSequence]) -> int:
    """Return how many of the tokens are no new output."""
    missing = [(piece.num_tokens, piece.sequence.num_to_restore - piece.sequence.num_computed) for piece in pieces]
    return sum([min(num_tokens, to_prefill) for num_tokens, to_prefill in missing if to_prefill > 0])


def _started(
    plan: SchedulerOutput, draws: dict[Sequence, list[SampledOutput]], started_ns: int, ended_ns: int
) -> list[RequestStarted]:
    """Return requests that started with this step. A request's clock counts the step once, however many of its sequences took
    part."""
    pieces_of: dict[SequenceGroup, list[ScheduledSequence]] = {}
    for piece in plan.pieces:
        pieces_of.setdefault(piece.sequence.group, []).append(piece)
    started = []
    for group, pieces in pieces_of.items():
        assert group.clock is not None, "a scheduled request is active, so its clock was opened"
        num_tokens = sum(piece.num_tokens for piece in pieces)
        group.clock.took_part(started_ns, ended_ns, num_tokens=num_tokens, num_cached_tokens=pieces[0].sequence.num_cached)
        event = group.clock.try_stop(group.request.request_id, drew_token=any(piece.sequence in draws for piece in pieces))
        if event is not None:
            started.append(event)
    return started
