"""The right to push into a reservation: epoch, token and attempt, checked by the owner of the reservations in `open_push`."""

import hmac
import secrets

import grpc

from kvtransfer.errors import TransferRefused
from pdmesh.v1 import transfer_pb2


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


def check_grant(hello: transfer_pb2.TransferHello, *, epoch: int, token: bytes, attempt: int) -> None:
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
