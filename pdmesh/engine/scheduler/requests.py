"""The requests in the engine, and the only places where one changes its state.

    reserve ──► RESERVED ──start / run_local──► ACTIVE (waits, runs) ──► gone when its last choice ends
    add ──────────────────────────────────────► ACTIVE ──first tokens, prefill_only──► HELD ──► gone by release

release is right in any state.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from pdmesh.engine.errors import DuplicateRequest, InvalidState, UnknownRequest
from pdmesh.engine.kv_cache.block_manager import BlockAllocator
from pdmesh.engine.outputs import FinishReason
from pdmesh.engine.request import EngineRequest
from pdmesh.engine.request_validation import Limits, check_request
from pdmesh.engine.scheduler.scheduler import Scheduler
from pdmesh.engine.scheduler.sequence import Phase, Sequence, SequenceGroup
from pdmesh.engine.timing import StartClock


@dataclass(frozen=True)
class Gain:
    """New tokens of a choice: those that were drawn, then those that its grammar forces. Why it ended, or None: it goes on."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    num_drawn: int  # so many were drawn: all, or those up to the one that ended it


class RequestTable:
    """All requests by id. A group that leaves the table has given all its blocks back."""

    def __init__(self, limits: Limits, allocator: BlockAllocator, scheduler: Scheduler) -> None:
        self._limits = limits
        self._allocator = allocator
        self._scheduler = scheduler
        self._groups: dict[str, SequenceGroup] = {}
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self._groups)

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

    def start(self, sequence: Sequence, tokens: Mapping[int, int], finished: Collection[int]) -> None:
        """All known tokens of a sequence that was prefilled elsewhere are computed: its choices part and take their first tokens.

        Choices in `finished` are over already. What a grammar forces behind the first tokens is reported with the next step.
        """
        for branch in self._branches(sequence):
            [choice] = branch.choices
            if choice in finished or self._append(branch, tokens[choice]):
                self._retire(branch)
            else:
                self._foresee(branch)

    def go_on(self, sequence: Sequence, tokens: Mapping[int, tuple[int, ...]]) -> dict[int, Gain]:
        """All known tokens of a running sequence are computed: its choices part and take their next tokens; some end.

        `tokens` of each choice: the KV of all but the last is there already. A choice may end before it has taken all.
        """
        branches = {branch.choices[0]: branch for branch in self._branches(sequence)}
        return {choice: self._gain(branches[choice], token_ids) for choice, token_ids in tokens.items()}

    def hold(self, sequence: Sequence, tokens: Mapping[int, tuple[int, ...]]) -> dict[int, Gain]:
        """As go_on() for a prefill_only request: the blocks stay as they are, for whoever takes the KV over, and who decodes
        finds what a grammar forces behind the first token."""
        self._scheduler.discard(sequence)
        sequence.group.phase = Phase.HELD
        return {choice: Gain(token, self._reason(sequence, [*sequence.output, *token]), 1) for choice, token in tokens.items()}

    def _branches(self, sequence: Sequence) -> list[Sequence]:
        return self._part(sequence) if len(sequence.choices) > 1 else [sequence]

    def _part(self, trunk: Sequence) -> list[Sequence]:
        branches = self._allocator.part(trunk)
        self._scheduler.discard(trunk)
        trunk.group.sequences = list(branches)
        for branch in branches:
            self._scheduler.run(branch)
        return branches

    def _gain(self, branch: Sequence, token_ids: tuple[int, ...]) -> Gain:
        num_before = len(branch.output)
        start, branch.num_unreported = num_before - branch.num_unreported, 0
        reason = self._append_drawn(branch, token_ids)
        num_drawn = len(branch.output) - num_before
        while reason is None and (forced := branch.forced_token()) is not None:
            reason = self._append(branch, forced)
        if reason is not None:
            self._retire(branch)
        return Gain(tuple(branch.output[start:]), reason, num_drawn)

    def _append_drawn(self, branch: Sequence, token_ids: tuple[int, ...]) -> FinishReason | None:
        """The last one is drawn, those before it were drafted and kept: they are computed."""
        *kept, drawn = token_ids
        for token_id in kept:
            reason = self._append(branch, token_id)
            branch.num_computed += 1
            if reason is not None:
                break
            branch.matcher()  # moves on now: what ends the output next is judged by whether the grammar was lost here
        else:
            reason = self._append(branch, drawn)
        if kept:
            self._allocator.publish(branch)
        return reason

    def _foresee(self, branch: Sequence) -> None:
        """Appends what the grammar forces, but for a token that ends the choice: there is no step that could report that."""
        while (forced := branch.forced_token()) is not None:
            if self._append(branch, forced) is not None:
                branch.output.pop()  # the matcher takes a token when the next one is asked for
                return
            branch.num_unreported += 1

    def _append(self, branch: Sequence, token_id: int) -> FinishReason | None:
        branch.output.append(token_id)
        return self._reason(branch, branch.output)

    def _reason(self, sequence: Sequence, output: list[int]) -> FinishReason | None:
        """STOP says that a constrained output is whole, so one whose grammar was lost is as one without room: LENGTH."""
        reason = self._limits.finish_reason(sequence.group.request, output)
        return FinishReason.LENGTH if reason is FinishReason.STOP and sequence.lost_grammar else reason

    def _retire(self, branch: Sequence) -> None:
        self._scheduler.discard(branch)
        self._allocator.release(branch)
        branch.group.sequences.remove(branch)
        if not branch.group.sequences:
            del self._groups[branch.group.request.request_id]
