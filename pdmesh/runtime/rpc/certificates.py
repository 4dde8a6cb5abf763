"""Makes a CA and one certificate for all of a mesh; or a server's own, for clients that do not verify it.

The CA's key signs once and is not stored: it will never sign anything else, so every holder of one of its certificates belongs to
this mesh. For a CA that continues to sign, use cert-manager or your own.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pdmesh.runtime.rpc.tls import MESH_NAME, TlsConfig

_NO_USE = dict.fromkeys(("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False)
_NO_USE |= {"encipher_only": False, "decipher_only": False}
_SIGNS = x509.KeyUsage(digital_signature=True, key_cert_sign=False, crl_sign=False, **_NO_USE)
_SIGNS_CERTIFICATES = x509.KeyUsage(digital_signature=False, key_cert_sign=True, crl_sign=True, **_NO_USE)
CERT, KEY, CA = "tls.crt", "tls.key", "ca.crt"  # as in a Kubernetes TLS secret
_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")  # HTTP clients verify the address that they connect to


class CertificateError(Exception):
    """Raised when certificates could not be made; the message says why and what to do."""


def make_certificates(folder: Path, *, name: str = MESH_NAME, days: int = 365) -> TlsConfig:
    """Write ca.crt, tls.crt and tls.key into `folder` (made if need be; the key is readable by this user only).

    Raises CertificateError; also when one of the files is there already."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    there = [file for file in (CA, CERT, KEY) if (folder / file).exists()]
    if there:
        raise CertificateError(f"{folder} holds {', '.join(there)} already; give another folder, or delete them first")
    ca = _new_ca(days)
    mesh = _signed(ca, name, _THIS_MACHINE, days)
    _write(folder / CA, ca.cert.public_bytes(Encoding.PEM))
    cert, key = mesh.write(folder / "tls")
    return TlsConfig(str(cert), str(key), str(folder / CA), name)


def make_ca(stem: Path, *, days: int = 365) -> Path:
    """Write key and certificate of a new CA to `stem`.key and `stem`.crt; return `stem`. Raises CertificateError."""
    _new_ca(days).write(stem)
    return stem


def sign(ca: Path, stem: Path, *, name: str, more: Sequence[str] = (), days: int = 365) -> tuple[Path, Path]:
    """Write a certificate for servers and clients with the DNS name `name`, and its key; return both paths.

    `ca` is the stem of `make_ca`; the certificate also carries `more` DNS names and IP addresses. Raises CertificateError."""
    return _signed(_read(ca), name, more, days).write(stem)


def make_self_signed(name: str, *, days: int) -> tuple[bytes, bytes]:
    """Return certificate and private key of a server, in PEM, for clients that encrypt and do not verify. Raises
    CertificateError."""
    names = x509.SubjectAlternativeName([x509.DNSName(name), x509.DNSName("localhost")])
    return _issue(name, days, ((names, False),)).in_pem()


@dataclass(frozen=True)
class _Pair:
    """Hold a certificate and its private key."""

    cert: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def in_pem(self) -> tuple[bytes, bytes]:
        key = self.key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
        return self.cert.public_bytes(Encoding.PEM), key

    def write(self, stem: Path) -> tuple[Path, Path]:
        paths = stem.with_suffix(".crt"), stem.with_suffix(".key")
        for path, content, private in zip(paths, self.in_pem(), (False, True), strict=True):
            _write(path, content, private=private)
        return paths


def _read(stem: Path) -> _Pair:
    key = load_pem_private_key(stem.with_suffix(".key").read_bytes(), password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return _Pair(x509.load_pem_x509_certificate(stem.with_suffix(".crt").read_bytes()), key)


def _new_ca(days: int) -> _Pair:
    extensions = ((x509.BasicConstraints(ca=True, path_length=None), True), (_SIGNS_CERTIFICATES, True))
    return _issue("pdmesh CA", days, extensions)


def _signed(ca: _Pair, name: str, more: Sequence[str], days: int) -> _Pair:
    issuer_key = ca.cert.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    extensions = (
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_SIGNS, True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), False),
        (x509.SubjectAlternativeName([x509.DNSName(name), *map(_alternative_name, more)]), False),
        (x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer_key), False),
    )
    return _issue(name, days, extensions, ca)


def _issue(name: str, days: int, extensions: Sequence[tuple[x509.ExtensionType, bool]], ca: _Pair | None = None) -> _Pair:
    """Return a new ECDSA P-256 key and its certificate, signed by `ca` or, without one, by itself. Raises CertificateError."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC).replace(microsecond=0)
    try:
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        issuer = ca.cert.subject if ca else subject
        serial, end = x509.random_serial_number(), now + timedelta(days=days)
        builder = x509.CertificateBuilder(issuer, subject, key.public_key(), serial, now, end)
    except (ValueError, OverflowError) as error:
        raise CertificateError(
            f"no certificate can be made for {name!r} and {days} days ({error}); give a shorter name or fewer days"
        ) from None
    for extension, critical in (*extensions, (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)):
        builder = builder.add_extension(extension, critical)
    return _Pair(builder.sign(ca.key if ca else key, hashes.SHA256()), key)


def _alternative_name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _write(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a new file: an existing one may be readable by others."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
