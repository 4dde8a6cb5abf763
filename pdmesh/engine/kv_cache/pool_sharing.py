"""How a pool on a device is shown to other processes of the host, and theirs are opened here.

The one in use is CUDA's (cuda_sharing.py). Tests have one over shared memory of the host, so that everything around it runs
without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class PoolHandle:
    """What another process needs to open a pool. handle: of the allocation that it lies in, `offset` bytes behind its beginning;
    device: which one, the same in all processes."""

    handle: bytes
    offset: int
    device: bytes


class NotShared(ValueError):
    """A pool cannot be shown, or another's cannot be opened, here. `field` of its handle is why."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.field = field
        self.why = why


class OpenPool(Protocol):
    """Another process's pool. Who has opened it never writes to it."""

    @property
    def bytes(self) -> Tensor:
        """[num_bytes] uint8. What the owner does to it meanwhile is seen; whoever copies out of it has to check what he got."""
        ...

    def close(self) -> None:
        """No copy may be under way; idempotent."""
        ...


class PoolSharing(Protocol):
    def show(self, pool: Tensor) -> PoolHandle:
        """Raises NotShared."""
        ...

    def open(self, handle: PoolHandle, num_bytes: int) -> OpenPool:
        """From any thread; may take milliseconds. Raises NotShared."""
        ...
