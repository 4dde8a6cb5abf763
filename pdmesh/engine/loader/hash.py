"""The weights hash: it identifies the weights that a worker serves.

SHA-256 over the names, sizes and bytes of config.json and the weight files (a GGUF: the file). It is remembered in the user's
cache folder by size and modification time of each file, so that only the first start reads everything.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

_CHUNK = 4 * 2**20


def weights_hash(files: list[Path], progress: Callable[[float], None] = lambda _: None) -> str:
    """Return the hex SHA-256 of the files. `progress` gets the share that is done, 0 to 1; never called when the hash is
    cached."""
    stamp = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    sidecar = _sidecar(files)
    remembered = _remembered(sidecar, stamp)
    if remembered is not None:
        return remembered
    digest = _hash_files(files, progress)
    _remember(sidecar, stamp, digest)
    return digest


def cache_folder() -> Path:
    """Return $PDMESH_CACHE, else ~/.cache/pdmesh. The folder is not created here."""
    return Path(os.environ.get("PDMESH_CACHE") or Path.home() / ".cache" / "pdmesh")


def _hash_files(files: list[Path], progress: Callable[[float], None]) -> str:
    digest = hashlib.sha256()
    total, done = sum(path.stat().st_size for path in files), 0
    buffer = memoryview(bytearray(_CHUNK))
    for path in files:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                done += count
                progress(done / max(total, 1))
    return digest.hexdigest()


def _sidecar(files: list[Path]) -> Path:
    paths = "\0".join(str(path.resolve()) for path in files)
    return cache_folder() / "hashes" / f"{hashlib.sha256(paths.encode()).hexdigest()[:32]}.json"


def _remembered(sidecar: Path, stamp: list[list[object]]) -> str | None:
    """Return the hash in the sidecar if it is about these very files; None for any other content, garbage included."""
    try:
        content = json.loads(sidecar.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict) or content.get("files") != stamp:
        return None
    digest = content.get("sha256")
    return digest if isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest) else None


def _remember(sidecar: Path, stamp: list[list[object]], digest: str) -> None:
    """Write and rename the sidecar, so that a reader never sees half. A folder that cannot be written costs only another hash."""
    with contextlib.suppress(OSError):
        sidecar.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=sidecar.parent, prefix=".hash-")
        with os.fdopen(handle, "w") as file:
            json.dump({"files": stamp, "sha256": digest}, file)
        os.replace(name, sidecar)
