"""Debian's packages, fetched and unpacked without root, for `build.py`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

RELEASE = "bookworm"
MIRROR = "PDMESH_DEBIAN_MIRROR"
"""Names a mirror of Debian where this system fetches from none."""

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


class BuildFailed(RuntimeError):
    """Something is missing or a step failed. The message says what, and what to do."""


class Apt:
    """apt with lists and a configuration of its own: needs no root, no deb-src line, and changes nothing of the system's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._options = (
            f"Dir::State={folder}/state",
            "Dir::State::status=/var/lib/dpkg/status",
            f"Dir::Cache={folder}/cache",
            f"Dir::Etc::sourcelist={folder}/sources.list",
            "Dir::Etc::sourceparts=-",
            "APT::Sandbox::User=",
            "APT::Get::Only-Source=true",
            f"APT::Default-Release={RELEASE}",
        )
        self._ready = False

    def packages(self, *names: str) -> list[Path]:
        """Fetches binary packages; the .deb files."""
        self._run("download", *names)
        return [next(self._folder.glob(f"{name}_*.deb")) for name in names]

    def source(self, name: str) -> Path:
        """Fetches a source package; its .dsc file."""
        self._run("source", "--download-only", name)
        return next(self._folder.glob(f"{name}_*.dsc"))

    def _run(self, *command: str) -> None:
        if not self._ready:
            self._set_up()
        run(["apt-get", "-qq", *self._flags(), *command], cwd=self._folder)

    def _set_up(self) -> None:
        for folder in ("state/lists/partial", "cache/archives/partial"):
            (self._folder / folder).mkdir(parents=True, exist_ok=True)
        line = f"[signed-by={KEYRING}] {_mirror()} {RELEASE} main"
        (self._folder / "sources.list").write_text(f"deb {line}\ndeb-src {line}\n", encoding="utf-8")
        say("fetching Debian's lists of packages")
        run(["apt-get", "-qq", *self._flags(), "update"])
        self._ready = True

    def _flags(self) -> list[str]:
        return [flag for option in self._options for flag in ("-o", option)]


def _mirror() -> str:
    """Where this system itself fetches Debian from, or where MIRROR says. Raises BuildFailed."""
    command = ["apt-get", "indextargets", "--format", "$(ORIGIN)|$(CODENAME)|$(REPO_URI)"]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    own = [line.split("|")[2] for line in lines if line.startswith(f"Debian|{RELEASE}|")]
    if not (found := os.environ.get(MIRROR) or (own[0] if own else "")):
        raise BuildFailed(f"apt here knows no mirror of Debian's {RELEASE}; set {MIRROR} to the URL of one")
    return found


def unpacked(debs: Sequence[Path], target: Path) -> Path:
    """Unpacks packages together; the folder appears when it is whole."""
    shutil.rmtree(target, ignore_errors=True)
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for deb in debs:
        run(["dpkg-deb", "-x", str(deb), str(partial)])
    partial.rename(target)
    return target


def run(command: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
    """Raises BuildFailed with the end of what the command said."""
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **(env or {})}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise BuildFailed(f"{Path(command[0]).name} {command[1]} failed with exit code {done.returncode}:\n{tail}")


def say(text: str) -> None:
    print(f"==> {text}", file=sys.stderr, flush=True)
