"""Statistics of the engine, on demand and with steps: the number of requests in each state; and the postprocessing of steps."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from pdmesh.engine.kv_cache.block_manager import BlockManager
from pdmesh.engine.outputs import EngineStats, KVReady, RequestStarted, SequenceUpdate, StepResult, StepWork, TokenLogprobs
from pdmesh.engine.runner.model_runner import SampledOutput
from pdmesh.engine.scheduler.requests import NewTokens, RequestTable
from pdmesh.engine.scheduler.scheduler import ScheduledSequence, Scheduler, SchedulerOutput
from pdmesh.engine.scheduler.sequence import Phase, Sequence, SequenceGroup
from pdmesh.engine.scheduler.tpot_limiter import TpotLimiter
from pdmesh.engine.speculation.handover import packed
from pdmesh.engine.speculation.stats import Tally

# While no request comes or goes, short steps share statistics: each only lengthens contexts by a token.
PERIOD_NS = 10_000_000


@dataclass
class Counters:
    """Count since start."""

    num_steps: int = 0
    num_generated_tokens: int = 0
    num_prefilled_tokens: int = 0


class EngineStatsCollector:
    """Collect the engine's statistics; takes a microsecond for each sequence."""

    def __init__(
        self,
        counters: Counters,
        table: RequestTable,
        scheduler: Scheduler,
        allocator: BlockManager,
        pacer: TpotLimiter,
        tally: Tally | None = None,
    ) -> None:
        self._counters = counters
        self._tally = tally
        self._table = table
        self._scheduler = scheduler
        self._allocator = allocator
        self._pacer = pacer
        self._taken_ns = 0
        self._population = (0, 0, 0)

    def take_if_due(self, now_ns: int) -> EngineStats | None:
        """Return statistics if a request came or went since the last ones, or those are `PERIOD_NS` old; else None."""
        if self._population == self._count() and now_ns - self._taken_ns < PERIOD_NS:
            return None
        return self.take(now_ns)

    def take(self, now_ns: int) -> EngineStats:
        """Return the statistics of the present time, which is `now_ns`."""
        self._taken_ns, self._population = now_ns, self._count()
        running, waiting, pool = self._scheduler.running, self._scheduler.waiting, self._allocator.pool
        decoding, decode_context = [], 0
        for sequence in running:
            if sequence.output and sequence.num_computed + 1 == (num_tokens := sequence.num_tokens):  # is_decoding
                decoding.append(sequence)
                decode_context += num_tokens
        num_decoding, pace = len(decoding), self._pacer.tightest(decoding, now_ns)
        groups = list(self._table)  # one copy: the engine's thread may add to the table meanwhile
        idle = [group for group in groups if group.phase is not Phase.ACTIVE]
        return EngineStats(
            taken_ns=now_ns,
            num_running=_num_choices(running),
            num_waiting=_num_choices(waiting),
            num_reserved=sum(group.num_seats for group in idle if group.phase is Phase.RESERVED),
            num_held=sum(group.phase is Phase.HELD for group in idle),
            num_free_blocks=pool.num_free,
            num_total_blocks=pool.num_total,
            num_cached_blocks=pool.num_cached,
            num_waiting_tokens=_num_to_prefill(running) + _num_to_prefill(waiting),
            num_decoding=num_decoding,
            decode_context=decode_context,
            pace_s=self._promised_s(groups, decoding) if pace is None else pace.pace_s,
            slack_s=0.0 if pace is None else pace.slack_s,
            num_prefilling=len(running) - num_decoding + len(waiting),
            num_steps=self._counters.num_steps,
            num_generated_tokens=self._counters.num_generated_tokens,
            num_prefilled_tokens=self._counters.num_prefilled_tokens,
            num_prefix_hit_tokens=self._allocator.num_prefix_hit_tokens,
            num_preemptions=self._scheduler.num_preemptions,
            num_oldest_tokens=_oldest(running, waiting),
            num_retained_blocks=pool.num_retained,
            num_retained_evicted=pool.num_retained_evicted,
            speculation=None if self._tally is None else self._tally.stats(),
        )

    def _promised_s(self, groups: list[SequenceGroup], decoding: list[Sequence]) -> float:
        return self._pacer.promised_s((sequence for group in groups for sequence in group.sequences), decoding)

    def _count(self) -> tuple[int, int, int]:
        return len(self._scheduler.running), len(self._scheduler.waiting), len(self._table)


def _num_choices(sequences: list[Sequence]) -> int:
    return sum([len(sequence.choices) for sequence in sequences])


def _num_to_prefill(sequences: list[Sequence]) -> int:
    # The property's arithmetic, without calling it for each sequence.
    return sum([max(0, sequence.num_to_restore - sequence.num_computed) for sequence in sequences])


def _oldest(running: list[Sequence], waiting: list[Sequence]) -> int:
    """Return the tokens that the oldest prompt lacks; both lists are in order of arrival."""
    heads = [next((each for each in queue if each.num_to_prefill), None) for queue in (running, waiting)]
    prompts = [each for each in heads if each is not None]
    return min(prompts, key=lambda each: each.turn).num_to_prefill if prompts else 0


# Postprocessing of a step: sequences advance, choices take their tokens, and updates for the caller are made.


class OutputProcessor:
    """Apply a step's output to its sequences, and count steps and tokens."""

    def __init__(self, table: RequestTable, allocator: BlockManager, counters: Counters, stats: EngineStatsCollector) -> None:
        self._table = table
        self._allocator = allocator
        self._counters = counters
        self._stats = stats

    def postprocess(
        self, plan: SchedulerOutput, draws: dict[Sequence, list[SampledOutput]], started_ns: int, ready: tuple[KVReady, ...] = ()
    ) -> StepResult:
        """Apply a step; all its scheduled sequences are computed."""
        work, updates = self._continue(plan, draws) if plan.num_repeats else self._apply(plan.pieces, draws)
        self._counters.num_steps += 1
        self._counters.num_generated_tokens += sum([len(update.token_ids) for update in updates])
        ended_ns = time.monotonic_ns()
        return StepResult(
            step=self._counters.num_steps,
            started_ns=started_ns,
            ended_ns=ended_ns,
            num_tokens=plan.num_tokens,
            work=work,
            updates=tuple(updates),
            # The requests of a repeated plan started with a step before it.
            started=() if plan.num_repeats else tuple(_started(plan, draws, started_ns, ended_ns)),
            ready=ready,
            stats=self._stats.take_if_due(ended_ns),
        )

    def _apply(
        self, pieces: list[ScheduledSequence], draws: dict[Sequence, list[SampledOutput]]
    ) -> tuple[StepWork, list[SequenceUpdate]]:
        work = work_of(pieces)
        self._counters.num_prefilled_tokens += _num_left_to_prefill(pieces)
        return work, [update for piece in pieces for update in self._advance(piece, draws.get(piece.sequence, []))]

    def _continue(
        self, plan: SchedulerOutput, draws: dict[Sequence, list[SampledOutput]]
    ) -> tuple[StepWork, list[SequenceUpdate]]:
        """Apply a repeated plan: each of its sequences decodes, and draws a token."""
        updates, context = [], 0
        for sequence, [draw] in draws.items():
            index = len(sequence.output) - sequence.num_unreported
            sequence.num_computed += 1
            context += sequence.num_computed
            self._allocator.publish(sequence)
            [token] = draw.tokens
            new_tokens = self._table.take_token(sequence, token.token_id)
            request_id, logprobs = sequence.group.request.request_id, _logprobs(draw, new_tokens.num_drawn)
            updates.append(
                SequenceUpdate(request_id, draw.choice, index, new_tokens.token_ids, logprobs, new_tokens.finish_reason)
            )
        return StepWork(0, 0, len(updates), context), updates

    def _advance(self, piece: ScheduledSequence, draws: list[SampledOutput]) -> list[SequenceUpdate]:
        sequence, index = piece.sequence, len(piece.sequence.output) - piece.sequence.num_unreported
        sequence.num_computed += piece.num_tokens
        self._allocator.publish(sequence)
        if sequence.num_remaining:
            return []
        proceed = self._table.hold_for_transfer if sequence.group.request.prefill_only else self._table.continue_decode
        new_tokens = proceed(sequence, {draw.choice: tuple([token.token_id for token in draw.tokens]) for draw in draws})
        updates = [_update(piece, index, draw, new_tokens[draw.choice]) for draw in draws]
        if sequence.prompt_logprobs:
            updates[0] = replace(updates[0], prompt_logprobs=tuple(sequence.prompt_logprobs))
            sequence.prompt_logprobs = []
        return updates


def _update(piece: ScheduledSequence, index: int, draw: SampledOutput, new_tokens: NewTokens) -> SequenceUpdate:
    """Return the update; `index` is that of the first token that the choice's caller does not have yet."""
    return SequenceUpdate(
        request_id=piece.sequence.group.request.request_id,
        choice=draw.choice,
        index=index,
        token_ids=new_tokens.token_ids,
        logprobs=_logprobs(draw, new_tokens.num_drawn),
        finish_reason=new_tokens.finish_reason,
        num_drafted=len(piece.draft),
        num_accepted=min(new_tokens.num_drawn, len(draw.tokens) - 1),  # the last drawn token is no draft token
        draft_state=_draft_state(piece.sequence, draw),
        pooled=draw.pooled,
    )


def _draft_state(sequence: Sequence, draw: SampledOutput) -> bytes:
    return packed(draw.hidden) if sequence.group.request.prefill_only and draw.hidden is not None else b""


def _logprobs(draw: SampledOutput, num_tokens: int) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of the tokens that the choice took: it may have ended before the token drawn last."""
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


def _num_left_to_prefill(pieces: list[ScheduledSequence]) -> int:
    """Return how many of the scheduled tokens are no new output."""
    missing = [(piece.num_tokens, piece.sequence.num_to_restore - piece.sequence.num_computed) for piece in pieces]
    return sum([min(num_tokens, to_prefill) for num_tokens, to_prefill in missing if to_prefill > 0])


def _started(
    plan: SchedulerOutput, draws: dict[Sequence, list[SampledOutput]], started_ns: int, ended_ns: int
) -> list[RequestStarted]:
    """Return the requests that started with this step. A request's clock counts the step once, also where several of its
    sequences took part."""
    pieces_of: dict[SequenceGroup, list[ScheduledSequence]] = {}
    for piece in plan.pieces:
        pieces_of.setdefault(piece.sequence.group, []).append(piece)
    started = []
    for group, pieces in pieces_of.items():
        assert group.clock is not None, "a scheduled request is active, so its clock was opened"
        if not group.clock.is_running:
            continue
        num_tokens = sum(piece.num_tokens for piece in pieces)
        first = pieces[0].sequence
        group.clock.found(num_rounded_tokens=first.num_rounded, is_exact=all(piece.sequence.is_exact for piece in pieces))
        group.clock.took_part(started_ns, ended_ns, num_tokens=num_tokens, num_cached_tokens=first.num_cached)
        event = group.clock.try_stop(group.request.request_id, drew_token=any(piece.sequence in draws for piece in pieces))
        if event is not None:
            started.append(event)
    return started
