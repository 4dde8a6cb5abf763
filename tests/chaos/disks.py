"""The disks on which workers keep KV: a folder for each, on a small file system of its own where we may mount one.

Full and read-only are real: the file system has no room, or is mounted anew. Files are damaged, cut and removed behind the
worker's back. A slow one is `disk.c`, preloaded into the worker, since a file system in memory is never slow.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import struct
import subprocess
import time
from collections.abc import Sequence
from mmap import mmap
from pathlib import Path

_DOUBLE = struct.Struct("d")
SUFFIX = ".kv"
_MOST_FILES = 12
_ROOT_SHARE = 0.25  # of removals: all that one tenant has
_FILLED_BYTES = (1 << 16, 1 << 12)  # at a time: pages, at last
_BUSY_S, _LOOK_S = 1.5, 0.005
_PARENT_MOUNTS = Path("/proc/self/mounts")


def with_own_mounts(command: Sequence[str]) -> list[str]:
    """The command line that runs `command` where its mounts are seen by nothing else, and are gone with it."""
    users = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *users, "--mount", "--", *command]


def can_have_mounts() -> bool:
    """Return whether this machine lets us mount file systems in memory, in a namespace of ours."""
    if not all(shutil.which(program) for program in ("unshare", "mount", "umount")):
        return False
    command = with_own_mounts(["mount", "-t", "tmpfs", "none", "/mnt"])
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


class Disk:
    """One worker's. `library`: `disk.c`, compiled, to be preloaded."""

    def __init__(self, folder: Path, library: Path, *, num_bytes: int, is_mounted: bool) -> None:
        """Make the folder, and mount a file system of `num_bytes` there. Raises CalledProcessError."""
        self.folder = folder
        self.library, self._is_mounted = library, is_mounted
        self._filler = folder / "filler"
        folder.mkdir()
        if is_mounted:
            _run("mount", "-t", "tmpfs", "-o", f"size={num_bytes},mode=700", "none", str(folder))
        self._delay_file = folder.with_suffix(".delay")
        self._delay_file.write_bytes(_DOUBLE.pack(0.0))
        with self._delay_file.open("r+b") as opened:
            self._delay = mmap(opened.fileno(), _DOUBLE.size)

    @property
    def environment(self) -> dict[str, str]:
        """What the process has to be started with, beside `library` in LD_PRELOAD."""
        return {"PDMESH_CHAOS_DISK": str(self.folder), "PDMESH_CHAOS_DISK_DELAY": str(self._delay_file)}

    def close(self) -> None:
        """Unmount it; idempotent. Raises CalledProcessError where something still uses it."""
        if self._is_mounted:
            _run("umount", str(self.folder))
            self._is_mounted = False

    # What happens to it.

    def fill(self) -> bool:
        """Leave no room; False: it has no bounds."""
        if not self._is_mounted:
            return False
        with self._filler.open("ab") as file:
            for size in _FILLED_BYTES:
                with contextlib.suppress(OSError):
                    while True:
                        os.write(file.fileno(), bytes(size))
        return True

    def make_room(self) -> None:
        """Take `fill` back."""
        self._filler.unlink(missing_ok=True)

    def set_read_only(self) -> bool:
        """Let nothing be written; False: a file was always being written."""
        return self._is_mounted and self._remount("ro")

    def set_writable(self) -> None:
        """Take `set_read_only` back."""
        self._remount("rw")

    def _remount(self, option: str) -> bool:
        deadline = time.monotonic() + _BUSY_S
        while time.monotonic() < deadline:
            command = ["mount", "-o", f"remount,{option}", str(self.folder)]
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                return True
            time.sleep(_LOOK_S)
        return False

    def slow(self, delay_s: float) -> None:
        """Let each file that is opened, renamed or removed take so many seconds more; 0: no longer."""
        self._delay[:] = _DOUBLE.pack(delay_s)

    def flip(self, rng: random.Random) -> int:
        """Turn a bit over in some files; return in how many."""
        return sum(_flipped(path, rng) for path in self._some(rng))

    def cut(self, rng: random.Random) -> int:
        """Cut some files short; return how many."""
        num_cut = 0
        for path in self._some(rng):
            with contextlib.suppress(FileNotFoundError):
                os.truncate(path, rng.randrange(path.stat().st_size + 1))
                num_cut += 1
        return num_cut

    def remove(self, rng: random.Random) -> int:
        """Remove some files, or all that are in one folder; return how many."""
        paths = self._some(rng)
        if paths and rng.random() < _ROOT_SHARE:
            paths = list(paths[0].parent.glob(f"*{SUFFIX}"))
        for path in paths:
            path.unlink(missing_ok=True)
        return len(paths)

    def _some(self, rng: random.Random) -> list[Path]:
        paths = sorted(self.folder.rglob(f"*{SUFFIX}"))
        return rng.sample(paths, min(len(paths), rng.randint(1, _MOST_FILES)))


class Disks:
    """One for each worker, in `folder`."""

    def __init__(self, folder: Path, names: Sequence[str], library: Path, *, num_bytes: int, are_mounted: bool) -> None:
        """Make them. Raises CalledProcessError; what was mounted by then is unmounted."""
        self._folder, self._by_name = folder, dict[str, Disk]()
        folder.mkdir()
        try:
            for name in names:
                self._by_name[name] = Disk(folder / name, library, num_bytes=num_bytes, is_mounted=are_mounted)
        except BaseException:
            self.close()
            raise

    def of(self, name: str) -> Disk:
        """Return the disk of a worker."""
        return self._by_name[name]

    def close(self) -> None:
        """Unmount all; idempotent. Raises CalledProcessError."""
        for disk in self._by_name.values():
            disk.close()

    def left_behind(self) -> list[str]:
        """Return the mounts that are still there, after `close`, in words."""
        lines = _PARENT_MOUNTS.read_text().splitlines()
        return [f"the mount {line.split()[1]} is left" for line in lines if line.split()[1].startswith(f"{self._folder}/")]


def _flipped(path: Path, rng: random.Random) -> bool:
    try:
        file = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        size = os.fstat(file).st_size
        if not size:
            return False
        at = rng.randrange(size)
        [byte] = os.pread(file, 1, at)
        os.pwrite(file, bytes([byte ^ 1 << rng.randrange(8)]), at)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return False
    finally:
        os.close(file)
    return True


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
