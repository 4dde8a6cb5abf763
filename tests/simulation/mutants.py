"""Bugs put in on purpose: a simulation that does not find them proves nothing.

Each is a function that changes the product in this process, before a run. There are none behind a second line of defence, where
no run shows the difference: a lease that never expires, for one, since a router's silence frees what its leases would; a
transfer or a broken stream that is never given up, since the router cancels it, or loses the worker, at its silence; tokens that
are dropped instead of held back, since a stream repeats them from where it broke; a block of the prefix cache that is published
while it is computed, since the step that fills it runs before another one reads it; a Cancel that comes before its Submit and is
forgotten, since the router ends the Submit, too; a holder that does not pin the blocks that it sends, since the reservation for
which they are fetched pins them as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def put(owner: object, name: str, new: object) -> None:
    """Replace a method or function of the product."""
    setattr(owner, name, new)


def is_turn(owner: Any, number: int) -> bool:
    """Return True every so many calls, counted by object: another run begins anew."""
    owner.num_turns = getattr(owner, "num_turns", 0) + 1
    return bool(owner.num_turns % number == 0)


MUTANTS: dict[str, Callable[[], None]] = {}


def mutant(change: Callable[[], None]) -> Callable[[], None]:
    MUTANTS[change.__name__] = change
    return change


@mutant
def fences_do_not_look_at_the_attempt() -> None:
    from decode_service import transfer_delegate
    from kvtransfer import reservation
    from kvtransfer.reservation import ReservationState, State

    put(ReservationState, "accepts_bytes", lambda self, attempt: self.state is State.RECEIVING)
    put(reservation, "_check_attempt", lambda current, event, attempt: None)
    put(transfer_delegate, "check_push_token", lambda hello, **expected: None)


@mutant
def a_freed_request_keeps_its_blocks() -> None:
    from decode_service.requests import Reservations

    async def free(self: Any, record: Any, ending: Any) -> None:
        self._forget(record, ending)
        self._set_inactive(record)

    put(Reservations, "_free", free)


@mutant
def blocks_are_freed_under_a_writer() -> None:
    from kvtransfer.receiver.receiver import Receiver

    async def quiesce(self: Any, reservation_id: str) -> None:
        return None

    put(Receiver, "quiesce", quiesce)


@mutant
def a_router_names_no_resume_points() -> None:
    from router.fleet.decode_stream import DecodeStream

    put(DecodeStream, "_resume_points", lambda self: [])


@mutant
def a_new_incarnation_is_not_noticed() -> None:
    from router.fleet.decode_stream import DecodeStream

    put(DecodeStream, "_alive", lambda self, epoch: None)


@mutant
def a_cancelled_request_is_not_cancelled_on_the_worker() -> None:
    from router.lifecycle.decode_session import DecodeSession

    async def cancel(self: Any, reason: str) -> None:
        return None

    put(DecodeSession, "_cancel", cancel)


@mutant
def a_late_first_token_is_told_before_output() -> None:
    from router.lifecycle.decode_session import DecodeSession

    def deliver_first(self: Any, chunks: Any) -> None:
        self._waits_for_first = False
        self._got_first = True
        self._held.clear()
        for chunk in chunks:
            self.deliver(chunk)

    put(DecodeSession, "deliver_first", deliver_first)


@mutant
def a_wake_up_is_lost() -> None:
    from router.flow_control.controller import FlowController

    wake = FlowController._wake

    def sometimes(self: Any, decided: Any) -> None:
        if not is_turn(self, 5):
            wake(self, decided)

    put(FlowController, "_wake", sometimes)


@mutant
def a_prefilled_request_is_not_released() -> None:
    from prefill_service.handoff import Handoff

    async def nothing(self: Any, engine_id: str) -> None:
        return None

    put(Handoff, "_clean_up", nothing)


@mutant
def a_client_resumes_from_the_beginning() -> None:
    from pdmesh.client.stream import StreamSession

    put(StreamSession, "request", lambda self, attempt: self._request)
    put(StreamSession, "_is_next", lambda self, delta, emitted: True)


@mutant
def a_silent_worker_is_never_lost() -> None:
    from router.fleet.heartbeat import SilenceDetector

    put(SilenceDetector, "is_lost", property(lambda self: False))


@mutant
def the_pool_is_not_copied_on_write() -> None:
    from pdmesh.engine.kv_cache.block_manager import BlockManager

    put(BlockManager, "_shared_to_write", lambda self, sequence, num_tokens: [])


@mutant
def a_resumed_output_skips_a_token() -> None:
    from decode_service.request import ChoiceOutput

    def rewind(self: Any, next_index: int) -> None:
        self.num_sent = min(max(next_index - self.first_index + 1, 0), len(self.token_ids))
        self.finish_sent = False

    put(ChoiceOutput, "rewind", rewind)


@mutant
def a_resumed_output_is_not_sent_again() -> None:
    from decode_service.request import ChoiceOutput

    put(ChoiceOutput, "rewind", lambda self, next_index: None)


@mutant
def a_router_repeats_what_it_has_told() -> None:
    from router.lifecycle.output import OutputTracker

    def append(self: Any, state: Any, chunk: Any) -> Any:
        state.token_ids += chunk.token_ids
        state.finish_reason = chunk.finish_reason
        return [chunk]

    put(OutputTracker, "_append", append)


@mutant
def a_history_ends_with_its_last_token_twice() -> None:
    from router.lifecycle.output import OutputTracker

    history = OutputTracker.history

    def longer(self: Any) -> Any:
        told = history(self)
        for choice in told:
            choice.token_ids.extend(choice.token_ids[-1:])
        return told

    put(OutputTracker, "history", longer)


@mutant
def a_client_does_not_try_again() -> None:
    from pdmesh.client.stream import Retrier

    def failed(self: Any, error: Exception, now: float, *, resuming: bool = False) -> float:
        raise error

    put(Retrier, "failed", failed)


@mutant
def a_router_that_is_gone_keeps_its_requests() -> None:
    from decode_service.token_stream import TokenStreams

    tick = TokenStreams.tick

    def quiet(self: Any, now: float) -> list[Any]:
        tick(self, now)
        return []

    put(TokenStreams, "tick", quiet)


@mutant
def a_lease_is_counted_from_the_wrong_end() -> None:
    from dataclasses import replace

    from kvtransfer import reservation

    put(reservation, "_renewed", lambda current, now: replace(current, lease_deadline=now - current.lease_s))


@mutant
def a_request_keeps_its_place_in_the_queue() -> None:
    from router.flow_control.controller import FlowController

    leave = FlowController.leave

    def sometimes(self: Any, ticket: Any, used_tokens: int | None = None) -> None:
        if not is_turn(self, 16):
            leave(self, ticket, used_tokens)

    put(FlowController, "leave", sometimes)


@mutant
def a_part_is_acknowledged_before_it_is_written() -> None:
    from kvtransfer.receiver.push import InboundConnection

    write = InboundConnection._write_part

    async def sometimes(self: Any, header: Any, part: Any, push: Any) -> tuple[int, int]:
        blocks = push.target.block_ids
        before = [bytes(view) for view in _views(self._host.memory, part, blocks)]
        result = await write(self, header, part, push)
        if is_turn(self, 4):  # the bytes are still on their way when they are acknowledged, and never come
            for view, data in zip(_views(self._host.memory, part, blocks), before, strict=True):
                view[:] = data
        return result

    put(InboundConnection, "_write_part", sometimes)


def _views(memory: Any, part: Any, block_ids: Any) -> list[memoryview]:
    from kvtransfer.manifest import part_views

    return [view.cast("B") for view in part_views(memory, part.layers, block_ids[part.block_start : part.block_end])]


@mutant
def a_block_that_is_used_anew_keeps_its_hash() -> None:
    from pdmesh.engine.kv_cache.block_pool import BlockPool

    put(BlockPool, "_forget", lambda self, block_id: None)


@mutant
def a_prefix_is_found_one_block_too_long() -> None:
    from pdmesh.engine.kv_cache.block_manager import BlockManager

    find = BlockManager._find_prefix

    def longer(self: Any, sequence: Any) -> list[int]:
        found = find(self, sequence)
        return [*found, found[-1]] if found and (len(found) + 1) * self._block_size < sequence.num_tokens else found

    put(BlockManager, "_find_prefix", longer)


@mutant
def a_lost_worker_fails_its_requests() -> None:
    from pdmesh.errors import Unavailable
    from router.lifecycle.decode_session import DecodeSession

    put(DecodeSession, "on_lost", lambda self, reason: self.end(Unavailable(reason)))


@mutant
def a_short_write_is_taken_for_a_whole_one() -> None:
    from kvtransfer.stream import SocketStream

    send = SocketStream._send_some

    def send_all(self: Any, pieces: Any) -> int:
        send(self, pieces)
        return sum(piece.nbytes for piece in pieces)

    put(SocketStream, "_send_some", send_all)


@mutant
def a_preempted_sequence_keeps_its_blocks() -> None:
    from pdmesh.engine.scheduler.scheduler import Scheduler

    preempt = Scheduler._preempt

    def kept(self: Any, victim: Any, plan: Any) -> None:
        blocks, num_computed = victim.block_ids, victim.num_computed
        preempt(self, victim, plan)
        victim.block_ids, victim.num_computed = blocks, num_computed

    put(Scheduler, "_preempt", kept)


@mutant
def a_breaker_never_lets_a_worker_back() -> None:
    from math import inf

    from router.fleet.circuit_breaker import CircuitBreaker

    eject = CircuitBreaker._open

    def for_ever(self: Any, worker: Any, role: Any, breaker: Any, now: float, reason: str) -> None:
        eject(self, worker, role, breaker, now, reason)
        breaker.until = inf

    put(CircuitBreaker, "_open", for_ever)
    put(CircuitBreaker, "ejected", lambda self, role, peers, now: frozenset(p for p in peers if self._left_out(p, role, now)))


@mutant
def decode_workers_live_by_the_wall_clock() -> None:
    import importlib
    import pkgutil
    import time
    from types import SimpleNamespace

    import decode_service

    wall = SimpleNamespace(**vars(time))
    wall.monotonic, wall.monotonic_ns = time.time, time.time_ns
    for found in pkgutil.walk_packages(decode_service.__path__, "decode_service."):
        module = importlib.import_module(found.name) if not found.name.endswith("__main__") else None
        if getattr(module, "time", None) is time:
            put(module, "time", wall)


@mutant
def output_is_counted_as_sent_that_was_not() -> None:
    from decode_service.request import ChoiceOutput

    take = ChoiceOutput.take

    def sometimes(self: Any, request_id: str) -> Any:
        output = take(self, request_id)
        return None if is_turn(self, 7) else output

    put(ChoiceOutput, "take", sometimes)


@mutant
def a_cancelled_stream_keeps_its_call() -> None:
    from pdmesh.client.stream import AsyncStream

    put(AsyncStream, "cancel", lambda self: self._stopped.set())


@mutant
def fetched_blocks_are_published_before_they_have_come() -> None:
    from prefill_service.kv_pull import KVPuller

    ask = KVPuller._ask

    async def early(self: Any, pull: Any, *others: Any) -> int | None:
        reserved = pull.expected.reserved
        await self._tools.sharing.take_in(reserved.request.request_id, reserved.num_tokens)
        return await ask(self, pull, *others)

    put(KVPuller, "_ask", early)


@mutant
def restored_blocks_are_published_before_they_are_written() -> None:
    from kvtransfer.tiers.pool_blocks import ViewedBlocks

    async def early(self: Any, block_ids: Any, blocks: Any) -> list[bool]:
        self._threads.submit(lambda: self._write(block_ids, [block.content for block in blocks]))
        return [True] * len(blocks)

    put(ViewedBlocks, "write", early)
