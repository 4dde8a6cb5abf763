"""The tiers that a worker's settings ask for."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from kvtransfer.manifest import DTYPE_BYTES
from kvtransfer.rounding import DTYPES
from kvtransfer.tiers.backends.block_file import IDENTITY_BYTES
from kvtransfer.tiers.backends.coding import REMEDY, BlockForm, is_installed
from kvtransfer.tiers.backends.disk import DiskTier
from kvtransfer.tiers.backends.host import HostTier
from kvtransfer.tiers.base import Tier
from kvtransfer.tiers.settings import GB, TierConfig
from pdmesh.v1 import common_pb2

if TYPE_CHECKING:
    from kvtransfer.tiers.backends.store import StoreTier


def open_tiers(
    config: TierConfig, identity: common_pb2.Identity, layout: common_pb2.KVLayout, block_bytes: int, mesh: str
) -> tuple[Tier, ...]:
    """Return the tiers, the fastest first; looks through the folder, so call it in a thread. `mesh`: its name, under which a
    store keeps its blocks; `block_bytes`: of a block as the tiers hold it. Raises ValueError naming the field."""
    tiers: list[Tier] = []
    form = _form(config, identity, layout, block_bytes)
    if config.kv_host_gb:
        try:
            tiers.append(HostTier(round(config.kv_host_gb * GB), block_bytes))
        except (OSError, OverflowError) as error:
            raise ValueError(f"kv_host_gb: {config.kv_host_gb} GB of memory cannot be had: {error}") from error
    if config.kv_disk:
        try:
            folder = Path(config.kv_disk)
            tiers.append(DiskTier(folder, round(config.kv_disk_gb * GB), form))
        except OSError as error:
            raise ValueError(f"kv_disk: {config.kv_disk} cannot be used: {error.strerror or error}") from error
    if config.kv_store:
        tiers.append(_open_store(config, form, mesh))
    return tuple(tiers)


def _form(config: TierConfig, identity: common_pb2.Identity, layout: common_pb2.KVLayout, block_bytes: int) -> BlockForm:
    is_coded = config.kv_tier_compression == "zstd"
    if is_coded and not is_installed():
        raise ValueError(f"kv_tier_compression: zstd needs the package zstandard; {REMEDY}")
    held_dtype = DTYPES[config.kv_tier_dtype] if config.rounds else layout.kv_dtype
    width = DTYPE_BYTES.get(held_dtype, 1) if is_coded else 0
    return BlockForm(digest_of(identity, layout, block_bytes, config.kv_tier_dtype), block_bytes, width)


def _open_store(config: TierConfig, form: BlockForm, mesh: str) -> StoreTier:
    # redis is imported only for a store
    from kvtransfer.tiers.backends.redis_blocks import RedisBlocks
    from kvtransfer.tiers.backends.store import TIMEOUT_S, StoreTier
    from pdmesh.runtime.registry.redis_link import without_password

    shown = without_password(config.kv_store)
    try:
        blocks = RedisBlocks(config.kv_store, mesh, TIMEOUT_S)
    except ValueError as error:
        # The error's own text is not shown: for a password with a / in it, it quotes a part as the port.
        problem = f"kv_store: {shown!r} is no Redis URL ({type(error).__name__}); give redis://host:port/0"
        raise ValueError(problem) from None
    return StoreTier(blocks, round(config.kv_store_gb * GB), form, shown_url=shown)


def digest_of(identity: common_pb2.Identity, layout: common_pb2.KVLayout, block_bytes: int, tier_dtype: str = "pool") -> bytes:
    """Return what tells apart the blocks of models, numeric modes, layouts and roundings (`kv_tier_dtype`), 8 bytes."""
    digest = blake2b(digest_size=IDENTITY_BYTES, person=b"pdmesh.tier")
    for part in (identity.SerializeToString(deterministic=True), layout.SerializeToString(deterministic=True)):
        digest.update(len(part).to_bytes(4, "little") + part)
    digest.update(block_bytes.to_bytes(8, "little"))
    if tier_dtype != "pool":
        digest.update(f"rounded to {tier_dtype}".encode())
    return digest.digest()
