"""`pdmesh tls init FOLDER`: makes certificates for a mesh, for users without a CA."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pdmesh.runtime.rpc.certificates import CertificateError, make_certificates
from pdmesh.runtime.rpc.tls import MESH_NAME, TlsConfig

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True)
class Options:
    """Make a CA and one certificate for all of a mesh and its clients: pdmesh tls init FOLDER."""

    action: Literal["init"] = field(default="init", metadata={"help": "what to do, also as a bare word", "positional": True})
    folder: str = field(default="", metadata={"help": "where to write the files, also as a bare word", "positional": True})
    name: str = field(
        default=MESH_NAME, metadata={"help": "DNS name that the certificate carries; another needs --tls-name everywhere"}
    )
    days: int = field(default=365, metadata={"help": "how long they are valid"})

    def validate(self) -> None:
        """Raise ValueError that names the field."""
        if not self.folder:
            raise ValueError("folder: is missing; name one, such as pdmesh tls init certificates")
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"name: {self.name!r} is no DNS name; give one such as {MESH_NAME}")
        if self.days < 1:
            raise ValueError("days: must be at least 1")


def run(options: Options) -> int:
    """Run the command; return 0 when the files are written."""
    try:
        made = make_certificates(Path(options.folder).resolve(), name=options.name, days=options.days)
    except (CertificateError, OSError) as error:
        print(f"pdmesh tls: {error}", file=sys.stderr)
        return 1
    print("\n".join(["# give these to every router, worker and client:", *exports(made)]))
    return 0


def exports(config: TlsConfig) -> list[str]:
    """Return lines for a shell: processes that it starts from then on use these certificates."""
    lines = [
        f"export PDMESH_TLS_CERT={config.tls_cert}",
        f"export PDMESH_TLS_KEY={config.tls_key}",
        f"export PDMESH_TLS_CA={config.tls_ca}",
    ]
    return lines if config.tls_name == MESH_NAME else [*lines, f"export PDMESH_TLS_NAME={config.tls_name}"]
