"""What the receiver asks of the service that owns the reservations. All calls are made on the event loop."""

import hmac
import secrets
from dataclasses import dataclass
from typing import Protocol

import grpc

from kvtransfer.errors import TransferRefused
from pdmesh.v1 import transfer_pb2


@dataclass(frozen=True)
class PushTarget:
    """Where an accepted push goes.

    block_ids are the pool ids of all blocks of the request, in order; those before index `first_block` are pinned prefix and are
    neither sent nor written. num_tokens is how many tokens' KV must be in place at commit, prefix included.
    """

    reservation_id: str
    attempt: int
    block_ids: tuple[int, ...]
    first_block: int
    num_tokens: int


class ReceiverDelegate(Protocol):
    """Implemented by decode_service."""

    def open_push(self, hello: transfer_pb2.TransferHello) -> PushTarget:
        """Accept a sender whose identity, layout and memory were found compatible, or raise TransferRefused.

        It must check reservation, epoch, attempt and token (`grant.check_grant` does).
        """

    def push_progress(self, target: PushTarget) -> bool:
        """Renew the lease; False: the target is fenced (a newer attempt, or released) and nothing more is written."""

    async def commit_push(
        self, target: PushTarget, commit: transfer_pb2.TransferCommit, *, num_bytes: int, transport: str
    ) -> None:
        """Start the sequence: the manifest is complete and verified. Raises TransferRefused."""

    def push_failed(self, target: PushTarget, reason: str) -> None:
        """The session that `open_push` accepted ended without commit or finish. Also called for fenced targets."""

    def push_finished(self, target: PushTarget) -> None:
        """Every choice ended with its first token: the reservation is to be released."""


# The right to push into a reservation: epoch, token and attempt, checked by the owner of the reservations in `open_push`.


def new_token() -> bytes:
    """A fresh secret of 32 bytes for one reservation."""
    return secrets.token_bytes(32)


def unknown_reservation(reservation_id: str) -> TransferRefused:
    """The refusal for a reservation that is not (or no longer) held."""
    return _refuse(grpc.StatusCode.NOT_FOUND, "reservation_id", f"{reservation_id!r} is not held here")


def check_epoch(hello: transfer_pb2.TransferHello, epoch: int) -> None:
    """FAILED_PRECONDITION for a reservation of another incarnation; before anything is looked up by its name."""
    if hello.epoch != epoch:
        raise _refuse(grpc.StatusCode.FAILED_PRECONDITION, "epoch", f"{hello.epoch:#x} is not this worker's: it has restarted")


def check_push_token(hello: transfer_pb2.TransferHello, *, epoch: int, token: bytes, attempt: int) -> None:
    """Raises TransferRefused unless `hello` names this epoch, token and attempt.

    FAILED_PRECONDITION: foreign epoch, or an attempt that was never granted; PERMISSION_DENIED: wrong token; ABORTED: an attempt
    that a newer one has replaced. The token comes before the attempt: a stranger learns nothing about the reservation.
    """
    check_epoch(hello, epoch)
    if not hmac.compare_digest(hello.token, token):
        raise _refuse(grpc.StatusCode.PERMISSION_DENIED, "token", "it is not the one that came with the reservation")
    if hello.attempt < attempt:
        raise _refuse(grpc.StatusCode.ABORTED, "attempt", f"{hello.attempt} was replaced by attempt {attempt}")
    if hello.attempt > attempt:
        raise _refuse(grpc.StatusCode.FAILED_PRECONDITION, "attempt", f"{hello.attempt} was never granted, {attempt} was")


def _refuse(code: grpc.StatusCode, field: str, message: str) -> TransferRefused:
    return TransferRefused(code, message, field=field)
