"""Where the block hashes of a prompt begin. Workers and routers have to agree, or a router would look for what nobody holds."""

from __future__ import annotations

from pdmesh.text.block_hash import cache_root
from pdmesh.v1 import common_pb2


def cache_root_of(identity: common_pb2.Identity, kv_dtype: str, *, tenant: str, cache_salt: str) -> bytes:
    """The root of the block hashes: prefixes are shared within one identity, KV dtype, tenant and salt."""
    numbers = f"{identity.numeric_mode}/{kv_dtype}"
    fields = (identity.model, identity.weights_hash, numbers, identity.protocol_version)
    return cache_root(*fields, salt=f"{len(tenant)}:{tenant}:{cache_salt}")
