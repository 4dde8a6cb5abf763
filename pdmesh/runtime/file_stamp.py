"""Whether a file has changed: also one that was replaced, or that a link (as Kubernetes mounts them) now points away from."""

from __future__ import annotations

from pathlib import Path

Stamp = tuple[int, int, int, int]


def stamp_of(path: Path) -> Stamp:
    """Device, inode, size and time of the file behind `path`. Raises OSError."""
    found = path.stat()
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
