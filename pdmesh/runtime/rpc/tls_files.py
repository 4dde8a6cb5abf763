"""The three files of a mesh's TLS, read and checked: what is wrong with them is found here, not by a peer.

The check is the one that peers make: a TLS handshake of the certificate with itself, in memory. Needs the standard library only.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pdmesh.runtime.config import ConfigError

_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
_PRIVATE_KEY = b"PRIVATE KEY-----"
_HANDSHAKE_ROUNDS = 3  # client hello; server hello to finished; client certificate to finished
# X509_V_ERR_* of OpenSSL.
_NOT_YET_VALID, _EXPIRED, _WRONG_NAME = 9, 10, 62


@dataclass(frozen=True)
class TlsPaths:
    """Where the files are. `cert` and `key` are empty for a client that shows no certificate."""

    cert: str
    key: str
    ca: str

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """Another one when a file has been changed or replaced. Raises OSError."""
        return tuple((stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in (Path(path).stat() for path in self._given()))

    def _given(self) -> Iterator[str]:
        return (path for path in (self.cert, self.key, self.ca) if path)


@dataclass(frozen=True)
class TlsMaterial:
    """What the files hold, PEM; the contexts are for sockets of our own: TLS 1.3, both ends show a certificate, but that
    `public_context` asks clients for none."""

    cert: bytes | None
    key: bytes | None
    ca: bytes
    server_context: ssl.SSLContext
    public_context: ssl.SSLContext
    client_context: ssl.SSLContext


def read_tls_files(paths: TlsPaths, name: str, *, member: bool) -> TlsMaterial:
    """The files as they are now; a `member` of the mesh has a certificate that carries `name`.

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
    """What a failed handshake, or an alert of the peer, means."""
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
        context.num_tickets = 0  # no connection is resumed
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
    """For a certificate that is good for clients only, under a name of its own: nobody but the server looks at it."""
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
    """Raises ssl.SSLError."""
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
