"""Virtual environments of the peers, in the cache: installed once, complete when their marker says so.

$PDMESH_CACHE/peers/NAME/       the environment; ready.json in it repeats the steps that made it
$PDMESH_CACHE/peers/NAME.log    what pip said
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.peers.catalogue import Environment
from pdmesh.models.catalogue import Progress, cache_folder, exclusive

MARKER = "ready.json"
_HEARTBEAT_S = 30.0


class PeerError(Exception):
    """A peer cannot take part. The message says why, in one line, and goes into the table."""


def peers_folder() -> Path:
    return cache_folder() / "peers"


def ensure_environment(environment: Environment, say: Progress) -> Path:
    """The Python of a peer's environment; installed first if it is not complete. PeerError says why it cannot be had."""
    folder = peers_folder() / environment.name
    with exclusive(folder, say):
        if not _is_ready(folder, environment):
            _install(folder, environment, say)
    return folder / "bin" / "python"


def _is_ready(folder: Path, environment: Environment) -> bool:
    try:
        return bool(json.loads((folder / MARKER).read_text()) == _recipe(environment))
    except (OSError, ValueError):
        return False


def _recipe(environment: Environment) -> dict[str, object]:
    """What an environment depends on: with another recipe it is made anew."""
    steps = [list(step) for step in environment.steps]
    return {"steps": steps, "variables": dict(environment.variables), "python": platform.python_version()}


def _install(folder: Path, environment: Environment, say: Progress) -> None:
    say(f"installing {environment.name} into the cache, once" + (f" ({environment.note})" if environment.note else ""))
    shutil.rmtree(folder, ignore_errors=True)
    log = folder.with_suffix(".log")
    log.write_text("")
    _run([sys.executable, "-m", "venv", str(folder)], log, {}, f"{environment.name}: virtual environment", say)
    for step in environment.steps:
        command = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", *step]
        _run(command, log, environment.variables, f"{environment.name}: pip {' '.join(step)}", say)
    (folder / MARKER).write_text(json.dumps(_recipe(environment)))


def _run(command: list[str], log: Path, variables: Mapping[str, str], what: str, say: Progress) -> None:
    """One step with its output in `log` and a line of progress now and then; the process never outlives this call."""
    say(what)
    with log.open("ab") as output:
        env = {**os.environ, **variables}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env)
    started = time.monotonic()
    try:
        while _is_running(process):
            say(f"{what}: {time.monotonic() - started:.0f} s")
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        raise PeerError(f"not installed: {what} failed: {last_line(log)}")


def _is_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_HEARTBEAT_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def child_environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables of a child process: this repository importable, no model hub asked for anything."""
    root = Path(__file__).resolve().parents[2]
    return {**os.environ, "PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1", **(variables or {})}


def last_line(log: Path) -> str:
    """The last words of a log, short enough for a table."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"
