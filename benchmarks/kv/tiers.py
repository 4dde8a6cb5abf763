"""How fast blocks come back from the tiers into a pool, beside the device's sequential reads and beside a copy of memory.

The blocks are those of SmolLM2-135M in fp32, 737 kB each. Files are dropped from the system's cache before each read.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import cast

import numpy as np

from benchmarks.harness import Figure
from kvtransfer.manifest import KVMemory
from kvtransfer.native.library import prepare
from kvtransfer.tiers.backends.coding import BlockForm
from kvtransfer.tiers.backends.disk import DiskTier
from kvtransfer.tiers.backends.host import HostTier
from kvtransfer.tiers.base import Tier
from kvtransfer.tiers.pool_blocks import ViewedBlocks
from kvtransfer.tiers.threads import TierThreads
from kvtransfer.tiers.tiers import BATCH_BYTES, KVTiers, TierTools
from pdmesh.engine.interface import ExpectedBlocks, KVSharing, ReservedBlocks
from pdmesh.engine.kv_cache.block_pool import num_blocks_for
from pdmesh.engine.kv_cache.published_blocks import BlockName, names_of
from pdmesh.engine.request import EngineRequest
from pdmesh.sampling_params import SamplingParams

NUM_LAYERS, LAYER_BLOCK_BYTES, BLOCK_SIZE, NUM_BLOCKS = 30, 16 * 3 * 64 * 4, 16, 700
ROUNDS = 7
ROOT = b"benchmark"


class Pool:
    """A pool of the size of the blocks, without an engine."""

    num_layers, num_blocks, num_planes = NUM_LAYERS, NUM_BLOCKS, 2
    bytes_per_layer_block = LAYER_BLOCK_BYTES

    def __init__(self) -> None:
        self.content = np.random.default_rng(1).integers(0, 255, NUM_LAYERS * 2 * NUM_BLOCKS * LAYER_BLOCK_BYTES, dtype=np.uint8)

    def memory(self) -> memoryview:
        return memory_of(self.content)


def memory_of(content: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> memoryview:
    return memoryview(content)  # type: ignore[arg-type]  # numpy's stubs know no buffers


class EmptyCache:
    """A prefix cache that lacks everything, and gives all blocks of the pool: what is measured is the restore alone."""

    def __init__(self, names: Sequence[BlockName]) -> None:
        self._hashes = tuple(name.block_hash for name in names)

    async def lacking(self, root: bytes, tokens: Sequence[int]) -> tuple[int, tuple[bytes, ...]]:
        return 0, self._hashes

    async def expect(self, request: EngineRequest) -> ExpectedBlocks:
        reserved = ReservedBlocks(request, tuple(range(NUM_BLOCKS)), 0, len(request.prompt))
        return ExpectedBlocks(reserved, self._hashes[: num_blocks_for(len(request.prompt), BLOCK_SIZE)])

    async def take_in(self, request_id: str, num_tokens: int, *, is_rounded: bool = False) -> None:
        """Do nothing."""


async def release(_request_id: str) -> bool:
    return True


@contextmanager
def tiers_of(tier: Tier, blocks: ViewedBlocks, copying: TierThreads, names: Sequence[BlockName]) -> Iterator[KVTiers]:
    tools = TierTools(
        sharing=cast("KVSharing", EmptyCache(names)),
        release=release,
        blocks=blocks,
        copying=copying,
        block_size=BLOCK_SIZE,
        compute_s=lambda first, last: None,
        restores="always",
    )
    kv_tiers = KVTiers(tools)
    kv_tiers.use((tier,))
    try:
        yield kv_tiers
    finally:
        kv_tiers.close()


def dropped(folder: Path) -> None:
    """Write a folder's files out, and forget them in the system's cache."""
    os.sync()
    for path in filter(Path.is_file, folder.rglob("*")):
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def read_through(path: Path) -> None:
    """Read a file from its beginning to its end, in pieces of a batch."""
    piece, file, at = memoryview(bytearray(BATCH_BYTES)), os.open(path, os.O_RDONLY), 0
    while got := os.preadv(file, [piece], at):
        at += got
    os.close(file)


def rate(num_bytes: int, work: Callable[[], object]) -> float:
    """Return the gigabytes a second of some work."""
    began = time.perf_counter()
    work()
    return num_bytes / (time.perf_counter() - began) / 1e9


async def restored(kv_tiers: KVTiers, num_bytes: int) -> float:
    request = EngineRequest("r", tuple(range(1, NUM_BLOCKS * BLOCK_SIZE + 2)), SamplingParams(max_tokens=1), cache_root=ROOT)
    began = time.perf_counter()
    if (await kv_tiers.restore(request)).num_tokens != NUM_BLOCKS * BLOCK_SIZE:
        raise AssertionError("not all blocks came back")
    return num_bytes / (time.perf_counter() - began) / 1e9


async def figures() -> list[Figure]:
    prepare()
    pool, copying = Pool(), TierThreads(2, name="copy", is_behind=False)
    blocks = ViewedBlocks(cast("KVMemory", pool), copying)
    names = names_of(ROOT, [b"%d" % number for number in range(NUM_BLOCKS)])
    contents, num_bytes = await blocks.read(range(NUM_BLOCKS)), NUM_BLOCKS * blocks.block_bytes
    rates = SimpleNamespace(host=[], memory=[], disk=[], device=[])
    with TemporaryDirectory() as folder:
        host = HostTier(num_bytes, blocks.block_bytes)
        disk = DiskTier(Path(folder), 2 * num_bytes, BlockForm(b"8 bytes.", blocks.block_bytes))
        for name, content in zip(names, contents, strict=True):
            host.write(name, content, 0.0)
            disk.write(name, content, 0.0)
        whole = Path(folder) / "whole"
        whole.write_bytes(pool.memory())
        copy = np.empty_like(pool.content)
        copy[:] = 0  # its pages are there
        with tiers_of(host, blocks, copying, names) as from_host, tiers_of(disk, blocks, copying, names) as from_disk:
            for _ in range(ROUNDS):
                rates.memory.append(rate(num_bytes, lambda: np.copyto(copy, pool.content)))
                rates.host.append(await restored(from_host, num_bytes))
                dropped(Path(folder))
                rates.device.append(rate(num_bytes, lambda: read_through(whole)))
                dropped(Path(folder))
                rates.disk.append(await restored(from_disk, num_bytes))
    return _figures(rates)


def _figures(rates: SimpleNamespace) -> list[Figure]:
    found = []
    for tier, beside, words, goal in (
        ("host", "memory", "one thread's copy of memory", 0.8),
        ("disk", "device", "sequential reads of one file", 0.7),
    ):
        pairs = zip(getattr(rates, tier), getattr(rates, beside), strict=True)
        ratio = statistics.median(one / other for one, other in pairs)
        found += [
            Figure(f"restore from the {tier} tier, of {words}", round(ratio, 3), "ratio", "higher", goal=goal),
            Figure(f"restore from the {tier} tier", round(statistics.median(getattr(rates, tier)), 2), "GB/s", "higher"),
            Figure(words, round(statistics.median(getattr(rates, beside)), 2), "GB/s", "higher"),
        ]
    return found
