"""Settings of the tiers beneath a worker's block pool, and the tiers that they ask for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from kvtransfer.tiers.base import Tier
from kvtransfer.tiers.block_file import IDENTITY_BYTES
from kvtransfer.tiers.disk import DiskTier
from kvtransfer.tiers.host import HostTier
from pdmesh.v1 import common_pb2

GB = 1e9

_HOST_HELP = "GB of this process's memory for KV that the block pool has lost; 0: none. For pools on devices"
_DISK_HELP = "folder for KV that the block pool has lost, of this worker or of several on this host; empty: none"
_RESTORE_HELP = "bring KV back from these tiers: where it is quicker than computing it, always, never"


@dataclass(frozen=True, kw_only=True)
class TierConfig:
    """Configure the tiers beneath the block pool."""

    kv_host_gb: float = field(default=0.0, metadata={"help": _HOST_HELP})
    kv_disk: str = field(default="", metadata={"help": _DISK_HELP})
    kv_disk_gb: float = field(default=10.0, metadata={"help": "GB that the files in --kv-disk may have together"})
    kv_restore: str = field(default="auto", metadata={"help": _RESTORE_HELP, "choices": ("auto", "always", "off")})

    def validate(self) -> None:
        """Check the settings. Raises ValueError that names the field."""
        if not (math.isfinite(self.kv_host_gb) and self.kv_host_gb >= 0):
            raise ValueError(f"kv_host_gb: {self.kv_host_gb} is not 0 or more gigabytes")
        if not (math.isfinite(self.kv_disk_gb) and self.kv_disk_gb > 0):
            raise ValueError(
                f"kv_disk_gb: {self.kv_disk_gb} is not a positive number of gigabytes; to use no disk leave kv_disk empty"
            )
        if self.kv_disk and Path(self.kv_disk).exists() and not Path(self.kv_disk).is_dir():
            raise ValueError(f"kv_disk: {self.kv_disk} is no folder")

    @property
    def has_any(self) -> bool:
        """Return whether a tier is asked for."""
        return bool(self.kv_disk) or self.kv_host_gb > 0


def open_tiers(
    config: TierConfig, identity: common_pb2.Identity, layout: common_pb2.KVLayout, block_bytes: int
) -> tuple[Tier, ...]:
    """Return the tiers, the fastest first; looks through the folder, so call it in a thread. Raises ValueError naming the
    field."""
    tiers: list[Tier] = []
    if config.kv_host_gb:
        tiers.append(HostTier(round(config.kv_host_gb * GB), block_bytes))
    if config.kv_disk:
        try:
            folder = Path(config.kv_disk)
            tiers.append(DiskTier(folder, round(config.kv_disk_gb * GB), block_bytes, digest_of(identity, layout, block_bytes)))
        except OSError as error:
            raise ValueError(f"kv_disk: {config.kv_disk} cannot be used: {error.strerror or error}") from error
    return tuple(tiers)


def digest_of(identity: common_pb2.Identity, layout: common_pb2.KVLayout, block_bytes: int) -> bytes:
    """Return what tells apart the blocks of models, numeric modes and layouts, 8 bytes."""
    digest = blake2b(digest_size=IDENTITY_BYTES, person=b"pdmesh.tier")
    for part in (identity.SerializeToString(deterministic=True), layout.SerializeToString(deterministic=True)):
        digest.update(len(part).to_bytes(4, "little") + part)
    digest.update(block_bytes.to_bytes(8, "little"))
    return digest.digest()
