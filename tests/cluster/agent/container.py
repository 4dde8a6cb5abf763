"""The first program of a container: makes its file system, sets its variables and becomes its command.

    python -S -m tests.cluster.agent.container SPEC.json

The root is this machine's, under a layer of the container's own that goes with it; volumes are bound into it. Standard library
only, so that it starts in a moment.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from tests.cluster.namespaces import NEW_NAME, bind, join_network, mount, private_mounts, unshare

_SYSTEM_FOLDERS = ("/proc", "/sys", "/dev")


def main(specification: str) -> None:
    """Does not return. Raises OSError; the exit code is 127 when there is no such program, as a shell's."""
    spec = json.loads(Path(specification).read_text(encoding="utf-8"))
    join_network(spec["sandbox"])
    private_mounts()
    unshare(NEW_NAME)
    socket.sethostname(spec["hostname"])
    root = _make_root(Path(spec["layer"]), spec)
    os.chroot(root)
    os.chdir(spec["working_folder"])
    try:
        os.execvpe(spec["command"][0], spec["command"], spec["environment"])
    except OSError as error:
        print(f"cannot start {spec['command'][0]}: {error.strerror}", file=sys.stderr)
        raise SystemExit(127) from None


def _make_root(layer: Path, spec: dict[str, Any]) -> str:
    mount("tmpfs", str(layer))
    upper, work, root = (layer / name for name in ("upper", "work", "root"))
    for folder in (upper, work, root):
        folder.mkdir()
    mount("overlay", str(root), f"lowerdir=/,upperdir={upper},workdir={work}")
    for name in _SYSTEM_FOLDERS:
        bind(name, f"{root}{name}")
    # Outer before inner ones. What the pod mounts may hide where Python stands: that comes last.
    binds = [*sorted(spec["mounts"], key=lambda entry: len(entry["target"])), *spec["host"]]
    for entry in binds:
        _bind(root, entry["source"], entry["target"], entry["read_only"])
    Path(f"{root}{spec['working_folder']}").mkdir(parents=True, exist_ok=True)
    if spec["read_only_root"]:
        bind(str(root), str(root), read_only=True)
    return str(root)


def _bind(root: Path, source: str, target: str, read_only: bool) -> None:
    # The same links stand in the root as here; followed from here they would lead out of it.
    path = Path(f"{root}{os.path.realpath(target)}")
    if Path(source).is_dir():
        path.mkdir(parents=True, exist_ok=True)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    bind(source, str(path), read_only=read_only)


if __name__ == "__main__":
    main(sys.argv[1])
