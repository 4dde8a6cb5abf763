"""Every record is validated fully; nothing that Redis may hold raises anything but InvalidRecord."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.runtime.registry.records import InvalidRecord, check_address, check_worker, decode_router, decode_worker, split
from pdmesh.v1.common_pb2 import Identity, KVLayout
from pdmesh.v1.worker_pb2 import ROLE_DECODE, ROLE_PREFILL, TransportReach, WorkerInfo


def worker(worker_id: str = "w1", **changes: object) -> WorkerInfo:
    info = WorkerInfo(
        worker_id=worker_id,
        epoch=7,
        address="127.0.0.1:5001",
        roles=[ROLE_PREFILL, ROLE_DECODE],
        identity=Identity(model="smol", weights_hash="ab" * 32, num_layers=30, num_kv_heads=3, head_dim=64, protocol_version=1),
        layout=KVLayout(block_size=16, kv_dtype="float32", tensor_parallel_size=1),
        transports=["shm", "tcp"],
        max_context=8192,
        max_num_seqs=64,
        num_blocks=1000,
        eos_token_ids=[2],
        host_id="boot:1",
    )
    info.MergeFrom(WorkerInfo(**changes))  # type: ignore[arg-type]
    return info


def record(payload: bytes, epoch: int = 7, generation: int = 1) -> bytes:
    return f"PDM1:{generation:016d}:{epoch:016x}:".encode() + payload


def test_a_right_record_is_read_back() -> None:
    assert decode_worker("w1", *split(record(worker().SerializeToString()))) == worker()


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"])
def test_element_types_of_kv(kv_dtype: str) -> None:
    info = worker()
    info.layout.kv_dtype = kv_dtype
    assert decode_worker("w1", *split(record(info.SerializeToString()))).layout.kv_dtype == kv_dtype


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda info: setattr(info, "worker_id", ""), "worker_id"),
        (lambda info: setattr(info, "worker_id", "w 1"), "worker_id"),
        (lambda info: setattr(info, "worker_id", "w" * 65), "worker_id"),
        (lambda info: setattr(info, "worker_id", "w2"), "stands under the key of another"),
        (lambda info: setattr(info, "epoch", 0), "epoch is zero"),
        (lambda info: setattr(info, "epoch", 8), "epoch 0000000000000008 differs"),
        (lambda info: setattr(info, "address", "localhost"), "address"),
        (lambda info: setattr(info, "address", "localhost:0"), "address"),
        (lambda info: setattr(info, "address", "local host:1"), "address"),
        (lambda info: info.ClearField("roles"), "roles"),
        (lambda info: info.roles.append(ROLE_DECODE), "roles"),
        (lambda info: info.roles.append(17), "roles"),
        (lambda info: info.roles.append(0), "roles"),
        (lambda info: info.ClearField("identity"), r"identity\.model is empty"),
        (lambda info: setattr(info.identity, "model", "m" * 300), r"identity\.model"),
        (lambda info: setattr(info.identity, "weights_hash", "a\nb"), r"identity\.weights_hash"),
        (lambda info: setattr(info.identity, "head_dim", 1 << 31), r"identity\.head_dim"),
        (lambda info: info.ClearField("layout"), r"layout\.kv_dtype"),
        (lambda info: setattr(info.layout, "kv_dtype", "int3"), r"layout\.kv_dtype"),
        (lambda info: setattr(info.layout, "block_size", 0), r"layout\.block_size"),
        (lambda info: setattr(info, "max_context", 1 << 31), "max_context"),
        (lambda info: setattr(info, "num_blocks", (1 << 32) - 1), "num_blocks"),
        (lambda info: info.eos_token_ids.extend(range(2000)), "eos_token_ids"),
        (lambda info: info.transports.append("SHM!"), "transports"),
        (lambda info: info.transport_reach.add(transport="pigeon"), "transport_reach"),
        (lambda info: info.transport_reach.extend([TransportReach(transport="shm")] * 17), "transport_reach"),
        (lambda info: setattr(info, "host_id", "h" * 300), "host_id"),
    ],
)
def test_each_field_is_checked(change: Callable[[WorkerInfo], None], named: str) -> None:
    info = worker()
    change(info)
    with pytest.raises(InvalidRecord, match=named):
        decode_worker("w1", *split(record(info.SerializeToString())))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "decode-0.decode.ns.svc:50051", "[::1]:65535", "a_b:80"])
def test_addresses_that_are_right(address: str) -> None:
    assert check_address(address) == address


@pytest.mark.parametrize(
    "address", ["", ":", "a", "a:", ":1", "a:65536", "a:-1", "a:1:2", "::1:5", "a/b:1", "a:١", "x" * 300 + ":1"]
)
def test_addresses_that_are_wrong(address: str) -> None:
    with pytest.raises(InvalidRecord, match="is not host:port"):
        check_address(address)


headers = st.builds(lambda payload, epoch: record(payload, epoch), st.binary(max_size=300), st.integers(0, 2**64 - 1))
valid = worker().SerializeToString()
mutated = st.builds(
    lambda position, noise: record(valid[:position] + noise + valid[position + len(noise) :]),
    st.integers(0, len(valid)),
    st.binary(max_size=6),
)


@given(st.text(max_size=70) | st.just("w1"), st.binary(max_size=400) | headers | mutated)
def test_garbage_is_an_invalid_record_or_a_worker_that_is_right(worker_id: str, value: bytes) -> None:
    try:
        info = decode_worker(worker_id, *split(value))
    except InvalidRecord as error:
        assert len(str(error)) < 600
    else:
        check_worker(info)
        assert info.worker_id == worker_id


@given(st.text(max_size=70) | st.just("r1"), st.binary(max_size=400) | headers)
def test_garbage_is_no_router(router_id: str, value: bytes) -> None:
    try:
        address = decode_router(router_id, *split(value))
    except InvalidRecord:
        return
    assert check_address(address) == address
