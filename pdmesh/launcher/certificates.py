"""A CA of one's own and one certificate for all of a mesh, made with the openssl command line.

The CA's key is used once and then deleted: what it signed is all that it will ever sign, so whoever holds one of its certificates
is of this mesh. For a CA that goes on signing, use cert-manager or your own.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pdmesh.runtime.rpc.tls import MESH_NAME, TlsConfig

CERT, KEY, CA = "tls.crt", "tls.key", "ca.crt"  # as in a Kubernetes TLS secret
_SECONDS = 60.0
_THIS_MACHINE = ("DNS:localhost", "IP:127.0.0.1", "IP:::1")  # clients over HTTP verify the address that they were given
_CA_EXTENSIONS = "basicConstraints=critical,CA:TRUE\nkeyUsage=critical,keyCertSign,cRLSign\nsubjectKeyIdentifier=hash\n"
_EXTENSIONS = (
    "basicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\nextendedKeyUsage=serverAuth,clientAuth\n"
    "subjectAltName={names}\nsubjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n"
)


class CertificateError(Exception):
    """Certificates could not be made; the message says why and what to do."""


def make_certificates(folder: Path, *, name: str = MESH_NAME, days: int = 365) -> TlsConfig:
    """Writes ca.crt, tls.crt and tls.key into `folder` (made if need be; the key is readable by this user only).

    Raises CertificateError; also when one of the files is there already."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    there = [file for file in (CA, CERT, KEY) if (folder / file).exists()]
    if there:
        raise CertificateError(f"{folder} holds {', '.join(there)} already; give another folder, or delete them first")
    with tempfile.TemporaryDirectory(prefix="pdmesh-ca-") as work:
        ca = make_ca(Path(work) / "ca", days=days)
        cert, key = sign(ca, Path(work) / "mesh", name=name, more=_THIS_MACHINE, days=days)
        for source, target in ((ca.with_suffix(".crt"), CA), (cert, CERT), (key, KEY)):
            _write(folder / target, source.read_bytes(), private=target == KEY)
    return TlsConfig(str(folder / CERT), str(folder / KEY), str(folder / CA), name)


def make_ca(stem: Path, *, days: int = 365) -> Path:
    """Key and certificate of a new CA at `stem`.key and `stem`.crt; returns `stem`. Raises CertificateError."""
    request = _request(stem, "pdmesh CA")
    _issue(request, stem, _CA_EXTENSIONS, days, ["-signkey", f"{stem}.key"])
    return stem


def sign(ca: Path, stem: Path, *, name: str, more: Sequence[str] = (), days: int = 365) -> tuple[Path, Path]:
    """A certificate for servers and clients that carries the DNS name `name` (and `more`, as openssl spells them), and its key.

    Raises CertificateError."""
    request = _request(stem, name)
    by_ca = ["-CA", f"{ca}.crt", "-CAkey", f"{ca}.key", "-CAcreateserial"]
    _issue(request, stem, _EXTENSIONS.format(names=",".join((f"DNS:{name}", *more))), days, by_ca)
    return stem.with_suffix(".crt"), stem.with_suffix(".key")


def _request(stem: Path, common_name: str) -> Path:
    """A new key (ECDSA P-256) at `stem`.key, and a request to sign it."""
    request = stem.with_suffix(".csr")
    _write(Path(f"{stem}.key"), _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout"), private=True)
    # A configuration of our own: the system's may be missing, or ask questions.
    config = stem.with_suffix(".cnf")
    config.write_text("[req]\nprompt=no\ndistinguished_name=dn\n[dn]\n" + f"CN={common_name}\n")
    _openssl("req", "-new", "-key", f"{stem}.key", "-config", str(config), "-out", str(request))
    return request


def _issue(request: Path, stem: Path, extensions: str, days: int, signer: list[str]) -> None:
    file = stem.with_suffix(".ext")
    file.write_text(extensions)
    issue = ["x509", "-req", "-in", str(request), "-out", f"{stem}.crt", "-days", str(days), "-sha256", "-extfile", str(file)]
    _openssl(*issue, *signer)


def _openssl(*arguments: str) -> bytes:
    try:
        done = subprocess.run(["openssl", *arguments], capture_output=True, timeout=_SECONDS, check=True)
    except FileNotFoundError:
        raise CertificateError(
            "the openssl command is missing; install the package openssl, or give certificates of your own"
        ) from None
    except subprocess.TimeoutExpired:
        raise CertificateError(f"openssl {arguments[0]} did not end within {_SECONDS:g} s; try again") from None
    except subprocess.CalledProcessError as error:
        problem = error.stderr.decode("utf-8", "replace").strip() or f"it ended with code {error.returncode}"
        raise CertificateError(f"openssl {arguments[0]} failed: {problem}") from None
    return done.stdout


def _write(path: Path, content: bytes, *, private: bool) -> None:
    """A new file: an existing one may be readable by others."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
