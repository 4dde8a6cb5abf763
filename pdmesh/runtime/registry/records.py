"""Registry records: the format of a worker's or router's entry in Redis, and the full validation of what is read there.

    key    pdmesh:<mesh>:worker:<worker_id>        pdmesh:<mesh>:router:<router_id>
    value  PDM1:<generation, 16 digits>:<epoch, 16 hex digits>:<payload>

The payload is a serialized WorkerInfo, or a router's address as UTF-8; in a mesh with a secret behind a seal (`MeshSecret`). The
generation orders processes that used the same id (epochs are random and have no order): the script that writes a record draws it
from Redis's clock at a process's first registration.
"""

from __future__ import annotations

import re

from google.protobuf.message import DecodeError

from pdmesh.v1 import worker_pb2

MAX_RECORD_BYTES = 64 * 1024
MAX_NAME_BYTES = 256
_HEADER = re.compile(rb"PDM1:([0-9]{16}):([0-9a-f]{16}):")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_HOST = re.compile(r"[A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f:.%A-Za-z0-9]{2,60}\]")
_TRANSPORT = re.compile(r"[a-z][a-z0-9_]{0,15}")
_KV_DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")
_ROLES = frozenset((worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE))


class InvalidRecord(ValueError):
    """Raised for an invalid record (or entry about to be written); the message names the field."""


def check_id(name: str, value: str) -> str:
    """Return `value` if it can be part of a key. Raises InvalidRecord."""
    if not _ID.fullmatch(value):
        raise InvalidRecord(f"{name} {value[:80]!r} is not 1 to 64 of A-Z a-z 0-9 . _ - beginning with a letter or digit")
    return value


NO_REVISION = "none"
"""What people call the workers that name no revision."""
MAX_REVISION_WEIGHT = 1_000_000
"""Greatest weight of a revision in a split of traffic."""


def check_revision(value: str) -> str:
    """Return `value` if it can name a revision. Raises InvalidRecord."""
    if value == NO_REVISION:
        raise InvalidRecord(f"revision {value!r} stands for the workers that name none")
    return check_id("revision", value)


def check_address(address: str) -> str:
    """Return `address` if it is "host:port" (an IPv6 host in brackets). Raises InvalidRecord."""
    host, _, port = address.rpartition(":")
    if not _HOST.fullmatch(host) or not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise InvalidRecord(f"address {address[:80]!r} is not host:port with a port from 1 to 65535")
    return address


def decode_worker(worker_id: str, epoch: int, payload: bytes) -> worker_pb2.WorkerInfo:
    """Return the worker in a record, read under the key of `worker_id`. Raises InvalidRecord for an invalid one."""
    try:
        info = worker_pb2.WorkerInfo.FromString(payload)
    except DecodeError as error:
        raise InvalidRecord(f"payload is no WorkerInfo ({error})") from None
    check_worker(info)
    if info.worker_id != worker_id:
        raise InvalidRecord(f"worker_id {info.worker_id!r} stands under the key of another")
    if info.epoch != epoch:
        raise InvalidRecord(f"epoch {info.epoch:016x} differs from the header's {epoch:016x}")
    return info


def decode_router(router_id: str, _epoch: int, payload: bytes) -> str:
    """Return the address in a router's record. Raises InvalidRecord."""
    check_id("router_id", router_id)
    try:
        return check_address(payload.decode("utf-8"))
    except UnicodeDecodeError:
        raise InvalidRecord("address is not UTF-8") from None


def check_worker(info: worker_pb2.WorkerInfo) -> None:
    """Raise InvalidRecord, naming the field, unless `info` is complete and plausible."""
    check_id("worker_id", info.worker_id)
    check_address(info.address)
    if info.epoch == 0:
        raise InvalidRecord("epoch is zero")
    if not info.roles or len(set(info.roles)) != len(info.roles) or not _ROLES.issuperset(info.roles):
        raise InvalidRecord(f"roles {list(info.roles)[:8]} are not one or more different known roles")
    _check_identity(info)
    _check_capacity(info)
    if len(info.transports) > 16 or not all(_TRANSPORT.fullmatch(name) for name in info.transports):
        raise InvalidRecord(f"transports {[name[:20] for name in info.transports[:16]]} are not names of transports")
    if len(info.transport_reach) > 16 or not {each.transport for each in info.transport_reach} <= set(info.transports):
        raise InvalidRecord("transport_reach is about more than the transports")
    _check_text("host_id", info.host_id)
    if info.revision:
        check_revision(info.revision)


def split(value: bytes) -> tuple[int, bytes]:
    """Return (epoch, payload) of a record's value. Raises InvalidRecord."""
    if len(value) > MAX_RECORD_BYTES:
        raise InvalidRecord(f"value is larger than {MAX_RECORD_BYTES} bytes")
    match = _HEADER.match(value)
    if match is None:
        raise InvalidRecord(f"value begins with {value[:24]!r} and not with the header of a record of version 1")
    return int(match[2], 16), value[match.end() :]


def _check_identity(info: worker_pb2.WorkerInfo) -> None:
    identity = info.identity
    if not identity.model:
        raise InvalidRecord("identity.model is empty")
    for name in ("model", "weights_hash", "numeric_mode"):
        _check_text(f"identity.{name}", getattr(identity, name))
    for name in ("num_layers", "num_kv_heads", "head_dim"):
        _check_range(f"identity.{name}", getattr(identity, name), 0, 1 << 20)


def _check_capacity(info: worker_pb2.WorkerInfo) -> None:
    if info.layout.kv_dtype not in _KV_DTYPES:
        raise InvalidRecord(f"layout.kv_dtype {info.layout.kv_dtype[:40]!r} is not one of {', '.join(_KV_DTYPES)}")
    _check_range("layout.block_size", info.layout.block_size, 1, 1 << 16)
    _check_range("layout.tensor_parallel_size", info.layout.tensor_parallel_size, 0, 1 << 10)
    _check_range("max_context", info.max_context, 0, 1 << 30)
    _check_range("max_num_seqs", info.max_num_seqs, 0, 1 << 24)
    _check_range("num_blocks", info.num_blocks, 0, 1 << 31)
    _check_range("the number of eos_token_ids", len(info.eos_token_ids), 0, 1024)


def _check_text(name: str, value: str) -> None:
    if len(value.encode("utf-8")) > MAX_NAME_BYTES or not (value.isprintable()):
        raise InvalidRecord(f"{name} {value[:40]!r} is longer than {MAX_NAME_BYTES} bytes or holds control characters")


def _check_range(name: str, value: int, minimum: int, maximum: int) -> None:
    if not minimum <= value <= maximum:
        raise InvalidRecord(f"{name} is {value}, not between {minimum} and {maximum}")
