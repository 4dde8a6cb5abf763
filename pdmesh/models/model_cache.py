"""The folder that keeps fetched and converted models.

    $PDMESH_CACHE (default ~/.cache/pdmesh)
        gguf/FILE.gguf          as published; here only after its SHA-256 was checked
        gguf_hashes/            SHA-256 of files of the user's, so that they are read once
        models/NAME/            a Hugging Face folder; pdmesh.json in it says from what it was made and what belongs to it

Everything appears by rename, under a lock, so what has its name is complete: an interrupted build leaves only a folder
whose name begins with a dot, and the next build of the same name removes it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# Raise it when a conversion would come out different, so that older results are made anew.
FORMAT = 1
_MARKER = "pdmesh.json"
# A cache may serve several users of a machine: they may read.
_SHARED_FILE, _SHARED_FOLDER = 0o644, 0o755

Progress = Callable[[str], None]


def cache_folder() -> Path:
    """$PDMESH_CACHE, or ~/.cache/pdmesh. Need not exist."""
    chosen = os.environ.get("PDMESH_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "pdmesh"


def is_complete(folder: Path, sha256: str) -> bool:
    """Whether `folder` holds the conversion of the file with this hash, with all its files in their sizes."""
    try:
        marker = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in marker["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return (marker.get("format"), marker.get("sha256"), marker["files"]) == (FORMAT, sha256, sizes)


def write_marker(folder: Path, sha256: str) -> None:
    """Says that `folder` is complete as it is now. To be called last, before the folder gets its name."""
    files: dict[str, int] = {}
    for path in sorted(folder.iterdir()):
        path.chmod(_SHARED_FILE)  # some writers make private files
        files[path.name] = path.stat().st_size
    content = {"format": FORMAT, "sha256": sha256, "files": files}
    (folder / _MARKER).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@contextmanager
def exclusive(target: Path, progress: Progress) -> Iterator[None]:
    """Holds the lock of `target` against other processes; the kernel releases it when this one dies."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that prepares {target.name}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def building(target: Path) -> Iterator[Path]:
    """A fresh folder beside `target`, removed at the end whatever happens. Needs the lock of `target`.

    Its name is new each time: a converter that outlived its killed parent cannot write into it.
    """
    for left_behind in target.parent.glob(f".{target.name}.building-*"):
        shutil.rmtree(left_behind, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.building-", dir=target.parent))
    folder.chmod(_SHARED_FOLDER)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(built: Path, target: Path) -> None:
    """Gives a finished file or folder its name. An older folder of that name goes away first."""
    if target.is_dir():
        shutil.rmtree(target)
    built.rename(target)
