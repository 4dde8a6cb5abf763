"""The requests in the engine; only this module changes their state.

    reserve ──► RESERVED ──start / run_local──► ACTIVE (waits, runs) ──► gone when its last choice ends
    add ──────────────────────────────────────► ACTIVE ──first tokens, prefill_only──► HELD ──► gone by release

release is allowed in any state.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import chain
from typing import NamedTuple

from pdmesh.adapter_id import AdapterId
from pdmesh.engine.errors import DuplicateRequest, IntegrityError, InvalidRequest, InvalidState, UnknownAdapter, UnknownRequest
from pdmesh.engine.interface import ReservedBlocks
from pdmesh.engine.kv_cache.block_manager import BlockManager
from pdmesh.engine.outputs import FinishReason, StartClock
from pdmesh.engine.request import EngineRequest
from pdmesh.engine.request_validation import Limits, check_request
from pdmesh.engine.sampling.sampler import NO_TOKEN
from pdmesh.engine.scheduler.scheduler import Scheduler
from pdmesh.engine.scheduler.sequence import Phase, Sequence, SequenceGroup


class NewTokens(NamedTuple):
    """Hold the new tokens of a choice: drawn tokens, then tokens that its grammar forces. `finish_reason` None: it continues."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    num_drawn: int  # drawn tokens: all of them, or those up to the one that ended the choice


class RequestTable:
    """Hold all requests by id. A group that leaves the table has no blocks any more."""

    def __init__(
        self,
        limits: Limits,
        allocator: BlockManager,
        scheduler: Scheduler,
        may_have: Callable[[AdapterId], bool] = lambda adapter: False,
        weights_for: Callable[[str], str] = lambda weights_hash: weights_hash,
    ) -> None:
        """`may_have` says whether a new request may be computed with an adapter; `weights_for` returns the hash of the weights
        for one that asks for a hash, or for none."""
        self._limits = limits
        self._allocator = allocator
        self._scheduler = scheduler
        self._may_have = may_have
        self._weights_for = weights_for
        self._groups: dict[str, SequenceGroup] = {}
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(self._groups.values())

    def find(self, request_id: str, phase: Phase) -> SequenceGroup:
        """Return the group. Raises UnknownRequest, or InvalidState if it is in another phase."""
        group = self._groups.get(request_id)
        if group is None:
            raise UnknownRequest(f"request {request_id!r} is not in the engine")
        if group.phase is not phase:
            raise InvalidState(f"request {request_id!r} is {group.phase.value}, not {phase.value}")
        return group

    def open(self, request: EngineRequest, phase: Phase, clock: StartClock | None = None) -> SequenceGroup | None:
        """Return a group for a valid new request, which is not in the table yet; None if all seats are taken. Raises the errors
        of validation."""
        check_request(request, self._limits)
        if request.adapter is not None and not self._may_have(request.adapter):
            raise UnknownAdapter(f"adapter: {request.adapter.name!r} is not loaded here (any more)")
        if request.request_id in self._groups:
            raise DuplicateRequest(f"request_id: {request.request_id!r} is in the engine already; release it first")
        weights_hash = self._weights_for(request.weights_hash)
        group = SequenceGroup(request, next(self._arrivals), phase, clock, weights_hash)
        num_taken = sum(other.num_seats for other in self._groups.values())
        return group if num_taken + group.num_seats <= self._limits.max_num_seqs else None

    def put(self, group: SequenceGroup) -> None:
        """Insert a group, or replace the group of the same request, whose blocks it has taken over."""
        self._groups[group.request.request_id] = group

    def has_any(self, request_id: str, sequences: AbstractSet[Sequence]) -> bool:
        """Return whether any of `sequences` belongs to the request."""
        group = self._groups.get(request_id)
        return group is not None and any(sequence in sequences for sequence in group.sequences)

    def release(self, request_id: str) -> bool:
        """Free all blocks of a request in any state, and its claim; return False if it is not in the table."""
        self._allocator.pool.unclaim(request_id)
        group = self._groups.pop(request_id, None)
        for sequence in group.sequences if group else ():
            self._scheduler.discard(sequence)
            self._allocator.release(sequence)
        if group is not None:
            self._end_session(group)
        return group is not None

    def release_retained(self, tenant: str, session: str) -> int:
        """Give up what is retained for a session, and what its present requests were to retain; return the retained blocks. A
        final request, which retains nothing, still ends the session: those that come in the meantime may retain something."""
        for group in self:
            wanted = group.retention
            if wanted is not None and not wanted.final and (wanted.tenant, wanted.session) == (tenant, session):
                group.retention = None
        return self._allocator.pool.release_retained(tenant, session)

    def start(self, sequence: Sequence, tokens: Mapping[int, int], finished: Collection[int]) -> None:
        """Start a sequence that was prefilled elsewhere: its choices become sequences and take their first tokens.

        Choices in `finished` have ended already. Tokens that a grammar forces after the first ones are reported with the next
        step.
        """
        for branch in self._branches(sequence):
            [choice] = branch.choices
            if choice in finished or self._append(branch, tokens[choice]):
                self._retire(branch)
            else:
                self._append_forced(branch)

    def continue_decode(self, sequence: Sequence, tokens: Mapping[int, tuple[int, ...]]) -> dict[int, NewTokens]:
        """Continue a running sequence whose known tokens are all computed: its choices become sequences and take tokens; some
        end.

        `tokens` of each choice: the KV of all but the last one is computed already. A choice may end before it has taken all.
        """
        branches = {branch.choices[0]: branch for branch in self._branches(sequence)}
        return {choice: self._take_drawn(branches[choice], token_ids) for choice, token_ids in tokens.items()}

    def take_token(self, sequence: Sequence, token_id: int) -> NewTokens:
        """Continue a sequence of one choice, whose known tokens are all computed, with one drawn token; it may end."""
        if sequence.group.request.grammar is not None or sequence.num_unreported:
            return self._take_drawn(sequence, (token_id,))
        reason = self._append(sequence, token_id)
        if reason is FinishReason.ERROR:
            self._allocator.withdraw(sequence)
        if reason is not None:
            self._retire(sequence)
        is_drawn = reason is not FinishReason.ERROR
        return NewTokens((token_id,) if is_drawn else (), reason, int(is_drawn))

    def hold_for_transfer(self, sequence: Sequence, tokens: Mapping[int, tuple[int, ...]]) -> dict[int, NewTokens]:
        """Hold a prefill_only request after its first tokens: its blocks stay for the push that reads their KV. The decode worker
        finds the tokens that a grammar forces after the first one."""
        self._scheduler.discard(sequence)
        sequence.group.phase = Phase.HELD
        return {choice: self._first_tokens(sequence, token) for choice, token in tokens.items()}

    def _first_tokens(self, sequence: Sequence, token: tuple[int, ...]) -> NewTokens:
        if token == (NO_TOKEN,):
            self._allocator.withdraw(sequence)
            return NewTokens((), FinishReason.ERROR, 0)
        return NewTokens(token, self._reason(sequence, [*sequence.output, *token]), 1)

    def _branches(self, sequence: Sequence) -> list[Sequence]:
        return self._part(sequence) if len(sequence.choices) > 1 else [sequence]

    def _part(self, trunk: Sequence) -> list[Sequence]:
        branches = self._allocator.part(trunk)
        self._scheduler.discard(trunk)
        trunk.group.sequences = list(branches)
        for branch in branches:
            self._scheduler.run(branch)
        return branches

    def _take_drawn(self, branch: Sequence, token_ids: tuple[int, ...]) -> NewTokens:
        num_before = len(branch.output)
        start, branch.num_unreported = num_before - branch.num_unreported, 0
        reason = self._append_drawn(branch, token_ids)
        num_drawn = len(branch.output) - num_before
        while reason is None and (forced := branch.forced_token()) is not None:
            reason = self._append(branch, forced)
        if reason is FinishReason.ERROR:
            self._allocator.withdraw(branch)
        if reason is not None:
            self._retire(branch)
        return NewTokens(tuple(branch.output[start:]), reason, num_drawn)

    def _append_drawn(self, branch: Sequence, token_ids: tuple[int, ...]) -> FinishReason | None:
        """Append tokens: the last one was drawn, the others are accepted draft tokens, whose KV is computed."""
        *kept, drawn = token_ids
        for token_id in kept:
            reason = self._append(branch, token_id)
            branch.num_computed += 1
            if reason is not None:
                break
            branch.matcher()  # advance the grammar now: the next finish reason depends on whether it is lost here
        else:
            reason = self._append(branch, drawn)
        if kept:
            self._allocator.publish(branch)
        return reason

    def _append_forced(self, branch: Sequence) -> None:
        """Append the tokens that the grammar forces, except one that ends the choice: no step could report that."""
        while (forced := branch.forced_token()) is not None:
            if self._append(branch, forced) is not None:
                branch.output.pop()  # the matcher has not taken it: it takes a token when the next one is requested
                return
            branch.num_unreported += 1

    def _append(self, branch: Sequence, token_id: int) -> FinishReason | None:
        if token_id == NO_TOKEN:
            return FinishReason.ERROR
        branch.output.append(token_id)
        return self._reason(branch, branch.output)

    def _reason(self, sequence: Sequence, output: list[int]) -> FinishReason | None:
        """Return the finish reason after `output`. STOP means that a constrained output is complete; if its grammar was lost, the
        reason is LENGTH."""
        group = sequence.group
        if group.end_rule is None:
            group.end_rule = self._limits.end_rule(group.request)
        reason = group.end_rule.reason(output)
        return FinishReason.LENGTH if reason is FinishReason.STOP and sequence.lost_grammar else reason

    def _retire(self, branch: Sequence) -> None:
        self._scheduler.discard(branch)
        self._allocator.release(branch)
        branch.group.sequences.remove(branch)
        if not branch.group.sequences:
            del self._groups[branch.group.request.request_id]
            self._end_session(branch.group)

    def _end_session(self, group: SequenceGroup) -> None:
        """Release its session if the request that ends here is a final one."""
        if group.retention is not None and group.retention.final:
            self.release_retained(group.retention.tenant, group.retention.session)


# Reservations: blocks that are held for a request before it is computed, and the two ways in which it then starts
#
# Another worker may write a reservation's blocks (a prefill worker's KV arrives in them). Until start() no token in them counts
# as computed, so none is published; only the prefix that was cached before is known to be valid, and it is pinned.


class Reservations:
    """Manage the reserved requests of the table."""

    def __init__(self, limits: Limits, table: RequestTable, allocator: BlockManager, scheduler: Scheduler) -> None:
        self._limits = limits
        self._table = table
        self._allocator = allocator
        self._scheduler = scheduler

    def reserve(self, request: EngineRequest) -> ReservedBlocks | None:
        """Return blocks and seats for a new request; None if there is no room now."""
        group = self._table.open(request, Phase.RESERVED)
        if group is None:
            return None
        admit = partial(self._allocator.admit, group.sequences[0], keep_free=self._num_blocks_to_leave())
        if not (admit() or (self._scheduler.trim() and admit())):
            return None
        self._table.put(group)
        return _granted(group)

    def restate(self, request_id: str, request: EngineRequest) -> ReservedBlocks | None:
        """Return the same reservation for a longer history, grown if need be; None, with nothing changed, if there is no room."""
        restated = self._restated(request_id, request)
        grow = partial(self._allocator.grow, restated.sequences[0], restated.sequences[0].num_tokens)
        if not (grow() or (self._scheduler.trim() and grow())):
            return None
        self._table.put(restated)
        return _granted(restated)

    def start(
        self, request_id: str, first_tokens: Mapping[int, int], finished: Collection[int], now_ns: int, *, is_exact: bool = True
    ) -> SequenceGroup:
        """Start a request whose KV has arrived: publish its blocks, if the KV `is_exact`, and continue the choices that are not
        `finished` with the first tokens. Return its group."""
        group = self._table.find(request_id, Phase.RESERVED)
        [sequence] = group.sequences
        if group.request.prefill_only:
            raise InvalidState(f"request {request_id!r} is prefill_only: it cannot go on here")
        _check_first_tokens(sequence.choices, first_tokens, finished, self._limits.vocab_size)
        group.phase, group.clock = Phase.ACTIVE, StartClock(now_ns, remote=True)
        sequence.num_computed = sequence.num_tokens
        sequence.is_private = not is_exact
        self._allocator.publish(sequence)
        self._scheduler.run(sequence)
        self._table.start(sequence, first_tokens, finished)
        return group

    def run_local(self, request_id: str, request: EngineRequest, now_ns: int) -> None:
        """Compute the tokens that are not cached here, into the reserved blocks."""
        group = self._restated(request_id, request)
        group.phase, group.clock = Phase.ACTIVE, StartClock(now_ns, remote=False)
        self._table.put(group)
        self._scheduler.run(group.sequences[0])

    def _restated(self, request_id: str, request: EngineRequest) -> SequenceGroup:
        """Return a group for a request that continues the same tokens; it has the blocks and the turn of the reserved group."""
        group = self._table.find(request_id, Phase.RESERVED)
        check_request(request, self._limits)
        restated = SequenceGroup(request, group.arrival, Phase.RESERVED, weights_hash=group.weights_hash)
        restated.retention = group.retention
        _check_same_beginning(group, restated)
        restated.sequences[0].inherit(group.sequences[0])
        return restated

    def _num_blocks_to_leave(self) -> int:
        num_reserved = sum(group.phase is Phase.RESERVED for group in self._table)
        return self._scheduler.num_spare_blocks(num_reserved) + self._scheduler.blocks_for_preempted


def _granted(group: SequenceGroup) -> ReservedBlocks:
    [sequence] = group.sequences
    block_ids = tuple(sequence.block_ids)
    return ReservedBlocks(group.request, block_ids, sequence.num_cached, sequence.num_tokens, sequence.num_rounded)


def _check_same_beginning(group: SequenceGroup, restated: SequenceGroup) -> None:
    [old], [new] = group.sequences, restated.sequences
    if restated.request.request_id != group.request.request_id or restated.request.block_root != group.request.block_root:
        raise InvalidRequest("request_id, cache_root, adapter: not those of the reservation")
    if new.tokens(0, old.num_tokens) != old.tokens(0, old.num_tokens):
        raise InvalidRequest("prompt, emitted: do not begin with the tokens that were reserved for")
    if not set(new.choices) <= set(old.choices):
        raise InvalidRequest(f"finished: choices {new.choices} are to go on, reserved were {old.choices}")


def _check_first_tokens(
    choices: Collection[int], first_tokens: Mapping[int, int], finished: Collection[int], vocab_size: int
) -> None:
    # Together they must name all choices: a choice that is missing would never end.
    if set(first_tokens) | set(finished) != set(choices):
        given = f"{sorted(first_tokens)} and finished {sorted(finished)}"
        raise InvalidRequest(f"first_tokens: given for choices {given}, needed for all of {sorted(choices)}")
    if not all(0 <= token_id < vocab_size for token_id in first_tokens.values()):
        raise InvalidRequest(f"first_tokens: {dict(first_tokens)} are not all in the vocabulary of {vocab_size}")


# The integrity check of the blocks, cheap enough to run whenever the engine idles.


def check_integrity(blocks: BlockManager, groups: Iterable[SequenceGroup], scheduler: Scheduler) -> None:
    """Raise IntegrityError unless each block has as many references as sequences and pins hold, and every sequence is in one
    place."""
    groups = list(groups)
    held = [sequence.block_ids for group in groups for sequence in group.sequences]
    blocks.pool.check(Counter(chain.from_iterable((*held, *blocks.pinned.values()))))
    active = [sequence for group in groups if group.phase is Phase.ACTIVE for sequence in group.sequences]
    scheduled = scheduler.running + scheduler.waiting
    if len(scheduled) != len(active) or set(scheduled) != set(active):
        raise IntegrityError(f"{len(scheduled)} sequences are scheduled, {len(active)} of known requests are active")
    if any(sequence.block_ids for sequence in scheduler.waiting):
        raise IntegrityError("a waiting sequence holds blocks")
