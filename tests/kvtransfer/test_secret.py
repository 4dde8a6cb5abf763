"""What is particular to tcp in a mesh with a secret: which peers are let in before the first frame, what each side says of a
peer that is not, and bytes that are no handshake."""

import asyncio
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtransfer import framing, secret_stream
from kvtransfer.errors import PeerClosed, PushFailed
from kvtransfer.secret_stream import MAGIC, SENDER, VERSION, SecretStream
from kvtransfer.sender.sender import PushJob, Sender
from pdmesh.runtime.rpc.mesh_secret import MAC_BYTES, NONCE_BYTES, MeshSecret
from pdmesh.v1 import transfer_pb2
from tests.kvtransfer.endpoints import World, nothing_left, running, until
from tests.kvtransfer.test_tcp import Faults, proxied
from tests.support.certificates import mesh_secret, new_secret


@pytest.fixture
async def guarded() -> AsyncIterator[World]:
    with nothing_left():
        async with running(World("tcp+secret")) as world:
            yield world


@pytest.fixture
async def plain() -> AsyncIterator[World]:
    with nothing_left():
        async with running(World("tcp")) as world:
            yield world


async def refusal(world: World, secret: MeshSecret | None) -> PushFailed:
    """How the push of a sender with `secret` is refused."""
    sender = Sender(world.source, world.identity, world.layout, 7, part_bytes=4096, num_connections=1, secret=secret)
    job: PushJob = world.job()
    with pytest.raises(PushFailed) as raised:
        await asyncio.wait_for(sender.push(job, timeout_s=20), 10)
    await sender.close()
    await until(lambda: world.receiver.num_connections == 0, "the connection ends")
    assert world.delegate.events == []
    world.check_untouched(set(range(world.target.num_blocks)))
    return raised.value


async def test_a_sender_without_the_secret(guarded: World, caplog: pytest.LogCaptureFixture) -> None:
    error = await refusal(guarded, None)
    assert error.code is grpc.StatusCode.UNAUTHENTICATED
    assert "the sender has no mesh secret; give it --mesh-secret-file" in str(error)
    assert "the sender has no mesh secret" in caplog.text


async def test_a_sender_with_another_secret(guarded: World, tmp_path: Path) -> None:
    assert "the receiver has another mesh secret than this process" in str(await refusal(guarded, new_secret(tmp_path)))


async def test_a_receiver_without_the_secret(plain: World) -> None:
    assert "the receiver closed the connection at the handshake: it has no room, or no mesh secret" in str(
        await refusal(plain, mesh_secret())
    )


class Bluffing(MeshSecret):
    """It believes any receiver, and cannot prove anything itself."""

    def __init__(self) -> None:
        """It reads no file."""

    def kv_proves(self, proof: bytes, role: bytes, nonces: bytes) -> bool:
        return True

    def kv_proof(self, role: bytes, nonces: bytes) -> bytes:
        return bytes(MAC_BYTES)


async def test_a_sender_that_cannot_prove_it(guarded: World) -> None:
    error = await refusal(guarded, Bluffing())
    assert error.code is grpc.StatusCode.UNAUTHENTICATED
    assert "the sender has another mesh secret than this receiver" in str(error)


class Reflecting(Bluffing):
    """It sends back what the receiver has proved."""

    def kv_proves(self, proof: bytes, role: bytes, nonces: bytes) -> bool:
        self.heard = proof
        return True

    def kv_proof(self, role: bytes, nonces: bytes) -> bytes:
        return self.heard


async def test_the_receivers_own_proof_is_none_of_a_sender(guarded: World) -> None:
    assert (await refusal(guarded, Reflecting())).code is grpc.StatusCode.UNAUTHENTICATED


async def test_what_a_sender_has_proved_is_no_good_on_another_connection(guarded: World) -> None:
    """Somebody repeats a whole recorded conversation."""
    nonce = bytes(NONCE_BYTES)
    recorded = mesh_secret().kv_proof(SENDER, nonce + bytes(NONCE_BYTES))
    reader, writer = await dialled(guarded)
    writer.write(MAGIC + bytes([VERSION]) + nonce)
    await reader.readexactly(NONCE_BYTES + MAC_BYTES)
    writer.write(recorded)
    reply = framing.decode(
        header := await reader.readexactly(framing.HEADER.size), await reader.readexactly(framing.body_length(header))
    )
    assert reply.hello_reply.code == grpc.StatusCode.UNAUTHENTICATED.value[0]
    writer.close()
    await writer.wait_closed()


async def test_frames_before_the_proof_are_not_read(guarded: World) -> None:
    """A hello that would be accepted, with the reservation's token, from one who has no secret."""
    guarded.job()
    reader, writer = await dialled(guarded)
    writer.write(framing.encode(transfer_pb2.TransferMessage(hello=guarded.hello("r1"))))
    writer.write_eof()
    await asyncio.wait_for(reader.read(), 5)
    assert guarded.delegate.events == []
    writer.close()
    await writer.wait_closed()


async def test_one_who_says_nothing_is_not_waited_for(guarded: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret_stream, "HANDSHAKE_TIMEOUT_S", 0.1)
    reader, writer = await dialled(guarded)
    writer.write(MAGIC)
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    await writer.wait_closed()


async def test_small_pieces() -> None:
    async with proxied(Faults(max_piece=7), transport="tcp+secret") as (world, job):
        await world.sender.push(job, timeout_s=20)
        world.check_arrived(job)


async def dialled(world: World) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(world.receiver.endpoints()[0].address.rpartition(":")[2]))


async def met(said: bytes, *, server_side: bool) -> None:
    """One end of a handshake hears `said`, then the end. Raises what it says of that."""
    ours, theirs = socket.socketpair()
    with ThreadPoolExecutor(1) as executor:
        stream = SecretStream(ours, executor, 1.0, mesh_secret(), server_side=server_side)
        theirs.sendall(said)
        theirs.shutdown(socket.SHUT_WR)
        try:
            await stream.open()
        finally:
            stream.close()
            theirs.close()


openings = st.binary(max_size=100).map(lambda rest: MAGIC + rest) | st.binary(max_size=200)


@given(said=openings, server_side=st.booleans())
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_no_bytes_but_a_proof_open_a_connection(said: bytes, server_side: bool) -> None:
    with pytest.raises(PeerClosed):
        asyncio.run(met(said, server_side=server_side))
