"""What the foreign protocols share."""

import struct

import grpc
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdmesh.runtime.errors import InvalidArgument, ResourceExhausted, Unavailable
from router.api.protocol_errors import mesh_request_id, renamed, shortest, their_name

NAMES = {"sampling.stop": "stop", "sampling.n": "parameters[n]", "tokens.ids": "input_ids", "messages": "msgs"}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("sampling.stop", "stop"),
        ("sampling.stop[3]", "stop[3]"),
        ("sampling.stop_token_ids", None),
        ("sampling.n", "parameters[n]"),
        ("messages[2].role", "msgs[2].role"),
        ("tokens.ids[0]", "input_ids[0]"),
        ("model", None),
        ("", None),
    ],
)
def test_names(ours: str, theirs: str | None) -> None:
    assert their_name(ours, NAMES) == theirs


def test_renamed_errors_keep_code_and_delay() -> None:
    error = renamed(InvalidArgument("sampling.stop[3]", "sampling.stop[3]: is empty"), NAMES)
    assert (error.code, error.field, error.message) == (grpc.StatusCode.INVALID_ARGUMENT, "stop[3]", "stop[3]: is empty")
    full = ResourceExhausted("full", retry_delay_s=2.0)
    assert renamed(full, NAMES) is full
    gone = Unavailable("gone")
    assert renamed(gone, NAMES) is gone


def test_ids() -> None:
    assert mesh_request_id("a b/ü:c") == "a-b-c"
    assert mesh_request_id("") == ""
    assert len(mesh_request_id("x" * 500)) == 64


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
@example(3.4028234663852886e38)  # the largest: its shorter decimals are too large
@example(-0.0)
def test_shortest_is_the_same_float_of_32_bits(value: float) -> None:
    assert struct.pack("f", shortest(value)) == struct.pack("f", value)


@given(st.integers(-9999, 9999), st.integers(1, 3))
def test_decimals_come_back_as_they_were_meant(digits: int, limiter: int) -> None:
    meant = digits / 10**limiter
    (sent,) = struct.unpack("f", struct.pack("f", meant))
    assert shortest(sent) == meant
