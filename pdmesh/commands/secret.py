"""`pdmesh secret FILE`: makes the secret that the processes of a mesh share, or a further one beside it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.rpc.mesh_secret import VARIABLE, new_secret, read_secrets, write_secret


@dataclass(frozen=True)
class Options:
    """Make the secret of a mesh, without which its workers serve nobody: pdmesh secret FILE."""

    file: str = field(default="", metadata={"help": "new file to write, also as a bare word", "positional": True})
    add: bool = field(default=False, metadata={"help": "add a secret to an existing file, the first step of a rotation"})

    def validate(self) -> None:
        """Raise ValueError that names the field."""
        if not self.file:
            raise ValueError("file: is missing; name one, such as pdmesh secret mesh-secret")


def run(options: Options) -> int:
    """Run the command; return 0 when the file is written."""
    path = Path(options.file).resolve()
    try:
        if options.add:
            _add(path)
        else:
            write_secret(path)
    except FileExistsError:
        print(f"pdmesh secret: {path} exists; name another file, or give --add to keep its secrets and add one", file=sys.stderr)
        return 1
    except (OSError, ConfigError) as error:
        print(f"pdmesh secret: {error}", file=sys.stderr)
        return 1
    print(f"# give this to every router, worker and autoscaler of the mesh:\nexport {VARIABLE}={path}")
    return 0


def _add(path: Path) -> None:
    """Add a secret behind those of the file. Raises OSError, and ConfigError for a file that holds something else."""
    read_secrets(str(path))
    content = path.read_text(encoding="ascii")
    with path.open("a", encoding="ascii") as file:
        file.write(("" if content.endswith("\n") else "\n") + new_secret())
