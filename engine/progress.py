"""What a step changed: sequences move on, choices take their tokens, and the caller learns of it."""

from __future__ import annotations

import time

from engine.allocator import BlockAllocator
from engine.outputs import KVReady, RequestStarted, SequenceUpdate, StepResult
from engine.requests import RequestTable
from engine.runner import Draw
from engine.scheduler import Piece, Plan
from engine.sequence import Sequence, SequenceGroup


class Progress:
    """Applies a step's outcome and counts."""

    def __init__(self, table: RequestTable, allocator: BlockAllocator) -> None:
        self.num_steps = 0
        self.num_generated_tokens = 0
        self.num_prefilled_tokens = 0
        self._table = table
        self._allocator = allocator

    def postprocess(
        self, plan: Plan, draws: dict[Sequence, list[Draw]], started_ns: int, ready: tuple[KVReady, ...] = ()
    ) -> StepResult:
        """All of the plan's pieces are computed."""
        self._count(plan)
        updates = [update for piece in plan.pieces for update in self._advance(piece, draws.get(piece.sequence, []))]
        self.num_generated_tokens += sum(len(update.token_ids) for update in updates)
        ended_ns = time.monotonic_ns()
        return StepResult(
            step=self.num_steps,
            started_ns=started_ns,
            ended_ns=ended_ns,
            num_tokens=plan.num_tokens,
            updates=tuple(updates),
            started=tuple(_started(plan, draws, started_ns, ended_ns)),
            ready=ready,
        )

    def _count(self, plan: Plan) -> None:
        self.num_steps += 1
        self.num_prefilled_tokens += sum(min(piece.num_tokens, piece.sequence.num_to_prefill) for piece in plan.pieces)

    def _advance(self, piece: Piece, draws: list[Draw]) -> list[SequenceUpdate]:
        sequence, index = piece.sequence, len(piece.sequence.output) - piece.sequence.num_unreported
        sequence.num_computed += piece.num_tokens
        self._allocator.publish(sequence)
        if sequence.num_remaining:
            return []
        proceed = self._table.hold if sequence.group.request.prefill_only else self._table.go_on
        gains = proceed(sequence, {draw.choice: draw.token.token_id for draw in draws})
        return [
            SequenceUpdate(
                request_id=sequence.group.request.request_id,
                choice=draw.choice,
                index=index,
                token_ids=gains[draw.choice].token_ids,
                logprobs=(draw.token.logprobs,) if draw.token.logprobs else (),
                finish_reason=gains[draw.choice].finish_reason,
            )
            for draw in draws
        ]


def _started(plan: Plan, draws: dict[Sequence, list[Draw]], started_ns: int, ended_ns: int) -> list[RequestStarted]:
    """Requests that started with this step. A request's clock sees the step once, whatever number of its sequences took part."""
    pieces_of: dict[SequenceGroup, list[Piece]] = {}
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
