"""Compatibility, grants, memory, checksums: the small pure parts."""

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.errors import Incompatible, TransferRefused, code_number, code_of
from kvtransfer.framing import checksum
from kvtransfer.manifest import (
    PROTOCOL_VERSION,
    bytes_per_layer_block,
    check_identity,
    check_memory,
    check_protocol,
    check_push_token,
    new_token,
    part_views,
    runs,
)
from kvtransfer.stream import Cursor
from pdmesh.runtime.addresses import split_address
from pdmesh.v1 import common_pb2, transfer_pb2
from tests.support.kv_memory import FakeKVMemory, make_identity, make_layout, make_memory


@pytest.mark.parametrize("field", [field.name for field in common_pb2.Identity.DESCRIPTOR.fields])
def test_identity_must_be_equal(field: str) -> None:
    ours, theirs = make_identity(), make_identity()
    check_identity(ours, theirs)
    setattr(theirs, field, getattr(theirs, field) * 2 or 1)
    with pytest.raises(Incompatible) as raised:
        check_identity(ours, theirs)
    assert raised.value.field == f"identity.{field}"
    assert raised.value.code is grpc.StatusCode.FAILED_PRECONDITION
    assert repr(getattr(ours, field)) in raised.value.message and repr(getattr(theirs, field)) in raised.value.message


def test_protocol_version() -> None:
    check_protocol(PROTOCOL_VERSION)
    with pytest.raises(Incompatible, match="protocol_version"):
        check_protocol(PROTOCOL_VERSION + 1)


def test_memory_must_fit_identity_and_layout() -> None:
    memory = FakeKVMemory(2, 4, 512)
    check_memory(memory, make_identity(num_layers=2), make_layout())
    with pytest.raises(ValueError, match="the pool has"):
        check_memory(memory, make_identity(num_layers=3), make_layout())
    with pytest.raises(ValueError, match=r"layout\.kv_dtype"):
        check_memory(memory, make_identity(num_layers=2), make_layout(kv_dtype="int3"))
    memory.close()


def test_int8_has_its_scales_behind_each_head() -> None:
    identity, layout = make_identity(num_layers=2, num_kv_heads=3, head_dim=64), make_layout(kv_dtype="int8")
    assert bytes_per_layer_block(identity, layout) == 16 * 3 * 68
    memory = FakeKVMemory(2, 4, 16 * 3 * 68)
    check_memory(memory, identity, layout)
    memory.close()


TOKEN = new_token()


@pytest.mark.parametrize(
    ("changes", "code", "field"),
    [
        ({"epoch": 8}, grpc.StatusCode.FAILED_PRECONDITION, "epoch"),
        ({"token": b""}, grpc.StatusCode.PERMISSION_DENIED, "token"),
        ({"token": TOKEN[:-1]}, grpc.StatusCode.PERMISSION_DENIED, "token"),
        ({"attempt": 1}, grpc.StatusCode.ABORTED, "attempt"),
        ({"attempt": 3}, grpc.StatusCode.FAILED_PRECONDITION, "attempt"),
    ],
)
def test_grant(changes: dict[str, int | bytes], code: grpc.StatusCode, field: str) -> None:
    right = transfer_pb2.TransferHello(epoch=7, token=TOKEN, attempt=2)
    check_push_token(right, epoch=7, token=TOKEN, attempt=2)
    for name, value in changes.items():
        setattr(right, name, value)
    with pytest.raises(TransferRefused) as raised:
        check_push_token(right, epoch=7, token=TOKEN, attempt=2)
    assert (raised.value.code, raised.value.field) == (code, field)
    assert TOKEN.hex() not in str(raised.value)


def test_checksum_is_crc32c() -> None:
    assert checksum([b"123456789"]) == 0xE3069283  # the check value of CRC-32C
    assert checksum([b"1234", memoryview(b""), memoryview(b"56789")]) == 0xE3069283


@given(st.lists(st.integers(0, 20), max_size=30), st.randoms())
def test_runs_join_exactly_what_is_consecutive_in_every_table(ids: list[int], random: object) -> None:
    other = [block + 100 for block in ids]
    found = list(runs(ids, other))
    assert [ids[run.first + i] for run in found for i in range(run.num_blocks)] == ids
    for run in found:
        assert all(ids[run.first + i] == ids[run.first] + i for i in range(run.num_blocks))


def test_runs_of_two_tables() -> None:
    assert [(run.first, run.num_blocks) for run in runs([1, 2, 3, 7], [4, 5, 9, 10])] == [(0, 2), (2, 1), (3, 1)]


def test_part_views_follow_the_order_of_the_wire() -> None:
    memory = make_memory(make_identity(), make_layout(), 8)
    memory.fill(1)
    ids = [3, 4, 1]
    wire = b"".join(part_views(memory, range(1, 3), ids))
    assert wire == b"".join(memory.block_view(layer, kv, block) for layer in (1, 2) for kv in (0, 1) for block in ids)
    assert len(part_views(memory, range(1, 3), ids)) == 2 * 2 * 2  # 3 and 4 lie side by side
    memory.close()


@given(st.lists(st.integers(0, 50), max_size=100), st.lists(st.integers(1, 70), min_size=1))
def test_cursor_walks_all_bytes_in_order(sizes: list[int], steps: list[int]) -> None:
    views = [memoryview(bytes([i % 256]) * size) for i, size in enumerate(sizes)]
    cursor, seen, turn = Cursor(views), b"", 0
    while cursor.remaining:
        with cursor.window() as pieces:
            window = b"".join(pieces)
        step = min(steps[turn % len(steps)], len(window))
        seen, turn = seen + window[:step], turn + 1
        cursor.advance(step)
    assert seen == b"".join(views)


def test_codes_travel_as_numbers() -> None:
    assert all(code_of(code_number(code)) is code for code in grpc.StatusCode)
    assert code_of(12345) is grpc.StatusCode.UNKNOWN


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:0", "host:99999", "host:x"])
def test_bad_addresses_are_named(address: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        split_address(address)


def test_addresses() -> None:
    assert split_address("10.0.0.1:80") == ("10.0.0.1", 80)
    assert split_address("[::1]:80") == ("::1", 80)
