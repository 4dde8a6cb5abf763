"""Refuses a model by its headers before anything else starts, in a child process that keeps torch out of this one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from pdmesh.models.catalogue import ModelError, cache_folder
from pdmesh.runtime.child import import_path, python_command

_MODULE = "pdmesh.engine.loader.headers"


def check_headers(path: Path, overrides: Sequence[str] = ()) -> None:
    """Raise ModelError, in one line, for a folder or .gguf file that no worker can load. What pdmesh converted itself was checked
    then."""
    if not overrides and path.is_relative_to(cache_folder()):
        return
    command = python_command("-m", _MODULE, str(path), *overrides)
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **import_path()}, stdin=subprocess.DEVNULL)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise ModelError(lines[-1] if lines else f"{path}: its headers cannot be read (exit code {done.returncode})")
