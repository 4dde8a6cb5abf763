"""Bugs put in on purpose: a simulation that does not find them proves nothing.

Each is a function that changes the product in this process, before a run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def put(owner: object, name: str, new: object) -> None:
    """Replace a method or function of the product."""
    setattr(owner, name, new)


MUTANTS: dict[str, Callable[[], None]] = {}


def mutant(change: Callable[[], None]) -> Callable[[], None]:
    MUTANTS[change.__name__] = change
    return change


@mutant
def stale_attempts_are_taken() -> None:
    from kvtransfer import reservation

    put(reservation, "_check_attempt", lambda current, event, attempt: None)


@mutant
def a_failed_attempt_keeps_its_number() -> None:
    from dataclasses import replace

    from kvtransfer import reservation
    from kvtransfer.reservation import State

    def fail(current: Any, event: Any, attempt: int, now: float) -> Any:
        return replace(reservation._renewed(current, now), state=State.RESERVED) if current.accepts_bytes(attempt) else current

    put(reservation, "_fail_attempt", fail)


@mutant
def leases_never_expire() -> None:
    from kvtransfer import reservation

    put(reservation, "_expire", lambda current, now: current)


@mutant
def leases_are_not_renewed() -> None:
    from kvtransfer import reservation

    put(reservation, "_renewed", lambda current, now: current)


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
def an_early_cancel_is_forgotten() -> None:
    from decode_service import requests

    put(requests.Tombstones, "note_early_cancel", lambda self, request_id, now: None)


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
    count = [0]

    def sometimes(self: Any, decided: Any) -> None:
        count[0] += 1
        if count[0] % 5:
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
    from pdmesh.client import stream

    put(stream.StreamSession, "resuming", property(lambda self: False))


@mutant
def a_silent_worker_is_never_lost() -> None:
    from router.fleet.heartbeat import SilenceDetector

    put(SilenceDetector, "is_lost", property(lambda self: False))


@mutant
def the_pool_is_not_copied_on_write() -> None:
    from pdmesh.engine.kv_cache.block_manager import BlockManager

    put(BlockManager, "_shared_to_write", lambda self, sequence, num_tokens: [])


@mutant
def a_block_is_published_before_it_is_full() -> None:
    from pdmesh.engine.kv_cache.block_manager import BlockManager

    publish = BlockManager.publish

    def early(self: Any, sequence: Any) -> None:
        sequence.num_computed += 1
        try:
            if sequence.num_computed <= sequence.num_tokens:
                publish(self, sequence)
        finally:
            sequence.num_computed -= 1

    put(BlockManager, "publish", early)
