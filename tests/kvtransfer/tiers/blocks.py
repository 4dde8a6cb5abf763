"""What tests of tiers share: blocks of random bytes, and files that somebody damaged."""

from __future__ import annotations

import random
from pathlib import Path

from kvtransfer.framing import checksum
from kvtransfer.tiers.base import BlockBytes
from kvtransfer.tiers.coding import BlockForm
from pdmesh.engine.kv_cache.published_blocks import BlockName, names_of

SIZE = 5_000
IDENTITY = b"identity"
FORM = BlockForm(IDENTITY, SIZE)
ROOT = b"root"


def chain(count: int, root: bytes = ROOT) -> list[BlockName]:
    return names_of(root, [b"%s %d" % (root, number) for number in range(count)])


def block(seed: int, size: int = SIZE) -> BlockBytes:
    content = memoryview(bytearray(random.Random(seed).randbytes(size)))
    return BlockBytes(content, checksum([content]))


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
