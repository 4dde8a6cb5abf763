"""TLS settings: each wrong file is named at start. TLS servers: who may call, and certificates that change while they serve."""

from __future__ import annotations

import asyncio
import ssl
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from google.protobuf.wrappers_pb2 import StringValue

from pdmesh.runtime.config import ConfigError, parse, to_env
from pdmesh.runtime.rpc.certificates import CertificateError, make_certificates
from pdmesh.runtime.rpc.channel import Channels, connect
from pdmesh.runtime.rpc.server import Callers, GrpcServer
from pdmesh.runtime.rpc.tls import ClientTlsConfig, Tls, TlsConfig, open_tls
from tests.runtime.echo import KINDS, SERVICE, Behaviours, add_to_server, call
from tests.support.certificates import Authority, copied, new_authority


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return new_authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return new_authority(tmp_path_factory.mktemp("tls") / "theirs")


@dataclass(frozen=True)
class ServiceConfig:
    """A service."""

    tls: TlsConfig = field(default_factory=TlsConfig, metadata={"flatten": True})


def problem_of(config: TlsConfig) -> str:
    """What a service says that is started with these settings."""
    with pytest.raises(ConfigError) as raised:
        parse(ServiceConfig, [], to_env(config), prog="service")
    return str(raised.value)


def test_good_files_and_none_at_all(ours: Authority) -> None:
    assert parse(ServiceConfig, [], to_env(ours.config()), prog="service").tls == ours.config()
    assert open_tls(parse(ServiceConfig, [], {}, prog="service").tls) is None


@pytest.mark.parametrize("missing", ["tls_cert", "tls_key", "tls_ca"])
def test_all_three_or_none(ours: Authority, missing: str) -> None:
    assert problem_of(replace(ours.config(), **{missing: ""})) == (
        f"PDMESH_{missing.upper()}: is missing; TLS needs --tls-cert, --tls-key and --tls-ca; give all three or none"
    )


def test_a_flag_is_named_as_it_was_given(ours: Authority) -> None:
    with pytest.raises(ConfigError, match=r"^--tls-key: is missing"):
        parse(ServiceConfig, ["--tls-cert", ours.config().tls_cert], {}, prog="service")


@pytest.mark.parametrize("which", ["tls_cert", "tls_key", "tls_ca"])
def test_files_that_are_not_there_or_no_pem(ours: Authority, tmp_path: Path, which: str) -> None:
    missing = problem_of(replace(ours.config(), **{which: "/no/such/file"}))
    assert missing.startswith(f"PDMESH_{which.upper()}: cannot read /no/such/file: No such file")
    (tmp_path / "text").write_text("hello")
    assert "PEM" in problem_of(replace(ours.config(), **{which: str(tmp_path / "text")}))


def test_damaged_pem(ours: Authority, tmp_path: Path) -> None:
    for which in ("tls_cert", "tls_key", "tls_ca"):
        lines = Path(getattr(ours.config(), which)).read_text().splitlines()
        damaged = tmp_path / which
        damaged.write_text("\n".join([lines[0], "AAAA", *lines[2:]]))
        assert "PDMESH_TLS_" in problem_of(replace(ours.config(), **{which: str(damaged)}))


def test_the_key_of_another_certificate(ours: Authority) -> None:
    wrong = replace(ours.config(), tls_key=ours.config("other").tls_key)
    assert problem_of(wrong).startswith("PDMESH_TLS_KEY: ") and "is not the key of" in problem_of(wrong)


def test_another_ca(ours: Authority, theirs: Authority) -> None:
    assert "is not accepted with the CA" in problem_of(replace(ours.config(), tls_ca=theirs.ca))


def test_expired(ours: Authority) -> None:
    assert "has expired" in problem_of(ours.config("old", days=0))


def test_another_name(ours: Authority) -> None:
    config = ours.config("alice", name="alice")
    assert "does not carry the name 'pdmesh'" in problem_of(config) and "--tls-name" in problem_of(config)
    replace(config, tls_name="alice").validate()
    assert "PDMESH_TLS_NAME: is empty" in problem_of(replace(config, tls_name=""))


def test_a_key_with_a_password_is_not_asked_for(ours: Authority, tmp_path: Path) -> None:
    key = tmp_path / "locked.key"
    open_key = load_pem_private_key(Path(ours.config().tls_key).read_bytes(), password=None)
    key.write_bytes(open_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))
    assert "protected by a password" in problem_of(replace(ours.config(), tls_key=str(key)))


def test_a_client_needs_no_certificate_of_its_own(ours: Authority) -> None:
    ClientTlsConfig(tls_ca=ours.ca).validate()
    for config, missing in (
        (ClientTlsConfig(tls_cert="c", tls_ca=ours.ca), "tls_key"),
        (ClientTlsConfig(tls_key="k", tls_ca=ours.ca), "tls_cert"),
        (ClientTlsConfig(tls_cert="c", tls_key="k"), "tls_ca"),
    ):
        with pytest.raises(ConfigError, match=f"^{missing}: is missing"):
            config.validate()


def test_what_is_made_by_hand_is_good_and_private(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "new", name="my-mesh")
    made.validate()
    assert stat.S_IMODE(Path(made.tls_key).stat().st_mode) == 0o600
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["ca.crt", "tls.crt", "tls.key"]
    with pytest.raises(CertificateError, match="already"):
        make_certificates(tmp_path / "new")


@pytest.mark.parametrize(("name", "days"), [("pdmesh", 10_000_000), ("a" * 65, 1)])
def test_what_no_certificate_can_say_is_named(name: str, days: int, tmp_path: Path) -> None:
    with pytest.raises(CertificateError, match=f"and {days} days"):
        make_certificates(tmp_path / "new", name=name, days=days)


def test_a_certificate_says_for_whom_and_how_long_it_is_good(tmp_path: Path) -> None:
    made = make_certificates(tmp_path, name="my-mesh", days=3)
    mesh, ca = (x509.load_pem_x509_certificate(Path(path).read_bytes()) for path in (made.tls_cert, made.tls_ca))
    names = mesh.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["my-mesh", "localhost"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "::1"]
    assert mesh.not_valid_after_utc - mesh.not_valid_before_utc == timedelta(days=3)
    assert isinstance(mesh.public_key(), ec.EllipticCurvePublicKey)
    mesh.verify_directly_issued_by(ca)


def test_sockets_of_ours_speak_tls_1_3_and_check_both_ends(ours: Authority) -> None:
    tls = Tls(ours.config())
    for context in (tls.server_context(), tls.client_context()):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3 and context.verify_mode is ssl.CERT_REQUIRED
    assert tls.client_context().check_hostname


def as_client(config: TlsConfig) -> ClientTlsConfig:
    return ClientTlsConfig(config.tls_cert, config.tls_key, config.tls_ca)


async def echo(request: StringValue, context: object) -> StringValue:
    return request


async def repeat(request: StringValue, context: object) -> AsyncIterator[StringValue]:
    for _ in range(3):
        yield request


async def last(requests: AsyncIterator[StringValue], context: object) -> StringValue:
    return [request async for request in requests][-1]


async def mirror(requests: AsyncIterator[StringValue], context: object) -> AsyncIterator[StringValue]:
    async for request in requests:
        yield request


BEHAVIOURS: Behaviours = {"UnaryUnary": echo, "UnaryStream": repeat, "StreamUnary": last, "StreamStream": mirror}


@asynccontextmanager
async def serving(config: TlsConfig, callers: Callers = "members") -> AsyncIterator[str]:
    server = GrpcServer("127.0.0.1", 0, tls=Tls(config), callers=callers)
    server.register(add_to_server, BEHAVIOURS, SERVICE)
    await server.start()
    yield server.address
    await server.drain(0)


async def answer(address: str, config: TlsConfig | Rogue | None) -> grpc.StatusCode:
    """How a call ends."""
    tls = open_tls(config) if isinstance(config, TlsConfig) else config
    async with connect(address, tls=tls) as channel:  # type: ignore[arg-type]  # a Rogue has what it takes
        try:
            async with asyncio.timeout(10):
                await call(channel, "UnaryUnary")
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


OK, UNAVAILABLE, UNAUTHENTICATED = grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED


async def test_members_only(ours: Authority, theirs: Authority) -> None:
    alice = ours.config("alice", name="alice")
    async with serving(ours.config()) as address:
        assert await answer(address, ours.config("second")) is OK
        assert await answer(address, None) is UNAVAILABLE
        assert await answer(address, ClientTlsConfig(tls_ca=ours.ca)) is UNAVAILABLE
        assert await answer(address, theirs.config()) is UNAVAILABLE
        # What it believes is right, what it shows is another's: the server is who refuses.
        assert await answer(address, Rogue(theirs.config(), ours.ca)) is UNAVAILABLE
        assert await answer(address, as_client(alice)) is UNAUTHENTICATED


@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_of_call_asks_who_calls(ours: Authority, kind: str) -> None:
    async with serving(ours.config()) as address:
        async with connect(address, tls=Tls(ours.config("second"))) as channel:
            assert set(await call(channel, kind)) == {"x"}
        async with connect(address, tls=Tls(as_client(ours.config("alice", name="alice")))) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(channel, kind, is_silent=True)
        assert refused.value.code() is UNAUTHENTICATED
        assert refused.value.details() == "the caller's certificate carries alice; only those with 'pdmesh' are of the mesh"


async def test_clients_of_a_router(ours: Authority, theirs: Authority) -> None:
    async with serving(ours.config(), "certified") as address:
        assert await answer(address, as_client(ours.config("alice", name="alice"))) is OK
        assert await answer(address, ClientTlsConfig(tls_ca=ours.ca)) is UNAVAILABLE
    async with serving(ours.config(), "any") as address:
        assert await answer(address, ClientTlsConfig(tls_ca=ours.ca)) is OK
        assert await answer(address, ClientTlsConfig(tls_ca=theirs.ca)) is UNAVAILABLE
        assert await answer(address, None) is UNAVAILABLE


async def test_a_server_without_the_name_is_not_believed(ours: Authority) -> None:
    async with serving(replace(ours.config("alice", name="alice"), tls_name="alice"), "certified") as address:
        assert await answer(address, ours.config()) is UNAVAILABLE


async def test_a_tls_caller_of_a_plain_server(ours: Authority) -> None:
    server = GrpcServer("127.0.0.1", 0)
    server.register(add_to_server, BEHAVIOURS, SERVICE)
    await server.start()
    assert await answer(server.address, ours.config()) is UNAVAILABLE
    await server.drain(0)


async def test_changed_files_count_from_the_next_handshake_on(ours: Authority, theirs: Authority, tmp_path: Path) -> None:
    config = copied(ours.config(), tmp_path)
    async with serving(config) as address:
        channels = Channels(tls=Tls(ours.config()))
        await call(channels.get(address), "UnaryUnary")
        copied(theirs.config(), tmp_path)
        assert await answer(address, ours.config()) is UNAVAILABLE
        assert await answer(address, theirs.config()) is OK
        await call(channels.get(address), "UnaryUnary")  # the connection that is open stays
        await channels.close()


def test_files_that_turn_bad_do_not_replace_good_ones(ours: Authority, tmp_path: Path) -> None:
    config = copied(ours.config(), tmp_path)
    tls = Tls(config)
    before = tls.server_context()
    Path(config.tls_key).write_text("half a")
    assert tls.server_context() is before
    Path(config.tls_key).unlink()
    assert tls.server_context() is before
    copied(ours.config("second"), tmp_path)
    assert tls.server_context() is not before


class Rogue:
    """Stands in for a Tls: shows the certificate of `config`, which nobody has checked, and believes `ca`."""

    def __init__(self, config: TlsConfig, ca: str) -> None:
        self._files = [Path(path).read_bytes() for path in (ca, config.tls_key, config.tls_cert)]
        self.channel_options = (("grpc.ssl_target_name_override", "pdmesh"),)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(*self._files)
