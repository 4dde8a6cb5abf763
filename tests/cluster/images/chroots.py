"""Folders that are file systems of their own: layers by overlayfs, and commands inside them.

All mounts are made in a mount namespace of this process (`enter`): they end with it, however it ends, and nobody else sees them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

RUN_TIMEOUT_S = 1800.0
# What this machine needs to reach package indexes; a builder elsewhere has its own.
_HOST_FILES = ("/etc/resolv.conf", "/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_INSIDE = "PDMESH_TEST_MOUNTS"
_SIZES = "find . -xdev -type f -printf '%s\\n'"


@dataclass
class Layer:
    """One stage's files: `upper` holds what it adds to those of `below`."""

    folder: Path
    below: list[Path]
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "0:0"
    command: list[str] = field(default_factory=list)

    @property
    def upper(self) -> Path:
        """What is new."""
        return self.folder / "upper"

    @property
    def root(self) -> Path:
        """Everything, while it is mounted."""
        return self.folder / "root"

    def size(self) -> int:
        """Bytes of files that are new in this stage."""
        printed = subprocess.run(_SIZES, shell=True, cwd=self.upper, capture_output=True, text=True, check=True).stdout
        return sum(map(int, printed.split()))


def enter() -> None:
    """Goes on in a mount namespace of its own. Raises PermissionError where this is not root."""
    if os.geteuid() != 0:
        raise PermissionError("chroot and mount need root")
    if os.environ.get(_INSIDE) != str(os.getpid()):
        os.environ[_INSIDE] = str(os.getpid())  # which stays the same through exec
        os.execvp("unshare", ["unshare", "--mount", "--propagation=private", sys.executable, *sys.orig_argv[1:]])


def remove(folder: Path) -> None:
    """Takes a folder away. Raises RuntimeError where something is mounted in it: that would be emptied along with it."""
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    if any(Path(each).is_relative_to(folder) for each in mounts):
        raise RuntimeError(f"{folder}: something is mounted there; take it away by umount")
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def mounted(layer: Layer, binds: Mapping[Path, str] = MappingProxyType({})) -> Iterator[Path]:
    """Its root, with /proc, a few devices and `binds` (folders of this machine, by where they are there), which cannot be
    written to."""
    for name in ("upper", "work", "root"):
        (layer.folder / name).mkdir(parents=True, exist_ok=True)
    lower = ":".join(str(each) for each in layer.below)
    options = f"lowerdir={lower},upperdir={layer.upper},workdir={layer.folder / 'work'}"
    done: list[Path] = []
    try:
        _mount(["-t", "overlay", "overlay", "-o", options, str(layer.root)], layer.root, done)
        _mount(["-t", "proc", "proc", str(layer.root / "proc")], layer.root / "proc", done)
        _mount(["-t", "tmpfs", "tmpfs", str(layer.root / "dev")], layer.root / "dev", done)
        (layer.root / "dev/shm").mkdir(mode=0o1777)
        for name in _DEVICES:
            (layer.root / "dev" / name).touch()
            _mount(["--bind", f"/dev/{name}", str(layer.root / "dev" / name)], layer.root / "dev" / name, done)
        for bind, place in binds.items():
            target = layer.root / place.lstrip("/")
            target.mkdir(parents=True, exist_ok=True)
            _mount(["-o", "bind,ro", str(bind), str(target)], target, done)
        yield layer.root
    finally:
        for each in reversed(done):
            subprocess.run(["umount", "--lazy", str(each)], check=False)


def _mount(arguments: list[str], target: Path, done: list[Path]) -> None:
    subprocess.run(["mount", *arguments], check=True)
    done.append(target)


def inside(root: Path, layer: Layer, command: Sequence[str], extra: Mapping[str, str] = {}, user: str | None = None) -> list[str]:
    """A command line that runs `command` in there, as `user` or the stage's."""
    variables = [f"{name}={value}" for name, value in {**_pip(), **layer.env, **extra}.items()]
    chroot = ["chroot", f"--userspec={user or layer.user}", str(root), "env", "-i", *variables]
    return [*chroot, "sh", "-c", 'cd "$0" && exec "$@"', layer.workdir, *command]


def run(root: Path, layer: Layer, script: str, extra: Mapping[str, str]) -> None:
    """One RUN. Raises RuntimeError with the end of what it printed."""
    command = inside(root, layer, ["sh", "-c", script], extra)
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"RUN {script}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")


def debian(folder: Path, release: str) -> Path:
    """A Debian with Python that stands for the image python:…-slim; made once. Raises CalledProcessError."""
    root = folder / f"debian-{release}"
    if not (root / ".made").exists():
        remove(root)
        packages = "python3,python3-venv,python3-pip,ca-certificates"
        subprocess.run(["debootstrap", "--variant=minbase", f"--include={packages}", release, str(root)], check=True)
        for mark in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):  # Debian's, which that image does not have
            mark.unlink()
        (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
        for path in filter(os.path.exists, _HOST_FILES):
            shutil.copy(path, root / path.lstrip("/"))
        (root / ".made").touch()
    return root


def _pip() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
