"""The requests in the engine, and the only places where one changes its state.

    reserve ──► RESERVED ──start / run_local──► ACTIVE (waits, runs) ──► gone when its last choice ends
    add ──────────────────────────────────────► ACTIVE ──first tokens, prefill_only──► HELD ──► gone by release

release is right in any state.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping

from engine.admission import Limits, check_request
from engine.allocator import BlockAllocator
from engine.errors import DuplicateRequest, InvalidState, UnknownRequest
from engine.outputs import FinishReason
from engine.request import EngineRequest
from engine.scheduler import Scheduler
from engine.sequence import Phase, Sequence, SequenceGroup
from engine.timing import StartClock


class RequestTable:
    """All requests by id. A group that leaves the table has given all its blocks back."""

    def __init__(self, limits: Limits, allocator: BlockAllocator, scheduler: Scheduler) -> None:
        self._limits = limits
        self._allocator = allocator
        self._scheduler = scheduler
        self._groups: dict[str, SequenceGroup] = {}
        self._arrivals = itertools.count()

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(self._groups.values())

    def find(self, request_id: str, phase: Phase) -> SequenceGroup:
        """Raises UnknownRequest, or InvalidState if it is in another phase."""
        group = self._groups.get(request_id)
        if group is None:
            raise UnknownRequest(f"request {request_id!r} is not in the engine")
        if group.phase is not phase:
            raise InvalidState(f"request {request_id!r} is {group.phase.value}, not {phase.value}")
        return group

    def open(self, request: EngineRequest, phase: Phase, clock: StartClock | None = None) -> SequenceGroup | None:
        """A group for a valid new request, not in the table yet; None if all seats are taken. Raises what admission raises."""
        check_request(request, self._limits)
        if request.request_id in self._groups:
            raise DuplicateRequest(f"request_id: {request.request_id!r} is in the engine already; release it first")
        group = SequenceGroup(request, next(self._arrivals), phase, clock)
        num_taken = sum(other.num_seats for other in self._groups.values())
        return group if num_taken + group.num_seats <= self._limits.max_num_seqs else None

    def put(self, group: SequenceGroup) -> None:
        """Enters a group, or replaces the one of the same request, whose blocks it has taken over."""
        self._groups[group.request.request_id] = group

    def release(self, request_id: str) -> bool:
        """Frees everything of a request in any state; False if it is not here."""
        group = self._groups.pop(request_id, None)
        for sequence in group.sequences if group else ():
            self._scheduler.discard(sequence)
            self._allocator.release(sequence)
        return group is not None

    def go_on(
        self, sequence: Sequence, tokens: Mapping[int, int], finished: Collection[int] = ()
    ) -> dict[int, FinishReason | None]:
        """All known tokens of a running sequence are computed: its choices part and take their next tokens, some end with them.

        Choices in `finished` are over already. Returns why each other choice in `tokens` ended, or None where it goes on.
        """
        reasons = {}
        for branch in self._part(sequence) if len(sequence.choices) > 1 else [sequence]:
            [choice] = branch.choices
            if choice in finished:
                self._retire(branch)
            elif choice in tokens:
                reasons[choice] = self._append(branch, tokens[choice])
        return reasons

    def hold(self, sequence: Sequence, tokens: Mapping[int, int]) -> dict[int, FinishReason | None]:
        """As go_on() for a prefill_only request: the blocks stay as they are, for whoever takes the KV over."""
        self._scheduler.discard(sequence)
        sequence.group.phase = Phase.HELD
        request = sequence.group.request
        return {choice: self._limits.finish_reason(request, [*sequence.output, token]) for choice, token in tokens.items()}

    def _part(self, trunk: Sequence) -> list[Sequence]:
        branches = self._allocator.part(trunk)
        self._scheduler.discard(trunk)
        trunk.group.sequences = list(branches)
        for branch in branches:
            self._scheduler.run(branch)
        return branches

    def _append(self, branch: Sequence, token_id: int) -> FinishReason | None:
        branch.output.append(token_id)
        reason = self._limits.finish_reason(branch.group.request, branch.output)
        if reason is not None:
            self._retire(branch)
        return reason

    def _retire(self, branch: Sequence) -> None:
        self._scheduler.discard(branch)
        self._allocator.release(branch)
        branch.group.sequences.remove(branch)
        if not branch.group.sequences:
            del self._groups[branch.group.request.request_id]
