"""Returns the root of the block hashes of a prompt, and detects whether a file has changed."""

from __future__ import annotations

from pathlib import Path

from pdmesh.text.block_hash import cache_root
from pdmesh.v1 import common_pb2


def cache_root_of(identity: common_pb2.Identity, kv_dtype: str, *, tenant: str, cache_salt: str) -> bytes:
    """Return the root of the block hashes: prefixes are shared within one identity, KV dtype, tenant and salt. Workers and
    routers must agree on it, else a router looks for blocks that no worker holds."""
    numbers = f"{identity.numeric_mode}/{kv_dtype}"
    fields = (identity.model, identity.weights_hash, numbers, identity.protocol_version)
    return cache_root(*fields, salt=f"{len(tenant)}:{tenant}:{cache_salt}")


# A file may also change by replacement, or by a link (as Kubernetes mounts them) that points elsewhere.


Stamp = tuple[int, int, int, int]


def stamp_of(path: Path) -> Stamp:
    """Return device, inode, size and time of the file behind `path`. Raises OSError."""
    found = path.stat()
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
