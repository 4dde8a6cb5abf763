"""Which pages of a pool are in memory, as the kernel counts them."""

from __future__ import annotations

import ctypes
import mmap
import time

import pytest
import torch

from pdmesh.engine.kv_cache import pool as kv_cache_pool
from pdmesh.engine.kv_cache.pool import KVPool, KVShape
from pdmesh.platform.capabilities import TOUCHED_PAGES

BLOCK = 4 * mmap.PAGESIZE  # of one layer's keys
SHAPE = KVShape(num_layers=2, num_blocks=64, block_size=1, num_kv_heads=1, head_dim=BLOCK // 4, dtype=torch.float32)

pytestmark = pytest.mark.skipif(not TOUCHED_PAGES.is_there, reason="this system touches no pages ahead")


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> KVPool:
    """Eight blocks of each plane are touched at a time."""
    monkeypatch.setattr(kv_cache_pool, "STRIPE_BYTES", 8 * SHAPE.bytes_per_block)
    return KVPool(SHAPE)  # shared: its pages are small


def resident(pool: KVPool) -> list[int]:
    """Bytes in memory of each plane."""
    libc, plane = ctypes.CDLL(None), SHAPE.num_blocks * BLOCK
    answer = (ctypes.c_ubyte * (plane // mmap.PAGESIZE))()
    counts = []
    for index in range(2 * SHAPE.num_layers):
        address = ctypes.c_void_p(pool.tensor.data_ptr() + index * plane)
        assert libc.mincore(address, ctypes.c_size_t(plane), answer) == 0
        counts.append(sum(page & 1 for page in answer) * mmap.PAGESIZE)
    return counts


def wait_for(pool: KVPool, num_blocks: int) -> None:
    deadline = time.monotonic() + 10
    while resident(pool) != [num_blocks * BLOCK] * 4:
        assert time.monotonic() < deadline, resident(pool)
        time.sleep(0.005)


def test_the_first_stripe_is_there_at_start_and_the_next_before_it_is_used(pool: KVPool) -> None:
    wait_for(pool, 8)
    pool.reach(3)  # far enough from the end
    wait_for(pool, 8)
    pool.reach(4)
    wait_for(pool, 16)
    pool.close()


def test_touching_changes_nothing(pool: KVPool) -> None:
    pool.tensor.fill_(7)
    for block_id in range(SHAPE.num_blocks):
        pool.reach(block_id)
    pool.reach(SHAPE.num_blocks - 1)
    assert bool((pool.tensor == 7).all())
    pool.close()


def test_a_closed_pool_waits_for_the_thread(pool: KVPool) -> None:
    pool.reach(SHAPE.num_blocks - 1)
    pool.close()
    pool.reach(0)  # nothing to do any more


def test_a_system_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache_pool, "_touch", lambda _start, _end: False)
    pool = KVPool(SHAPE, shared=False)
    pool.tensor.fill_(1)
    pool.reach(SHAPE.num_blocks - 1)
    pool.close()


def test_pages_ahead_come_in_pieces_and_none_behind_the_end(pool: KVPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step waits for no more than a piece, and a pool that closes for no more than that either."""
    pieces: list[int] = []

    def touch(start: int, end: int) -> bool:
        pieces.append(end - start)
        time.sleep(0.001)
        return True

    monkeypatch.setattr(kv_cache_pool, "_touch", touch)
    monkeypatch.setattr(kv_cache_pool, "PIECE_BYTES", BLOCK)
    pool.reach(4)
    deadline = time.monotonic() + 10
    while len(pieces) < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    pool.close()
    num_pieces = len(pieces)
    assert set(pieces) == {BLOCK} and num_pieces < 8 * 2 * SHAPE.num_layers
    time.sleep(0.02)
    assert len(pieces) == num_pieces, "something touches memory that is free"
