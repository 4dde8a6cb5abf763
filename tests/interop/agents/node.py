"""Packages of npm in the cache, as their lock file names them, with the program that uses them beside."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from benchmarks.peers.environments import PeerError, last_line, peers_folder
from pdmesh.models.catalogue import Progress, exclusive

INSTALL_TIMEOUT_S = 600.0
SOURCE = Path(__file__).parent / "npm"
MARKER = "ready.json"
_FILES = ("package.json", "package-lock.json")


def ensure_packages(name: str, say: Progress) -> Path:
    """Return the folder that has the packages of `npm/` installed, and its programs. PeerError says why it cannot be had."""
    if not (shutil.which("node") and shutil.which("npm")):
        raise PeerError("needs node and npm (Debian: nodejs, npm)")
    folder = peers_folder() / name
    with exclusive(folder, say):
        if not _is_ready(folder):
            _install(folder, say)
        for program in SOURCE.glob("*.mjs"):  # a program finds packages beside itself alone
            shutil.copy(program, folder)
    return folder


def locked_version(package: str) -> str:
    """Return the version of a package in the lock file."""
    lock = json.loads((SOURCE / "package-lock.json").read_text())
    return str(lock["packages"][f"node_modules/{package}"]["version"])


def _recipe() -> dict[str, str]:
    return {name: (SOURCE / name).read_text() for name in _FILES}


def _is_ready(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / MARKER).read_text()) == _recipe())
    except (OSError, ValueError):
        return False


def _install(folder: Path, say: Progress) -> None:
    say(f"installing {folder.name} into the cache, once: npm ci")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in _FILES:
        shutil.copy(SOURCE / name, folder)
    log = folder.with_suffix(".log")
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    with log.open("wb") as output:
        try:
            code = subprocess.run(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=INSTALL_TIMEOUT_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            raise PeerError(f"not installed: npm ci had not ended after {INSTALL_TIMEOUT_S:g} s") from None
    if code:
        raise PeerError(f"not installed: npm ci failed: {last_line(log)}")
    (folder / MARKER).write_text(json.dumps(_recipe()))
