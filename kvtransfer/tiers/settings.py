"""Settings of the tiers beneath a worker's block pool."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

GB = 1e9

_HOST_HELP = "GB of this process's memory for KV that the block pool has lost; 0: none. For pools on devices"
_DISK_HELP = "folder for KV that the block pool has lost, of this worker or of several on this host; empty: none"
_STORE_HELP = "Redis in which workers of several hosts share KV, redis://host:port/0; empty: none"
_COMPRESSION_HELP = "compress KV in --kv-disk and --kv-store, losslessly: where they are slow or small"
_WRITE_HELP = "write KV to these tiers when it is computed, unless next to nothing of it is used again; always"
_DTYPE_HELP = "element type of KV in these tiers; int8 and fp8 take less room and round it, so answers from it may differ"
_RESTORE_HELP = "bring KV back from these tiers: where it is quicker than computing it, always, never"


@dataclass(frozen=True, kw_only=True)
class TierConfig:
    """Configure the tiers beneath the block pool."""

    kv_host_gb: float = field(default=0.0, metadata={"help": _HOST_HELP})
    kv_disk: str = field(default="", metadata={"help": _DISK_HELP})
    kv_disk_gb: float = field(default=10.0, metadata={"help": "GB that the files in --kv-disk may have together"})
    kv_store: str = field(default="", metadata={"help": _STORE_HELP, "secret": True})
    kv_store_gb: float = field(default=10.0, metadata={"help": "GB that this mesh's KV in --kv-store may have together"})
    kv_tier_compression: str = field(default="none", metadata={"help": _COMPRESSION_HELP, "choices": ("none", "zstd")})
    kv_write: str = field(default="auto", metadata={"help": _WRITE_HELP, "choices": ("auto", "always")})
    kv_tier_dtype: str = field(default="pool", metadata={"help": _DTYPE_HELP, "choices": ("pool", "int8", "fp8")})
    kv_restore: str = field(default="auto", metadata={"help": _RESTORE_HELP, "choices": ("auto", "always", "off")})

    def validate(self) -> None:
        """Check the settings. Raises ValueError that names the field."""
        if not (math.isfinite(self.kv_host_gb) and self.kv_host_gb >= 0):
            raise ValueError(f"kv_host_gb: {self.kv_host_gb} is not 0 or more gigabytes")
        if not (math.isfinite(self.kv_disk_gb) and self.kv_disk_gb > 0):
            raise ValueError(
                f"kv_disk_gb: {self.kv_disk_gb} is not a positive number of gigabytes; to use no disk leave kv_disk empty"
            )
        if not (math.isfinite(self.kv_store_gb) and self.kv_store_gb > 0):
            raise ValueError(
                f"kv_store_gb: {self.kv_store_gb} is not a positive number of gigabytes; to use no store leave kv_store empty"
            )
        if self.kv_disk and Path(self.kv_disk).exists() and not Path(self.kv_disk).is_dir():
            raise ValueError(f"kv_disk: {self.kv_disk} is no folder")

    @property
    def rounds(self) -> bool:
        """Return whether the tiers round what they hold."""
        return self.kv_tier_dtype != "pool"

    @property
    def private(self) -> bool:
        """Return whether other workers can fetch nothing of what is in the tiers alone: what is sent is exact."""
        return self.rounds or self.kv_restore == "off"

    @property
    def has_any(self) -> bool:
        """Return whether a tier is asked for."""
        return bool(self.kv_disk) or bool(self.kv_store) or self.kv_host_gb > 0
