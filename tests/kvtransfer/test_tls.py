"""What is particular to tcp inside TLS: who is let in, what each side says of a peer that is not, and a network that tampers."""

import asyncio
import random
import ssl
from collections.abc import AsyncIterator

import grpc
import pytest

from kvtransfer.errors import PushFailed
from kvtransfer.receiver import push
from kvtransfer.sender.sender import PushJob, Sender
from kvtransfer.tls_stream import TlsStream
from pdmesh.runtime.rpc.tls import Tls
from tests.kvtransfer.endpoints import World, nothing_left, running, until
from tests.kvtransfer.test_tcp import NUM_KV_BYTES, Faults, proxied
from tests.support.certificates import Authority, mesh_tls, new_authority


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return new_authority(tmp_path_factory.mktemp("tls") / "other")


@pytest.fixture
async def encrypted() -> AsyncIterator[World]:
    with nothing_left():
        async with running(World("tcp+tls")) as world:
            yield world


@pytest.fixture
async def plain() -> AsyncIterator[World]:
    with nothing_left():
        async with running(World("tcp")) as world:
            yield world


def sender_with(world: World, tls: Tls | None) -> Sender:
    return Sender(world.source, world.identity, world.layout, 7, part_bytes=4096, num_connections=1, tls=tls)


async def refusal(sender: Sender, job: PushJob) -> PushFailed:
    """How a push is refused that must be refused soon."""
    with pytest.raises(PushFailed) as raised:
        await asyncio.wait_for(sender.push(job, timeout_s=20), 5)
    await sender.close()
    return raised.value


class Believing(Tls):
    """Shows the certificate of its own configuration, believes the CA of `mesh`, and asks for any name."""

    def __init__(self, own: Tls, mesh: Tls) -> None:
        super().__init__(own._config)
        self._server, self._client = own.server_context(), own.client_context()
        self.name = mesh.name
        for context in (self._server, self._client):
            context.load_verify_locations(cafile=mesh._config.tls_ca)

    def server_context(self) -> ssl.SSLContext:
        return self._server

    def client_context(self) -> ssl.SSLContext:
        return self._client


async def test_the_endpoint_says_that_it_wants_tls(encrypted: World) -> None:
    assert [endpoint.tls for endpoint in encrypted.receiver.endpoints()] == [True]
    error = await refusal(sender_with(encrypted, None), encrypted.job())
    assert error.code is grpc.StatusCode.UNAVAILABLE
    assert "the receiver uses TLS and this worker does not; give this worker --tls-cert, --tls-key and --tls-ca" in str(error)
    assert encrypted.delegate.events == []


async def test_nothing_goes_out_unencrypted_by_accident(plain: World) -> None:
    error = await refusal(sender_with(plain, mesh_tls()), plain.job())
    assert "this worker uses TLS and the receiver does not; give the receiver --tls-cert" in str(error)
    assert plain.receiver.num_connections == 0


async def test_a_plain_sender_that_tries_all_the_same(encrypted: World, caplog: pytest.LogCaptureFixture) -> None:
    job = encrypted.job()
    job.reservation.endpoints[0].tls = False
    error = await refusal(sender_with(encrypted, None), job)
    assert error.code is grpc.StatusCode.UNAUTHENTICATED and "takes pushes over TLS only; give the sender --tls-cert" in str(
        error
    )
    await until(lambda: encrypted.receiver.num_connections == 0, "the connection ends")
    assert "the peer does not use TLS" in caplog.text


async def test_a_tls_sender_that_tries_all_the_same(plain: World, caplog: pytest.LogCaptureFixture) -> None:
    job = plain.job()
    job.reservation.endpoints[0].tls = True
    error = await refusal(sender_with(plain, mesh_tls()), job)
    assert "the TLS handshake failed" in str(error)
    await until(lambda: plain.receiver.num_connections == 0, "the connection ends")
    assert "the peer uses TLS and this end does not; give this worker --tls-cert" in caplog.text


async def test_a_sender_of_another_ca(encrypted: World, other: Authority, caplog: pytest.LogCaptureFixture) -> None:
    error = await refusal(sender_with(encrypted, Tls(other.config())), encrypted.job())
    assert "its certificate is not accepted" in str(error)
    await until(lambda: encrypted.receiver.num_connections == 0, "the connection ends")
    assert "does not accept our certificate" in caplog.text


async def test_a_sender_that_believes_us_and_shows_anothers_certificate(
    encrypted: World, other: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    error = await refusal(sender_with(encrypted, Believing(Tls(other.config()), mesh_tls())), encrypted.job())
    assert "does not accept our certificate" in str(error)
    await until(lambda: encrypted.receiver.num_connections == 0, "the connection ends")
    assert "its certificate is not accepted" in caplog.text
    assert encrypted.delegate.events == []


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
async def test_a_certificate_of_the_ca_without_the_name(other: Authority, transport: str) -> None:
    """A client's, say: it may ask the router, but not write into blocks."""
    with nothing_left():
        receiver_tls = Tls(other.config())
        world = World(transport, tls=receiver_tls)
        await world.sender.close()
        world.sender = sender_with(world, Believing(_named(other, "alice"), receiver_tls))
        async with running(world):
            with pytest.raises(PushFailed, match="carries alice; only those with 'pdmesh'") as raised:
                await world.sender.push(world.job(), timeout_s=10)
            assert raised.value.code is grpc.StatusCode.UNAUTHENTICATED and not raised.value.retryable
            assert world.delegate.events == []


def _named(authority: Authority, name: str) -> Tls:
    config = authority.config(name, name=name)
    return Tls(type(config)(config.tls_cert, config.tls_key, config.tls_ca, name))


async def test_one_who_says_nothing_is_not_waited_for(encrypted: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "HANDSHAKE_TIMEOUT_S", 0.1)
    port = int(encrypted.receiver.endpoints()[0].address.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"\x16\x03\x01\x02")
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    await writer.wait_closed()


async def test_it_is_tls_1_3_on_the_wire(encrypted: World) -> None:
    encrypted.job()
    async with encrypted.raw_peer(encrypted.hello("r1")) as peer:
        assert isinstance(peer.stream, TlsStream)
        assert peer.stream._tls_sock.version() == "TLSv1.3"


@pytest.mark.parametrize("seed", range(12))
async def test_a_flipped_bit_ends_the_connection(seed: int) -> None:
    flip_at = random.Random(seed).randrange(NUM_KV_BYTES)
    async with proxied(Faults(flip_at=flip_at), transport="tcp+tls", idle_timeout_s=0.5) as (world, job):
        with pytest.raises(PushFailed):
            await world.sender.push(job, timeout_s=3)
        await until(lambda: world.receiver.num_connections == 0, "the session ends")
        assert "commit" not in world.delegate.kinds()


@pytest.mark.parametrize("seed", range(8))
async def test_a_cut_connection_fails_the_push(seed: int) -> None:
    cut_at = random.Random(seed).randrange(NUM_KV_BYTES)
    async with proxied(Faults(cut_at=cut_at), transport="tcp+tls") as (world, job):
        with pytest.raises(PushFailed) as raised:
            await world.sender.push(job, timeout_s=10)
        assert raised.value.retryable
        await until(lambda: world.receiver.num_connections == 0, "the session ends")


async def test_small_pieces() -> None:
    async with proxied(Faults(max_piece=97), transport="tcp+tls") as (world, job):
        await world.sender.push(job, timeout_s=20)
        world.check_arrived(job)


async def test_many_megabytes_over_several_connections() -> None:
    """More than any buffer holds: writes stop half way and are taken up again."""
    with nothing_left():
        world = World("tcp+tls", num_layers=60, num_blocks=600, part_bytes=1 << 22)
        await world.sender.close()
        world.sender = world.make_sender(part_bytes=1 << 22, num_connections=3)
        async with running(world):
            job = world.job(num_blocks=600)
            await world.sender.push(job, timeout_s=30)
            world.check_arrived(job)
