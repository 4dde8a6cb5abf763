"""The KV receiver's delegate: it checks pushes against the reservations, renews leases and commits complete KV."""

from __future__ import annotations

import time

import grpc

from decode_service.ports import start
from decode_service.request import CommittedTokens, DecodeRequest, Handoff
from decode_service.requests import Reservations
from kvtransfer.errors import TransferRefused
from kvtransfer.manifest import check_epoch, check_push_token, unknown_reservation
from kvtransfer.receiver.push import PushTarget
from kvtransfer.reservation import AttemptFailed, Finished, InvalidTransition, Progress, PushOpened, StaleAttempt, transition
from pdmesh.runtime.failpoints import hit
from pdmesh.v1 import common_pb2, transfer_pb2


class PushDelegate:
    """Implement `kvtransfer.receiver.push.ReceiverDelegate` over the table of reservations."""

    def __init__(self, reservations: Reservations, *, epoch: int, block_size: int) -> None:
        self._reservations = reservations
        self._epoch = epoch
        self._block_size = block_size

    def open_push(self, hello: transfer_pb2.TransferHello) -> PushTarget:
        """Return the blocks to write into. Raises TransferRefused for an unknown reservation, a wrong epoch, token or attempt, or
        a reservation that takes no KV now."""
        check_epoch(hello, self._epoch)
        record = self._reservations.find(hello.reservation_id)
        if record is None or record.blocks is None:
            raise unknown_reservation(hello.reservation_id)
        # A failed attempt increments the number in `reservation`, so that its late pushes are refused; pushes of the next attempt
        # are refused until its Submit.
        check_push_token(hello, epoch=self._epoch, token=record.token, attempt=record.reservation.attempt)
        check_push_token(hello, epoch=self._epoch, token=record.token, attempt=record.submission.attempt)
        try:
            after = transition(record.reservation, PushOpened(hello.attempt), time.monotonic())
        except InvalidTransition as error:
            raise _refused(error) from error
        hit("decode.receiving")
        record.reservation = after
        return _target(record, self._block_size)

    def push_progress(self, target: PushTarget) -> bool:
        """Renew the lease; return False to fence the writer."""
        record = self._reservations.find(target.reservation_id)
        if record is None or not record.reservation.accepts_bytes(target.attempt):
            return False
        record.reservation = transition(record.reservation, Progress(target.attempt), time.monotonic())
        return True

    async def commit_push(
        self, target: PushTarget, commit: transfer_pb2.TransferCommit, *, num_bytes: int, transport: str
    ) -> None:
        """Start the sequence after the first tokens of `commit`. Raises TransferRefused."""
        record = self._reservations.find(target.reservation_id)
        if record is None:
            raise unknown_reservation(target.reservation_id)
        committed = _check_commit(record, target, commit)

        def accept() -> None:
            _keep_first_tokens(record, commit)

        try:
            await self._reservations.commit(record, target.attempt, committed, Handoff(num_bytes, transport), accept)
        except InvalidTransition as error:
            raise _refused(error) from error

    def push_failed(self, target: PushTarget, reason: str) -> None:
        """End the attempt; the reservation waits for the next attempt under its lease."""
        record = self._reservations.find(target.reservation_id)
        self._reservations.num_handoff_failures += 1
        if record is not None and record.reservation.accepts_bytes(target.attempt):
            record.reservation = transition(record.reservation, AttemptFailed(target.attempt, reason), time.monotonic())

    def push_finished(self, target: PushTarget) -> None:
        """Release the request, because every choice ended with its first token."""
        record = self._reservations.find(target.reservation_id)
        if record is not None and record.reservation.accepts_bytes(target.attempt):
            start(self._reservations.end(record, Finished("finished on prefill")))


def _target(record: DecodeRequest, block_size: int) -> PushTarget:
    blocks = record.blocks
    assert blocks is not None, f"{record.reservation_id} has no blocks"
    return PushTarget(
        reservation_id=record.reservation_id,
        attempt=record.submission.attempt,
        block_ids=blocks.block_ids,
        first_block=blocks.num_cached_tokens // block_size,
        num_tokens=blocks.num_tokens,
    )


def _check_commit(record: DecodeRequest, target: PushTarget, commit: transfer_pb2.TransferCommit) -> CommittedTokens:
    """Return the tokens of the commit. Raises TransferRefused unless it covers exactly the requested tokens and choices."""
    if commit.num_tokens != target.num_tokens:
        raise _invalid(f"num_tokens is {commit.num_tokens}, the reservation is for {target.num_tokens}")
    expected = record.submission.next_indexes
    given = {choice.choice: choice.index for choice in commit.choices}
    if len(given) != len(commit.choices) or given != expected:
        raise _invalid(f"choices are {given} (choice: index), expected {expected}")
    if all(choice.finish_reason for choice in commit.choices):
        raise _invalid("every choice has ended: abort with finished instead")
    return CommittedTokens(
        {choice.choice: choice.token_id for choice in commit.choices},
        {choice.choice: choice.draft_state for choice in commit.choices if choice.draft_state},
        is_exact=not commit.rounded,
    )


def _keep_first_tokens(record: DecodeRequest, commit: transfer_pb2.TransferCommit) -> None:
    """Add the commit's first tokens to the output, to be sent with the first frame: the router may have lost the prefill worker's
    stream."""
    wants_logprobs = record.engine_request.sampling.logprobs is not None
    for choice in commit.choices:
        reason: common_pb2.FinishReason.ValueType = choice.finish_reason
        record.output.choices[choice.choice].append_committed(choice.token_id, reason, wants_logprobs=wants_logprobs)


def _invalid(message: str) -> TransferRefused:
    return TransferRefused(grpc.StatusCode.INVALID_ARGUMENT, message, field="commit")


def _refused(error: InvalidTransition) -> TransferRefused:
    code = grpc.StatusCode.ABORTED if isinstance(error, StaleAttempt) else grpc.StatusCode.FAILED_PRECONDITION
    return TransferRefused(code, str(error), field="attempt")
