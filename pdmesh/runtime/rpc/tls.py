"""TLS between the processes of a mesh, and to its clients: who shows a certificate, and whom to believe.

    tls = open_tls(config.tls)                              # None: nothing is encrypted
    server = GrpcServer(host, port, tls=tls)                # peers show a certificate of the CA that carries the mesh's name
    channel = connect(address, tls=tls)
    tls.server_context(), tls.client_context()              # for sockets of our own: TLS 1.3

All certificates of a mesh carry one name (a DNS subject alternative name, "pdmesh" unless --tls-name says otherwise), and that is
what is verified, not the address: pods change theirs. So one certificate may serve all pods, and meshes that share a CA keep
apart by their names. Clients of a router need any certificate of the CA.

The files are read again when they change (cert-manager replaces them): listening ports and KV connections use the new ones from
the next handshake on. A gRPC channel keeps the one that it was opened with: a router opens those anew whose worker is lost.
"""

from __future__ import annotations

import logging
import ssl
import threading
from dataclasses import dataclass, field
from typing import ClassVar

import grpc

from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.rpc import tls_files
from pdmesh.runtime.rpc.tls_files import TlsMaterial, TlsPaths

MESH_NAME = "pdmesh"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TlsConfig:
    """Certificates of a process of the mesh: all three files, or none."""

    is_member: ClassVar[bool] = True  # its certificate carries the name of the mesh

    tls_cert: str = field(default="", metadata={"help": "certificate of this process, PEM file; empty: no TLS"})
    tls_key: str = field(default="", metadata={"help": "its private key, PEM file"})
    tls_ca: str = field(default="", metadata={"help": "certificates of the CA that signs those of the mesh, PEM file"})
    tls_name: str = field(default=MESH_NAME, metadata={"help": "DNS name that all certificates of the mesh carry"})

    @property
    def is_set(self) -> bool:
        """Whether TLS is wanted."""
        return any((self.tls_cert, self.tls_key, self.tls_ca))

    @property
    def paths(self) -> TlsPaths:
        """The files."""
        return TlsPaths(self.tls_cert, self.tls_key, self.tls_ca)

    def validate(self) -> None:
        """Raises ConfigError that names the setting, also for what is wrong inside the files."""
        self._check_given()
        if not self.tls_name:
            raise ConfigError("tls_name", "is empty", f"give the name that the certificates carry, such as {MESH_NAME}")
        if self.is_set:
            self.read()

    def read(self) -> TlsMaterial:
        """What the files hold now, checked. Raises ConfigError."""
        return tls_files.read_tls_files(self.paths, self.tls_name, member=self.is_member)

    def _check_given(self) -> None:
        for name in ("tls_cert", "tls_key", "tls_ca"):
            if self.is_set and not getattr(self, name):
                raise ConfigError(name, "is missing", "TLS needs --tls-cert, --tls-key and --tls-ca; give all three or none")


@dataclass(frozen=True)
class ClientTlsConfig(TlsConfig):
    """Certificates of a client: the CA, and where the router wants to know who calls, certificate and key."""

    is_member: ClassVar[bool] = False

    def _check_given(self) -> None:
        if self.is_set and not self.tls_ca:
            raise ConfigError("tls_ca", "is missing", "give the CA that has signed the router's certificate")
        if bool(self.tls_cert) != bool(self.tls_key):
            missing = "tls_key" if self.tls_cert else "tls_cert"
            raise ConfigError(missing, "is missing", "give certificate and key together, or neither")


class Tls:
    """Credentials from the files of a configuration, read again when they change. Thread-safe."""

    def __init__(self, config: TlsConfig) -> None:
        """Raises ConfigError."""
        config.validate()
        self.name = config.tls_name
        self._config = config
        self._lock = threading.Lock()
        self._stamp = config.paths.stamp()
        self._material = config.read()
        self._num_changes = 0

    def server_credentials(self, *, require_client: bool) -> grpc.ServerCredentials:
        """For a listening port. `require_client`: callers have to show a certificate of the CA."""
        served = self._current()

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            """Called for each handshake, on a thread of gRPC's; None: no change."""
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
        """For a channel, which keeps them."""
        material = self._current()
        return grpc.ssl_channel_credentials(material.ca, material.key, material.cert)

    @property
    def channel_options(self) -> tuple[tuple[str, str], ...]:
        """Options of a channel: the server is known by the mesh's name, whatever its address."""
        return (("grpc.ssl_target_name_override", self.name),)

    def server_context(self) -> ssl.SSLContext:
        """For an accepted socket: TLS 1.3, the peer has to show a certificate of the CA. Its name is the caller's to check."""
        return self._current().server_context

    def listening_context(self, *, require_client: bool) -> ssl.SSLContext:
        """For a listening socket that lives on: each handshake takes the certificates that the files hold then."""
        context = self._listening(require_client=require_client)

        def choose(socket: ssl.SSLSocket | ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
            """Called at each client hello, also without a name."""
            socket.context = self._listening(require_client=require_client)

        context.sni_callback = choose
        return context

    def _listening(self, *, require_client: bool) -> ssl.SSLContext:
        material = self._current()
        return material.server_context if require_client else material.public_context

    def client_context(self) -> ssl.SSLContext:
        """For a connected socket: TLS 1.3. Wrap with server_hostname=`name`."""
        return self._current().client_context

    def num_changes(self) -> int:
        """How often the files have changed, up to now."""
        self._current()
        return self._num_changes

    def _current(self) -> TlsMaterial:
        """What the files hold now; what they held before while they are being replaced."""
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
    """None where no TLS is wanted. Raises ConfigError."""
    return Tls(config) if config.is_set else None


def _server_certificate(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    assert material.key is not None and material.cert is not None, "a server has a certificate"
    return grpc.ssl_server_certificate_configuration([(material.key, material.cert)], root_certificates=material.ca)
