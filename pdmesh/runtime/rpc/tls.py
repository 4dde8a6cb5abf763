"""TLS between the processes of a mesh, and to its clients.

    tls = open_tls(config.tls)                              # None: nothing is encrypted
    server = GrpcServer(host, port, tls=tls)                # peers show a certificate of the CA that carries the mesh's name
    channel = connect(address, tls=tls)
    tls.server_context(), tls.client_context()              # for sockets of our own: TLS 1.3

All certificates of a mesh carry one name (a DNS subject alternative name, "pdmesh" unless --tls-name says otherwise), and that is
what is verified, not the address: pods change theirs. So one certificate may serve all pods, and meshes that share a CA are
separated by their names. Clients of a router need any certificate of the CA.

The files are read again when they change (cert-manager replaces them): listening ports and KV connections use the new ones from
the next handshake on. A gRPC channel keeps the one that it was opened with: a router reopens the channel of a lost worker.
"""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import grpc

from pdmesh.runtime.config import ConfigError

# The three files of a mesh's TLS, read and checked: mistakes in them are found here, not by a peer.
#
# The check is the one that peers make: a TLS handshake of the certificate with itself, in memory. Needs the standard library
# only.


_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
_PRIVATE_KEY = b"PRIVATE KEY-----"
_HANDSHAKE_ROUNDS = 3  # client hello; server hello to finished; client certificate to finished
# X509_V_ERR_* of OpenSSL.
_NOT_YET_VALID, _EXPIRED, _WRONG_NAME = 9, 10, 62


@dataclass(frozen=True)
class TlsPaths:
    """Name the files. `cert` and `key` are empty for a client that shows no certificate."""

    cert: str
    key: str
    ca: str

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """Return a stamp that differs when a file has been changed or replaced. Raises OSError."""
        return tuple((stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in (Path(path).stat() for path in self._given()))

    def _given(self) -> Iterator[str]:
        return (path for path in (self.cert, self.key, self.ca) if path)


@dataclass(frozen=True)
class TlsMaterial:
    """Hold the files' content, PEM; the contexts are for sockets of our own: TLS 1.3, both ends show a certificate, except that
    `public_context` asks clients for none."""

    cert: bytes | None
    key: bytes | None
    ca: bytes
    server_context: ssl.SSLContext
    public_context: ssl.SSLContext
    client_context: ssl.SSLContext


def read_tls_files(paths: TlsPaths, name: str, *, member: bool) -> TlsMaterial:
    """Return the files as they are now; a `member` of the mesh has a certificate that carries `name`.

    Raises ConfigError that names the setting at fault and what to do about it."""
    ca = _pem("tls_ca", paths.ca, _CERTIFICATE, "certificate")
    kinds = (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
    server, public, client = (_context(kind, ca) for kind in kinds)
    public.verify_mode = ssl.CERT_NONE
    if not paths.cert:
        return TlsMaterial(None, None, ca, server, public, client)
    cert = _pem("tls_cert", paths.cert, _CERTIFICATE, "certificate")
    key = _pem("tls_key", paths.key, _PRIVATE_KEY, "private key")
    if b"ENCRYPTED" in key:
        raise ConfigError(
            "tls_key", f"{paths.key} is protected by a password", "give a key without one, readable by this user only"
        )
    for context in (server, public, client):
        _load_chain(context, paths)
    checking = client if member else _trusting_client(paths)
    _check_as_peers_do(server, checking, name, paths)
    return TlsMaterial(cert, key, ca, server, public, client)


def explain(error: OSError) -> str:
    """Return what a failed handshake, or an alert of the peer, means."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    reason = (getattr(error, "reason", None) or str(error) or type(error).__name__).replace("_", " ").lower()
    if "alert" in reason:
        return f"the peer does not accept our certificate, or wants one ({reason})"
    if "eof" in reason or isinstance(error, ConnectionResetError):
        return "the peer closed the connection: it has no room, or does not use TLS"
    if "did not return a certificate" in reason:
        return "it shows no certificate, and has to"
    if "wrong version number" in reason or "record layer failure" in reason:
        return "it does not speak TLS"
    return reason


def _pem(setting: str, path: str, mark: bytes, what: str) -> bytes:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(setting, f"cannot read {path}: {error.strerror}", "give a file that this user can read") from None
    if mark not in content:
        raise ConfigError(setting, f"{path} holds no {what} in PEM", f'give a file with "-----BEGIN {what.upper()}-----"')
    return content


def _context(protocol: int, ca: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # connections are not resumed
    try:
        context.load_verify_locations(cadata=ca.decode("ascii", "ignore"))
    except ssl.SSLError as error:
        raise ConfigError(
            "tls_ca", f"the certificates cannot be parsed ({explain(error)})", "give the file of the CA again"
        ) from None
    return context


def _load_chain(context: ssl.SSLContext, paths: TlsPaths) -> None:
    try:
        context.load_cert_chain(paths.cert, paths.key)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                "tls_key", f"{paths.key} is not the key of {paths.cert}", "give the two that belong together"
            ) from None
        problem = f"{paths.cert} and {paths.key} cannot be used ({explain(error)})"
        raise ConfigError("tls_cert", problem, "give both files again, in PEM") from None


def _trusting_client(paths: TlsPaths) -> ssl.SSLContext:
    """Return a context for a certificate that is valid for clients only, under a name of its own: only the server checks it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(paths.cert, paths.key)
    return context


def _check_as_peers_do(server: ssl.SSLContext, client: ssl.SSLContext, name: str, paths: TlsPaths) -> None:
    try:
        _shake_hands(server, client, name)
    except ssl.SSLCertVerificationError as error:
        raise _refused_by_peers(error, name, paths) from None
    except ssl.SSLError as error:
        raise ConfigError("tls_cert", f"{paths.cert} cannot be used ({explain(error)})", "make a new one") from None


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> None:
    """Perform the handshake in memory. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(_HANDSHAKE_ROUNDS):
        for end in ends:
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()


def _refused_by_peers(error: ssl.SSLCertVerificationError, name: str, paths: TlsPaths) -> ConfigError:
    if error.verify_code in (_EXPIRED, _NOT_YET_VALID):
        when = "has expired" if error.verify_code == _EXPIRED else "is not valid yet"
        return ConfigError("tls_cert", f"{paths.cert} (or its CA's) {when}", "make a new one, or set this machine's clock")
    if error.verify_code == _WRONG_NAME:
        remedy = f"add DNS:{name} to its subject alternative names, or give the name that it carries with --tls-name"
        return ConfigError("tls_cert", f"{paths.cert} does not carry the name {name!r}", remedy)
    problem = f"{paths.cert} is not accepted with the CA {paths.ca} ({error.verify_message})"
    return ConfigError("tls_cert", problem, "give a certificate that this CA has signed, for servers and clients")


MESH_NAME = "pdmesh"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TlsConfig:
    """Configure the certificates of a process of the mesh: all three files, or none."""

    is_member: ClassVar[bool] = True  # its certificate carries the name of the mesh

    tls_cert: str = field(default="", metadata={"help": "certificate of this process, PEM file; empty: no TLS"})
    tls_key: str = field(default="", metadata={"help": "its private key, PEM file"})
    tls_ca: str = field(default="", metadata={"help": "certificates of the CA that signs those of the mesh, PEM file"})
    tls_name: str = field(default=MESH_NAME, metadata={"help": "DNS name that all certificates of the mesh carry"})

    @property
    def is_set(self) -> bool:
        """Return whether TLS is configured."""
        return any((self.tls_cert, self.tls_key, self.tls_ca))

    @property
    def paths(self) -> TlsPaths:
        """Return the files' paths."""
        return TlsPaths(self.tls_cert, self.tls_key, self.tls_ca)

    def validate(self) -> None:
        """Raise ConfigError that names the setting, also for mistakes inside the files."""
        self._check_given()
        if not self.tls_name:
            raise ConfigError("tls_name", "is empty", f"give the name that the certificates carry, such as {MESH_NAME}")
        if self.is_set:
            self.read()

    def read(self) -> TlsMaterial:
        """Return the files' current content, checked. Raises ConfigError."""
        return read_tls_files(self.paths, self.tls_name, member=self.is_member)

    def _check_given(self) -> None:
        for name in ("tls_cert", "tls_key", "tls_ca"):
            if self.is_set and not getattr(self, name):
                raise ConfigError(name, "is missing", "TLS needs --tls-cert, --tls-key and --tls-ca; give all three or none")


@dataclass(frozen=True)
class ClientTlsConfig(TlsConfig):
    """Configure a client's certificates: the CA and, if the router identifies callers, certificate and key."""

    is_member: ClassVar[bool] = False

    def _check_given(self) -> None:
        if self.is_set and not self.tls_ca:
            raise ConfigError("tls_ca", "is missing", "give the CA that has signed the router's certificate")
        if bool(self.tls_cert) != bool(self.tls_key):
            missing = "tls_key" if self.tls_cert else "tls_cert"
            raise ConfigError(missing, "is missing", "give certificate and key together, or neither")


class Tls:
    """Provide credentials from the files of a configuration, read again when they change. Thread-safe."""

    def __init__(self, config: TlsConfig) -> None:
        """Read the files. Raises ConfigError."""
        config.validate()
        self.name = config.tls_name
        self._config = config
        self._lock = threading.Lock()
        self._stamp = config.paths.stamp()
        self._material = config.read()
        self._num_changes = 0

    def server_credentials(self, *, require_client: bool) -> grpc.ServerCredentials:
        """Return the credentials of a listening port. `require_client`: callers must show a certificate of the CA."""
        served = self._current()

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            """Return new certificates; None: no change. Called for each handshake, on a thread of gRPC's."""
            nonlocal served
            now = self._current()
            if now is served:
                return None
            served = now
            return _server_certificate(now)

        return grpc.dynamic_ssl_server_credentials(
            _server_certificate(served),
            fetch,  # type: ignore[arg-type]  # the stubs do not know that it may return None
            require_client_authentication=require_client,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials for a channel, which keeps them."""
        material = self._current()
        return grpc.ssl_channel_credentials(material.ca, material.key, material.cert)

    @property
    def channel_options(self) -> tuple[tuple[str, str], ...]:
        """Return the options of a channel: the server is known by the mesh's name, whatever its address."""
        return (("grpc.ssl_target_name_override", self.name),)

    def server_context(self) -> ssl.SSLContext:
        """Return a context for an accepted socket: TLS 1.3, the peer must show a certificate of the CA. The caller checks its
        name."""
        return self._current().server_context

    def listening_context(self, *, require_client: bool) -> ssl.SSLContext:
        """Return a context for a long-lived listening socket: each handshake uses the certificates that the files hold then."""
        context = self._listening(require_client=require_client)

        def choose(socket: ssl.SSLSocket | ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
            """Switch to the current context; called at each client hello, also without a name."""
            socket.context = self._listening(require_client=require_client)

        context.sni_callback = choose
        return context

    def _listening(self, *, require_client: bool) -> ssl.SSLContext:
        material = self._current()
        return material.server_context if require_client else material.public_context

    def client_context(self) -> ssl.SSLContext:
        """Return a context for a connected socket: TLS 1.3. Wrap with server_hostname=`name`."""
        return self._current().client_context

    def num_changes(self) -> int:
        """Return how often the files have changed so far."""
        self._current()
        return self._num_changes

    def _current(self) -> TlsMaterial:
        """Return the files' current content; the former content while they are being replaced."""
        with self._lock:
            try:
                stamp = self._config.paths.stamp()
                if stamp != self._stamp:
                    self._material, self._stamp = self._config.read(), stamp
                    self._num_changes += 1
                    logger.info("read the changed certificates again")
            except (ConfigError, OSError) as error:
                logger.warning("the former certificates stay in use, the changed ones are not good: %s", error)
            return self._material


def open_tls(config: TlsConfig) -> Tls | None:
    """Return the Tls, None if TLS is not configured. Raises ConfigError."""
    return Tls(config) if config.is_set else None


def _server_certificate(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    assert material.key is not None and material.cert is not None, "a server has a certificate"
    return grpc.ssl_server_certificate_configuration([(material.key, material.cert)], root_certificates=material.ca)
