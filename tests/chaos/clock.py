"""The wall clock of one process, moved while it runs; the machine's own is never touched.

`clock.c`, compiled once, is preloaded into the process and reads the seconds to add from a file that we map as well. libfaketime
does the same and more, but would have to be installed.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("clock.c")
_DOUBLE = struct.Struct("d")
VARIABLE = "PDMESH_CHAOS_CLOCK"


def build(folder: Path) -> Path:
    """The shared library to preload, in `folder`. Raises RuntimeError when there is no compiler, or it fails."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError("clock jumps need a C compiler: install one, or leave them out with --kinds")
    library = folder / "clock.so"
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(_SOURCE), "-ldl", "-lm"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{_SOURCE.name} does not compile:\n{result.stderr}")
    return library


class Clock:
    """The clock of one process, by the file that `environment` names to it. A process started again keeps it."""

    def __init__(self, library: Path, file: Path) -> None:
        self._library = library
        self._file = file
        file.write_bytes(_DOUBLE.pack(0.0))
        with file.open("r+b") as opened:
            self._map = mmap.mmap(opened.fileno(), _DOUBLE.size)

    @property
    def environment(self) -> dict[str, str]:
        """What the process has to be started with."""
        return {"LD_PRELOAD": str(self._library), VARIABLE: str(self._file)}

    def jump(self, to_s: float) -> None:
        """The process's clock is `to_s` seconds ahead of the machine's from now on (behind, if negative)."""
        self._map[:] = _DOUBLE.pack(to_s)
