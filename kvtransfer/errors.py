"""Errors of a transfer, each with the gRPC status code that the peer receives."""

import grpc

from pdmesh.runtime.errors import MeshError


class TransferRefused(MeshError):
    """The receiver rejects this push. Its delegate raises the error too; `code` and `message` go to the sender."""

    def __init__(self, code: grpc.StatusCode, message: str, *, field: str | None = None) -> None:
        super().__init__(message if field is None else f"{field}: {message}", code=code, field=field)


class Incompatible(TransferRefused):
    """The two ends differ in `field` of identity or layout."""

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        super().__init__(grpc.StatusCode.FAILED_PRECONDITION, f"ours is {ours!r}, theirs is {theirs!r}", field=field)
        self.ours = ours
        self.theirs = theirs


class FrameError(Exception):
    """The bytes are not of this protocol: the connection is closed, because the next frame cannot be found."""


class PeerClosed(ConnectionError):
    """The other end closed the connection."""


class TransportUnavailable(Exception):
    """This transport cannot be used between these two processes; nothing was opened, so another one may be tried."""


class NoAnswer(TransportUnavailable):
    """The endpoint accepts connections but does not answer hello."""


class PushFailed(MeshError):
    """A push ended without a commit that the sender knows of. `retryable`: another attempt may succeed."""

    def __init__(self, message: str, *, retryable: bool, code: grpc.StatusCode) -> None:
        super().__init__(message, code=code)
        self.retryable = retryable


RETRYABLE = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNIMPLEMENTED,  # this transport cannot be used here: the next attempt takes another one
    }
)

_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def code_number(code: grpc.StatusCode) -> int:
    """Return the number of `code` on the wire."""
    number: int = code.value[0]
    return number


def code_of(number: int) -> grpc.StatusCode:
    """Return the status code with this number; UNKNOWN for a number that gRPC does not have."""
    return _CODES.get(number, grpc.StatusCode.UNKNOWN)


def push_failed(code: grpc.StatusCode, message: str) -> PushFailed:
    """Return a PushFailed whose `retryable` follows from the code."""
    return PushFailed(message, retryable=code in RETRYABLE, code=code)
