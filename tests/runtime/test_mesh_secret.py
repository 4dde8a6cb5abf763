"""The mesh secret: its file, the proofs of calls, over real gRPC with every kind of call, and sealed records in a real Redis."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from pdmesh import cli
from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.errors import MeshError
from pdmesh.runtime.registry.redis_server import EmbeddedRedis
from pdmesh.runtime.registry.registry import Registry
from pdmesh.runtime.rpc import mesh_secret, proof
from pdmesh.runtime.rpc.channel import connect
from pdmesh.runtime.rpc.mesh_secret import MAX_SKEW_S, MeshSecret, MeshSecretConfig, digest_of, read_secrets, write_secret
from pdmesh.runtime.rpc.server import GrpcServer
from tests.runtime.echo import KINDS, SERVICE, Behaviours, add_to_server, call
from tests.runtime.test_records import worker
from tests.runtime.test_tls import last, mirror

METHOD = "/pdmesh.v1.DecodeService/Submit"


@dataclass
class Clock:
    """Seconds since 1970 that a test sets."""

    now: float = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return Path(write_secret(tmp_path / "mesh-secret").mesh_secret_file)


def opened(file: Path, clock: Clock | None = None) -> MeshSecret:
    config = MeshSecretConfig(str(file))
    return MeshSecret(config) if clock is None else MeshSecret(config, clock=clock)


def other_than(file: Path) -> Path:
    return Path(write_secret(file.with_name(f"other-{secrets.token_hex(4)}")).mesh_secret_file)


def test_a_file_is_made_private_and_never_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s"
    assert cli.run(["secret", str(path)]) == 0
    (made,) = read_secrets(str(path))
    assert len(made) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert cli.run(["secret", str(path)]) == 1
    assert read_secrets(str(path)) == (made,)
    assert cli.run(["secret", str(path), "--add"]) == 0
    first, second = read_secrets(str(path))
    assert first == made != second
    printed = "".join(capsys.readouterr())
    assert made.hex() not in printed
    assert second.hex() not in printed


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b"ab" * 31, "holds 31 bytes, fewer than 32"),
        (b"xy" * 32, "line 1 of .* is not hexadecimal"),
        (b"ab" * 32 + b"\n" + b"\xff" * 64, "line 2 of .* is not hexadecimal"),
        (b"ab" * 40_000, "is larger than"),
    ],
)
def test_a_wrong_file_is_named_and_not_shown(file: Path, content: bytes, problem: str) -> None:
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=problem) as raised:
        MeshSecretConfig(str(file)).validate()
    assert raised.value.field == "mesh_secret_file"
    assert "abab" not in str(raised.value)


def test_a_file_that_is_missing_or_public(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_secrets(str(file) + "-missing")
    opened(file)
    assert not caplog.records
    file.chmod(0o644)
    opened(file)
    assert "every user of this machine" in caplog.text


def test_a_proof_is_for_one_method_one_request_and_once(file: Path) -> None:
    caller, server = opened(file), opened(file)
    made = caller.prove(METHOD, digest_of(b"request"))
    with pytest.raises(MeshError, match="different mesh secrets"):
        server.check("/pdmesh.v1.DecodeService/Cancel", made)
    assert server.check(METHOD, made) == digest_of(b"request")
    with pytest.raises(MeshError, match="used before"):
        server.check(METHOD, made)


def test_another_secret_and_none(file: Path) -> None:
    server = opened(file)
    for made, problem in ((None, "carries no proof"), (opened(other_than(file)).prove(METHOD), "different mesh secrets")):
        with pytest.raises(MeshError, match=problem) as raised:
            server.check(METHOD, made)
        assert raised.value.code is grpc.StatusCode.UNAUTHENTICATED
        assert raised.value.reason == mesh_secret.REASON
        assert "--mesh-secret-file" in raised.value.message
        assert file.read_text().strip() not in raised.value.message


@pytest.mark.parametrize("apart_s", [-MAX_SKEW_S - 1, MAX_SKEW_S + 1, 1e6])
def test_a_wrong_clock_is_named(file: Path, apart_s: float) -> None:
    clock = Clock()
    server, caller = opened(file, clock), opened(file, Clock(clock.now + apart_s))
    with pytest.raises(MeshError, match=rf"clock differs by {abs(apart_s):.0f} s .* set the clocks"):
        server.check(METHOD, caller.prove(METHOD))
    close = opened(file, Clock(clock.now + (MAX_SKEW_S - 1) * (1 if apart_s > 0 else -1)))
    server.check(METHOD, close.prove(METHOD))


def test_a_used_proof_is_remembered_for_as_long_as_its_time_is_good() -> None:
    nonces = mesh_secret._Nonces()
    now, nonce = 1000.0, bytes(16)
    assert nonces.add(nonce, now)
    for later in (0.0, MAX_SKEW_S, 2 * MAX_SKEW_S):
        assert not nonces.add(nonce, now + later)
    for step in range(1, 100):
        nonces.add(step.to_bytes(16, "big"), now + step * MAX_SKEW_S)
    assert len(nonces._young) + len(nonces._old) < 10  # and forgotten then


@given(data=st.data())
def test_no_bytes_but_a_proof_are_one(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzzed-secret"
    if not file.exists():
        write_secret(file)
    caller, server = opened(file), opened(file)
    good = caller.prove(METHOD)
    at = data.draw(st.integers(0, len(good) - 1))
    changed = good[:at] + bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1 :]
    for bad in (data.draw(st.binary(max_size=120)), changed, good[: data.draw(st.integers(0, len(good) - 1))], good + b"x"):
        with pytest.raises(MeshError) as raised:
            server.check(METHOD, bad)
        assert raised.value.code is grpc.StatusCode.UNAUTHENTICATED
    server.check(METHOD, good)


def test_rotation_without_a_gap(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Add at the end everywhere; move to the front everywhere; remove the former. Between two writes the processes differ."""
    monkeypatch.setattr(mesh_secret, "_RECHECK_S", 0.0)
    files = [file, file.with_name("beside")]
    new = secrets.token_hex(32)
    former = file.read_text().strip()
    steps = [[former], [former, new], [new, former], [new]]
    files[1].write_text(former)
    ends = [opened(each) for each in files]
    for step in steps:
        for each in files:  # between the two writes the processes differ
            each.write_text("\n".join(step) + "\n")
            for caller, server in (ends, reversed(ends)):
                server.check(METHOD, caller.prove(METHOD))
                assert server.unseal("k", 1, caller.seal("k", 1, b"x")) == b"x"
    gone = other_than(file)
    gone.write_text(former)
    with pytest.raises(MeshError):
        ends[0].check(METHOD, opened(gone).prove(METHOD))


def test_a_file_that_turns_bad_does_not_replace_a_good_one(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mesh_secret, "_RECHECK_S", 0.0)
    copy = file.with_name("copy")
    copy.write_text(file.read_text())
    server, caller = opened(file), opened(copy)
    file.write_text("nonsense")
    server.check(METHOD, caller.prove(METHOD))
    assert "stays in use" in caplog.text
    assert "nonsense" not in caplog.text
    os.unlink(file)
    server.check(METHOD, caller.prove(METHOD))


async def _unary(request: StringValue, context: object) -> StringValue:
    return request


async def _stream(request: StringValue, context: object) -> AsyncIterator[StringValue]:
    yield request


BEHAVIOURS: Behaviours = dict(zip(KINDS, (_unary, _stream, last, mirror), strict=True))


@asynccontextmanager
async def serving(secret: MeshSecret) -> AsyncIterator[str]:
    server = GrpcServer("127.0.0.1", 0, secret=secret)
    server.register(add_to_server, BEHAVIOURS, SERVICE)
    await server.start()
    await server.set_serving(True)
    yield server.address
    await server.drain(0)


@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_of_call_needs_a_proof(file: Path, kind: str) -> None:
    async with serving(opened(file)) as address:
        async with connect(address, secret=opened(file)) as channel:
            for text in ("a", "b" * 100_000):
                assert await call(channel, kind, StringValue(value=text)) == [text]
        for secret, problem in ((None, "no proof"), (opened(other_than(file)), "different mesh secrets")):
            async with connect(address, secret=secret) as channel:
                with pytest.raises(grpc.aio.AioRpcError, match=problem) as raised:
                    await call(channel, kind, is_silent=True)
                assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("kind", ["UnaryUnary", "UnaryStream"])
async def test_a_proof_that_somebody_has_overheard_serves_no_other_request(file: Path, kind: str) -> None:
    secret, path = opened(file), f"/{SERVICE}/{kind}"
    overheard = secret.prove(path, digest_of(StringValue(value="cancel mine").SerializeToString()))
    async with serving(opened(file)) as address, grpc.aio.insecure_channel(address) as channel:
        request, metadata = StringValue(value="cancel yours").SerializeToString(), ((proof.PROOF_KEY, overheard),)
        unary: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path)
        stream: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(path)
        with pytest.raises(grpc.aio.AioRpcError, match="not the one that the call's proof") as raised:
            await (unary(request, metadata=metadata) if kind == "UnaryUnary" else stream(request, metadata=metadata).read())
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_health_stays_open(file: Path) -> None:
    async with serving(opened(file)) as address, connect(address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
async def redis(redis_server: EmbeddedRedis) -> AsyncIterator[Redis]:
    async with Redis.from_url(redis_server.url, protocol=2) as client:
        yield client


async def test_records_of_others_are_ignored_counted_and_logged_once(
    file: Path, redis_server: EmbeddedRedis, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    ours, reader = (Registry(redis_server.url, ttl_s=60, secret=opened(file)) for _ in range(2))
    theirs = Registry(redis_server.url, ttl_s=60, secret=opened(other_than(file)))
    plain = Registry(redis_server.url, ttl_s=60)
    assert await ours.register(worker("w1"))
    assert await theirs.register(worker("w2"))
    assert await plain.register(worker("w3"))
    copied = await redis.get("pdmesh:default:worker:w1")
    assert copied is not None
    await redis.set("pdmesh:default:worker:w4", copied)  # under another key
    for _ in range(3):
        assert [info.worker_id for info in await reader.list_workers()] == ["w1"]
    assert reader.num_invalid_records == 3
    warnings = [record.message for record in caplog.records if "is ignored" in record.message]
    assert len(warnings) == 3
    assert sum("another mesh secret" in text for text in warnings) == 2
    assert sum("is not signed" in text for text in warnings) == 1
    assert [info.worker_id for info in await plain.list_workers()] == ["w3"]
    assert "this process has none; give it --mesh-secret-file" in caplog.text
    for each in (ours, reader, theirs, plain):
        await each.stop()


async def test_a_record_of_the_past_is_not_good_again(file: Path, redis_server: EmbeddedRedis, redis: Redis) -> None:
    clock = Clock()
    writer = Registry(redis_server.url, ttl_s=60, secret=opened(file, clock))
    reader = Registry(redis_server.url, ttl_s=60, secret=opened(file, clock))
    assert await writer.register_router("r1", "127.0.0.1:1", 7)
    kept = await redis.get("pdmesh:default:router:r1")
    assert kept is not None
    assert await reader.list_routers() == {"r1": "127.0.0.1:1"}
    clock.now += MAX_SKEW_S + 1
    await redis.set("pdmesh:default:router:r1", kept)
    assert await reader.list_routers() == {}
    assert await writer.register_router("r1", "127.0.0.1:1", 7)
    assert await reader.list_routers() == {"r1": "127.0.0.1:1"}
    for each in (writer, reader):
        await each.stop()


@given(st.binary(max_size=200), st.integers(0, 2**64 - 1))
def test_a_seal_holds_for_its_key_and_epoch_alone(tmp_path_factory: pytest.TempPathFactory, payload: bytes, epoch: int) -> None:
    file = tmp_path_factory.getbasetemp() / "sealing-secret"
    if not file.exists():
        write_secret(file)
    secret = opened(file)
    sealed = secret.seal("key", epoch, payload)
    assert secret.unseal("key", epoch, sealed) == payload
    for key, other, content in (
        ("kez", epoch, sealed),
        ("key", epoch ^ 1, sealed),
        ("key", epoch, sealed + b"x"),
        ("key", epoch, payload),
    ):
        with pytest.raises(ValueError, match="signed"):
            secret.unseal(key, other, content)
