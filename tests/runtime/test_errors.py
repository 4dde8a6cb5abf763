"""The rich details, as any gRPC client in any language reads them."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from pdmesh.runtime.errors import (
    DETAILS_KEY,
    PUSHBACK_KEY,
    InvalidArgument,
    MeshError,
    ResourceExhausted,
    Unavailable,
    as_mesh_error,
    error_from_rpc,
    status_of,
)


def details(error: BaseException) -> status_pb2.Status:
    key, value = status_of(error).trailing_metadata[0]
    assert key == DETAILS_KEY and isinstance(value, bytes)
    return status_pb2.Status.FromString(value)


def test_a_field_violation_is_a_bad_request() -> None:
    status = details(InvalidArgument("prompt", "is empty"))
    info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(bad_request)
    assert (info.reason, info.domain) == ("INVALID_ARGUMENT", "pdmesh")
    assert [(violation.field, violation.description) for violation in bad_request.field_violations] == [("prompt", "is empty")]


def test_a_retry_delay_is_retry_info() -> None:
    retry = error_details_pb2.RetryInfo()
    assert details(ResourceExhausted("full", retry_delay_s=1.25)).details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 1250


@pytest.mark.parametrize(
    ("error", "pushback"),
    [
        (ResourceExhausted("full", retry_delay_s=1.2501), ["1251"]),
        (Unavailable("no worker", retry_delay_s=0.0), ["0"]),
        (ResourceExhausted("too large for ever"), ["-1"]),
        (Unavailable("this router is going"), []),
        (InvalidArgument("prompt", "is empty"), []),
    ],
)
def test_retries_of_grpc_itself_are_told_when(error: MeshError, pushback: list[str]) -> None:
    assert [value for key, value in status_of(error).trailing_metadata if key == PUSHBACK_KEY] == pushback


def test_the_standard_client_helper_reads_it() -> None:
    status = status_of(ResourceExhausted("full", retry_delay_s=1.25))

    class Call:
        def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
            return status.trailing_metadata

        def code(self) -> grpc.StatusCode:
            return status.code

        def details(self) -> str:
            return status.message

    assert rpc_status.from_call(Call()).message == "full"


@pytest.mark.parametrize("garbage", [b"", b"\xff\xff", b"\x1a\x04\x0a\x02zz"])
def test_unreadable_details_are_no_error(garbage: bytes) -> None:
    metadata = grpc.aio.Metadata((DETAILS_KEY, garbage))
    error = grpc.aio.AioRpcError(grpc.StatusCode.ABORTED, grpc.aio.Metadata(), metadata, "older attempt")
    received = error_from_rpc(error)
    assert (received.code, received.message, received.field) == (grpc.StatusCode.ABORTED, "older attempt", None)


def test_a_code_without_a_class_of_its_own() -> None:
    error = grpc.aio.AioRpcError(grpc.StatusCode.OUT_OF_RANGE, grpc.aio.Metadata(), grpc.aio.Metadata(), None)
    assert (type(error_from_rpc(error)), error_from_rpc(error).message) == (MeshError, "OUT_OF_RANGE")


def test_a_method_that_only_the_stub_has_is_not_implemented() -> None:
    assert as_mesh_error(NotImplementedError("Method not implemented!")).code is grpc.StatusCode.UNIMPLEMENTED
    assert as_mesh_error(NotImplementedError("an operator of a device")).code is grpc.StatusCode.INTERNAL


def test_an_internal_error_tells_no_details() -> None:
    status = status_of(ZeroDivisionError("prompt text"))
    assert status.code is grpc.StatusCode.INTERNAL
    assert "prompt text" not in status.message
    assert "prompt text" not in repr(status.trailing_metadata)
