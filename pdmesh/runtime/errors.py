"""The errors of the mesh, and the one place that maps exceptions to gRPC status and back.

A handler raises a `MeshError`; the interceptor (`pdmesh.runtime.rpc.interceptor`) calls `status_of` and ends the call with code,
message and rich details (google.rpc.Status with ErrorInfo, BadRequest, RetryInfo); the retry delay travels a second time, for
clients whose gRPC library retries by itself. A client turns an `AioRpcError` back with `error_from_rpc`. Any other exception
becomes INTERNAL with a short id; its traceback is in this process's log under the same id and nowhere else.
"""

from __future__ import annotations

import logging
import math
import secrets
from dataclasses import dataclass
from typing import ClassVar

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "pdmesh"
DETAILS_KEY = "grpc-status-details-bin"
# The trailing metadata that gRPC's own retry policies understand: milliseconds to wait, or -1 for "do not".
PUSHBACK_KEY = "grpc-retry-pushback-ms"
# Status and details travel as HTTP/2 headers, of which gRPC takes 8 KiB by default. The message is in both: percent-encoded (up
# to three bytes for one) and in base64.
MAX_MESSAGE_BYTES = 900
MAX_FIELD_BYTES = 200
OTHER_ENGINE = "other_engine"
"""The `reason` of FAILED_PRECONDITION where the engine of a worker can never serve the request; another kind of engine may."""

CONTEXT_OVERFLOW = "context_length_exceeded"
"""The `reason` where a prompt, alone or with its output, is longer than the model, the router or every worker takes: agents then
shorten it. OpenAI's `code` has the same name."""
TOO_MANY_CHOICES = "too_many_choices"
"""The `reason` of RESOURCE_EXHAUSTED where more choices are asked for than any worker runs at a time."""
STOPPED = "stopped"
"""The `reason` of UNAVAILABLE where a worker is paused or asleep: it is at no fault, and takes requests again when it runs."""

logger = logging.getLogger(__name__)


class MeshError(Exception):
    """Raised for an error with a gRPC status. `field` names the request's field at fault; `retry_delay_s` (seconds) says when to
    try again; `reason` is a word for programs where one code has several causes."""

    default_code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode | None = None,
        field: str | None = None,
        retry_delay_s: float | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code or self.default_code
        self.message = message
        self.field = field
        self.retry_delay_s = retry_delay_s
        self.reason = reason

    def __repr__(self) -> str:
        details = f"field={self.field!r}, retry_delay_s={self.retry_delay_s}"
        return f"{type(self).__name__}({self.code.name}, {self.message!r}, {details})"


class InvalidArgument(MeshError):
    """Raised when the caller's request is wrong whatever the state of the mesh; names the field."""

    default_code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message, field=field)


class NotFound(MeshError):
    """Raised when what `field` names does not exist."""

    default_code = grpc.StatusCode.NOT_FOUND


class ResourceExhausted(MeshError):
    """Raised when there is no capacity now; `retry_delay_s` says when there may be."""

    default_code = grpc.StatusCode.RESOURCE_EXHAUSTED


class FailedPrecondition(MeshError):
    """Raised when the request does not fit this worker's state or identity; `field` names what differs."""

    default_code = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(self, field: str | None, message: str) -> None:
        super().__init__(message, field=field)


class Unavailable(MeshError):
    """Raised when the service cannot answer now; another one may."""

    default_code = grpc.StatusCode.UNAVAILABLE


class Cancelled(MeshError):
    """Raised when the request was cancelled."""

    default_code = grpc.StatusCode.CANCELLED


class DeadlineExceeded(MeshError):
    """Raised when the caller's deadline has passed."""

    default_code = grpc.StatusCode.DEADLINE_EXCEEDED


class Aborted(MeshError):
    """Raised when the call lost against a newer one (an older attempt, a foreign epoch)."""

    default_code = grpc.StatusCode.ABORTED


class Unimplemented(MeshError):
    """Raised when the server does not know the method."""

    default_code = grpc.StatusCode.UNIMPLEMENTED


class DataLoss(MeshError):
    """Raised when the model computed NaN or infinity for the request; another worker would compute the same."""

    default_code = grpc.StatusCode.DATA_LOSS

    @classmethod
    def of_logits(cls) -> DataLoss:
        """Return the error for a request whose logits are not finite."""
        return cls(
            "the model computed NaN or infinity for this request, so no token could be drawn: its weights are damaged, or it "
            "overflows in the worker's format; check the checkpoint, or give the worker --dtype float32"
        )


class Internal(MeshError):
    """Raised for a bug on the other side; the message holds the id under which its log has the traceback."""

    default_code = grpc.StatusCode.INTERNAL


@dataclass(frozen=True)
class RpcStatus:
    """Hold how a call ends: code, message, and the trailing metadata that carries the rich details."""

    code: grpc.StatusCode
    message: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]


def status_of(error: BaseException) -> RpcStatus:
    """Return the status that `error` ends a call with. Logs the traceback of an exception that is not a MeshError; never
    raises."""
    mesh_error = as_mesh_error(error)
    message = _shortened(_with_field(mesh_error), MAX_MESSAGE_BYTES)
    details = status_pb2.Status(code=mesh_error.code.value[0], message=message, details=_details_of(mesh_error))
    return RpcStatus(mesh_error.code, message, ((DETAILS_KEY, details.SerializeToString()), *_pushback_of(mesh_error)))


def _pushback_of(error: MeshError) -> tuple[tuple[str, str], ...]:
    """Return the retry metadata. A rejection without a delay is final (too large for ever, too slow): a retry would only add
    load."""
    if error.retry_delay_s is not None:
        return ((PUSHBACK_KEY, str(math.ceil(max(error.retry_delay_s, 0.0) * 1000))),)
    return ((PUSHBACK_KEY, "-1"),) if isinstance(error, ResourceExhausted) else ()


def _with_field(error: MeshError) -> str:
    """Return the message with its field: clients that do not read the rich details still see what is wrong where."""
    if error.field is None or error.field in error.message:
        return error.message
    return f"{_shortened(error.field, MAX_FIELD_BYTES)}: {error.message}"


_OF_STUB = "Method not implemented!"
"""What generated servicers raise in methods that their subclass leaves out."""


def as_mesh_error(error: BaseException) -> MeshError:
    """Return `error` as a MeshError. A timeout is DEADLINE_EXCEEDED, a method that only the stub has UNIMPLEMENTED,
    an RPC's error keeps its status, any other is INTERNAL with an id."""
    if isinstance(error, MeshError):
        return error
    if isinstance(error, grpc.aio.AioRpcError):
        return error_from_rpc(error)
    if isinstance(error, TimeoutError):
        return DeadlineExceeded(str(error) or "the time limit of an inner step has passed")
    if isinstance(error, NotImplementedError) and str(error) == _OF_STUB:
        return Unimplemented("this server does not have the method")
    error_id = secrets.token_hex(4)
    logger.error("internal error %s", error_id, exc_info=error)
    return Internal(f"internal error {error_id}; the server's log has the details under this id")


def error_from_rpc(error: grpc.aio.AioRpcError) -> MeshError:
    """Return the MeshError that the server raised, with its field and retry delay: the inverse of `status_of`, for clients."""
    code = error.code()
    message = error.details() or code.name
    field, retry_delay_s, reason = _read_details(error)
    cls = _CLASSES.get(code, MeshError)
    result = cls.__new__(cls)  # subclasses differ in their arguments, not in their fields
    MeshError.__init__(result, message, code=code, field=field, retry_delay_s=retry_delay_s, reason=reason)
    return result


_CLASSES: dict[grpc.StatusCode, type[MeshError]] = {
    cls.default_code: cls
    for cls in (
        InvalidArgument, NotFound, ResourceExhausted, FailedPrecondition, Unavailable, Cancelled, DeadlineExceeded, Aborted,
        Unimplemented, DataLoss, Internal,
    )
}  # fmt: skip


def _details_of(error: MeshError) -> list[any_pb2.Any]:
    info = error_details_pb2.ErrorInfo(reason=error.code.name, domain=DOMAIN)
    messages: list[Message] = [info]
    if error.reason is not None:
        info.metadata["reason"] = error.reason
    if error.field is not None:
        field = _shortened(error.field, MAX_FIELD_BYTES)
        info.metadata["field"] = field
        if error.code is grpc.StatusCode.INVALID_ARGUMENT:
            description = _shortened(error.message, MAX_FIELD_BYTES)
            violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=description)
            messages.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_delay_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(max(error.retry_delay_s, 0.0) * 1e9))
        messages.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return [_packed(message) for message in messages]


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _read_details(error: grpc.aio.AioRpcError) -> tuple[str | None, float | None, str | None]:
    """Return (field, retry_delay_s, reason) from the rich details; None where they are missing or unreadable."""
    field: str | None = None
    reason: str | None = None
    retry_delay_s: float | None = None
    for detail in _rich_status(error).details:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        try:
            if detail.Unpack(info):
                field, reason = info.metadata.get("field"), info.metadata.get("reason")
            elif detail.Unpack(retry):
                retry_delay_s = retry.retry_delay.ToNanoseconds() / 1e9
        except DecodeError:
            logger.warning("unreadable status detail %s in answer %s", detail.type_url, error.code().name)
    return field, retry_delay_s, reason


def _rich_status(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY:
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                logger.warning("unreadable status details in answer %s", error.code().name)
    return status_pb2.Status()


def _shortened(text: str, limit: int) -> str:
    """Return `text` as valid UTF-8 of at most `limit` bytes, three of them dots where it was cut."""
    encoded = text.encode("utf-8", "replace")
    return encoded.decode() if len(encoded) <= limit else encoded[: limit - 3].decode("utf-8", "ignore") + "..."
