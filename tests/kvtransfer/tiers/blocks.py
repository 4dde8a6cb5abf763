"""What tests of tiers share: blocks of random bytes, and files that somebody damaged."""

from __future__ import annotations

import random
from pathlib import Path

from kvtransfer.framing import checksum
from kvtransfer.tiers.backends.block_file import HEADER_BYTES, relative_path
from kvtransfer.tiers.backends.coding import BlockForm
from kvtransfer.tiers.backends.disk import DiskTier
from kvtransfer.tiers.base import BlockBytes
from pdmesh.engine.kv_cache.published_blocks import BlockName, names_of

SIZE = 5_000
IDENTITY = b"identity"
FORM = BlockForm(IDENTITY, SIZE)
ROOT = b"root"
FILE = SIZE + HEADER_BYTES


def chain(count: int, root: bytes = ROOT) -> list[BlockName]:
    return names_of(root, [b"%s %d" % (root, number) for number in range(count)])


def block(seed: int, size: int = SIZE) -> BlockBytes:
    content = memoryview(bytearray(random.Random(seed).randbytes(size)))
    return BlockBytes(content, checksum([content]))


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def opened(folder: Path, max_blocks: int = 10, identity: bytes = IDENTITY, size: int = SIZE) -> DiskTier:
    return DiskTier(folder, max_blocks * FILE, BlockForm(identity, size))


def content_of(tier: DiskTier, name: BlockName) -> bytes | None:
    lent = tier.lend(name)
    if lent is None:
        return None
    tier.give_back(name, is_damaged=False)
    tier.check()
    return bytes(lent.content)


def path_of(folder: Path, name: BlockName) -> Path:
    return folder / IDENTITY.hex() / relative_path(name)
