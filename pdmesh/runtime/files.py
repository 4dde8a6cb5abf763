"""Where the block hashes of a prompt begin. Workers and routers have to agree, or a router would look for what nobody holds."""

from __future__ import annotations

from pathlib import Path

from pdmesh.text.block_hash import cache_root
from pdmesh.v1 import common_pb2


def cache_root_of(identity: common_pb2.Identity, kv_dtype: str, *, tenant: str, cache_salt: str) -> bytes:
    """The root of the block hashes: prefixes are shared within one identity, KV dtype, tenant and salt."""
    numbers = f"{identity.numeric_mode}/{kv_dtype}"
    fields = (identity.model, identity.weights_hash, numbers, identity.protocol_version)
    return cache_root(*fields, salt=f"{len(tenant)}:{tenant}:{cache_salt}")


# Whether a file has changed: also one that was replaced, or that a link (as Kubernetes mounts them) now points away from.


Stamp = tuple[int, int, int, int]


def stamp_of(path: Path) -> Stamp:
    """Device, inode, size and time of the file behind `path`. Raises OSError."""
    found = path.stat()
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
