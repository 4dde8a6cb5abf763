"""Blocks that are held for a request before anybody computes it, and the two ways in which it then starts.

A reservation's blocks may be written by somebody else (a prefill worker's KV arrives in them). Until start() nothing in them
counts as computed, so nothing is published; only the prefix that was cached before is known to be good, and it is pinned.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial

from pdmesh.engine.errors import InvalidRequest, InvalidState
from pdmesh.engine.kv_cache.block_manager import BlockAllocator
from pdmesh.engine.request import EngineRequest
from pdmesh.engine.request_validation import Limits, check_request
from pdmesh.engine.scheduler.requests import RequestTable
from pdmesh.engine.scheduler.scheduler import Scheduler
from pdmesh.engine.scheduler.sequence import Phase, SequenceGroup
from pdmesh.engine.timing import StartClock


@dataclass(frozen=True)
class ReservedBlocks:
    """What reserve() grants."""

    request: EngineRequest
    block_ids: tuple[int, ...]  # of the whole request, the cached prefix first
    num_cached_tokens: int  # whole blocks, fewer than num_tokens
    num_tokens: int  # tokens whose KV is to be there before start()


class Reservations:
    """The reserved part of the request table."""

    def __init__(self, limits: Limits, table: RequestTable, allocator: BlockAllocator, scheduler: Scheduler) -> None:
        self._limits = limits
        self._table = table
        self._allocator = allocator
        self._scheduler = scheduler

    def reserve(self, request: EngineRequest) -> ReservedBlocks | None:
        """Blocks and seats for a new request; None if there is no room now."""
        group = self._table.open(request, Phase.RESERVED)
        if group is None:
            return None
        admit = partial(self._allocator.admit, group.sequences[0], keep_free=self._num_blocks_to_leave())
        if not (admit() or (self._scheduler.trim() and admit())):
            return None
        self._table.put(group)
        return _granted(group)

    def restate(self, request_id: str, request: EngineRequest) -> ReservedBlocks | None:
        """The same reservation with more history, grown if need be; None, and nothing changed, if there is no room for that."""
        restated = self._restated(request_id, request)
        grow = partial(self._allocator.grow, restated.sequences[0], restated.sequences[0].num_tokens)
        if not (grow() or (self._scheduler.trim() and grow())):
            return None
        self._table.put(restated)
        return _granted(restated)

    def start(self, request_id: str, first_tokens: Mapping[int, int], finished: Collection[int], now_ns: int) -> SequenceGroup:
        """The KV is in place: publishes it and goes on with the first tokens of the choices that are not `finished`."""
        group = self._table.find(request_id, Phase.RESERVED)
        [sequence] = group.sequences
        if group.request.prefill_only:
            raise InvalidState(f"request {request_id!r} is prefill_only: it cannot go on here")
        _check_first_tokens(sequence.choices, first_tokens, finished, self._limits.vocab_size)
        group.phase, group.clock = Phase.ACTIVE, StartClock(now_ns, remote=True)
        sequence.num_computed = sequence.num_tokens
        self._allocator.publish(sequence)
        self._scheduler.run(sequence)
        self._table.start(sequence, first_tokens, finished)
        return group

    def run_local(self, request_id: str, request: EngineRequest, now_ns: int) -> None:
        """What is not cached is computed here, into the same blocks."""
        group = self._restated(request_id, request)
        group.phase, group.clock = Phase.ACTIVE, StartClock(now_ns, remote=False)
        self._table.put(group)
        self._scheduler.run(group.sequences[0])

    def _restated(self, request_id: str, request: EngineRequest) -> SequenceGroup:
        """A group like the reserved one, with its blocks and its turn, for a request that goes on from the same tokens."""
        group = self._table.find(request_id, Phase.RESERVED)
        check_request(request, self._limits)
        restated = SequenceGroup(request, group.arrival, Phase.RESERVED)
        _check_same_beginning(group, restated)
        restated.sequences[0].inherit(group.sequences[0])
        return restated

    def _num_blocks_to_leave(self) -> int:
        num_reserved = sum(group.phase is Phase.RESERVED for group in self._table)
        return self._scheduler.num_spare_blocks(num_reserved) + self._scheduler.num_owed_blocks


def _granted(group: SequenceGroup) -> ReservedBlocks:
    [sequence] = group.sequences
    return ReservedBlocks(group.request, tuple(sequence.block_ids), sequence.num_cached, sequence.num_tokens)


def _check_same_beginning(group: SequenceGroup, restated: SequenceGroup) -> None:
    [old], [new] = group.sequences, restated.sequences
    if restated.request.request_id != group.request.request_id or restated.request.cache_root != group.request.cache_root:
        raise InvalidRequest("request_id, cache_root: not those of the reservation")
    if new.tokens(0, old.num_tokens) != old.tokens(0, old.num_tokens):
        raise InvalidRequest("prompt, emitted: do not begin with the tokens that were reserved for")
    if not set(new.choices) <= set(old.choices):
        raise InvalidRequest(f"finished: choices {new.choices} are to go on, reserved were {old.choices}")


def _check_first_tokens(
    choices: Collection[int], first_tokens: Mapping[int, int], finished: Collection[int], vocab_size: int
) -> None:
    # Together exactly: a choice that was forgotten here would never end.
    if set(first_tokens) | set(finished) != set(choices):
        given = f"{sorted(first_tokens)} and finished {sorted(finished)}"
        raise InvalidRequest(f"first_tokens: given for choices {given}, needed for all of {sorted(choices)}")
    if not all(0 <= token_id < vocab_size for token_id in first_tokens.values()):
        raise InvalidRequest(f"first_tokens: {dict(first_tokens)} are not all in the vocabulary of {vocab_size}")
