"""Certificates of the tests' own CAs, good ones and each kind of bad one, and mesh secrets."""

import atexit
import os
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pdmesh.runtime.rpc.certificates import make_ca, make_certificates, sign
from pdmesh.runtime.rpc.mesh_secret import MeshSecret, MeshSecretConfig, write_secret
from pdmesh.runtime.rpc.tls import MESH_NAME, Tls, TlsConfig

_FOLDER_VARIABLE = "PDMESH_TEST_CERTIFICATES"  # child processes use those of their parent
_SECRET_VARIABLE = "PDMESH_TEST_SECRET_OF_THE_MESH"


@dataclass(frozen=True)
class Authority:
    """A CA that stays and goes on signing, unlike those of `pdmesh tls init`."""

    folder: Path

    @property
    def ca(self) -> str:
        return str(self.folder / "ca.crt")

    def config(self, stem: str = "mesh", *, name: str = MESH_NAME, days: int = 30) -> TlsConfig:
        """A certificate of its own for `stem`, made once. `days` 0: expired."""
        path = self.folder / stem
        if not path.with_suffix(".crt").exists():
            sign(self.folder / "ca", path, name=name, days=days)
        return TlsConfig(str(path.with_suffix(".crt")), str(path.with_suffix(".key")), self.ca)


def new_authority(folder: Path) -> Authority:
    folder.mkdir(parents=True)
    make_ca(folder / "ca", days=30)
    return Authority(folder)


@cache
def mesh_tls() -> Tls:
    """Of the one mesh that a test run has, this process's and its children's."""
    folder = os.environ.get(_FOLDER_VARIABLE)
    if folder is None:
        folder = os.environ[_FOLDER_VARIABLE] = tempfile.mkdtemp(prefix="pdmesh-test-tls-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        make_certificates(Path(folder), days=30)
    return Tls(TlsConfig(*(str(Path(folder) / name) for name in ("tls.crt", "tls.key", "ca.crt"))))


def new_secret(folder: Path) -> MeshSecret:
    """A mesh secret in a new file of `folder`."""
    return MeshSecret(write_secret(folder / os.urandom(8).hex()))


@cache
def mesh_secret() -> MeshSecret:
    """Of the one mesh that a test run has, this process's and its children's."""
    file = os.environ.get(_SECRET_VARIABLE)
    if file is None:
        folder = tempfile.mkdtemp(prefix="pdmesh-test-secret-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        file = os.environ[_SECRET_VARIABLE] = write_secret(Path(folder) / "secret").mesh_secret_file
    return MeshSecret(MeshSecretConfig(file))


def copied(config: TlsConfig, folder: Path) -> TlsConfig:
    """The files of `config` in `folder`, each replaced at once, as cert-manager does."""
    for source, name in ((config.tls_cert, "tls.crt"), (config.tls_key, "tls.key"), (config.tls_ca, "ca.crt")):
        new = folder / f"{name}.new"
        new.write_bytes(Path(source).read_bytes())
        new.replace(folder / name)
    return TlsConfig(str(folder / "tls.crt"), str(folder / "tls.key"), str(folder / "ca.crt"))
