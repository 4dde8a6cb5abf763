"""The pool's memory: one layout for tensor and bytes, shared by descriptor, sealed against everyone else."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pdmesh.engine.kv_cache.pool import KVPool, KVShape, shared_memory
from pdmesh.platform import capabilities
from pdmesh.platform.capabilities import MEMFD

SHAPE = KVShape(num_layers=3, num_blocks=5, block_size=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
sealed = pytest.mark.skipif(not MEMFD.is_there, reason="needs memory with seals")


@pytest.fixture
def pool() -> Iterator[KVPool]:
    pool = KVPool(SHAPE)
    yield pool
    pool.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_block_view_is_the_blocks_bytes(dtype: torch.dtype) -> None:
    shape = KVShape(3, 5, 4, 2, 8, dtype)
    pool = KVPool(shape)
    values = torch.randn(shape.tensor_shape).to(dtype)
    pool.tensor.copy_(values)
    for layer, kv, block in ((0, 0, 0), (1, 1, 3), (2, 1, 4)):
        with pool.block_view(layer, kv, block) as view:
            assert len(view) == shape.bytes_per_layer_block == 4 * 2 * 8 * dtype.itemsize
            assert torch.equal(torch.frombuffer(bytearray(view), dtype=dtype).view(4, 2, 8), values[layer, kv, block])
    pool.close()


def test_bytes_written_through_a_view_are_seen_in_the_tensor(pool: KVPool) -> None:
    with pool.block_view(1, 0, 2) as view:
        view[:] = bytes(torch.full((4, 2, 8), 7.0).numpy())
    assert bool((pool.tensor[1, 0, 2] == 7.0).all())
    assert int(pool.tensor.count_nonzero()) == 4 * 2 * 8


def test_sizes(pool: KVPool) -> None:
    assert SHAPE.bytes_per_block == 3 * 2 * SHAPE.bytes_per_layer_block
    assert len(pool.memory()) == SHAPE.num_bytes == pool.tensor.nbytes
    assert (pool.num_layers, pool.num_blocks, pool.bytes_per_layer_block) == (3, 5, SHAPE.bytes_per_layer_block)


@pytest.mark.parametrize("place", [(3, 0, 0), (0, 2, 0), (0, 0, 5), (0, 0, -1)])
def test_a_view_outside_the_pool_is_refused(pool: KVPool, place: tuple[int, int, int]) -> None:
    with pytest.raises(IndexError, match="is not in"):
        pool.block_view(*place)


@sealed
def test_a_peer_maps_the_descriptor_read_only(pool: KVPool) -> None:
    assert pool.fd is not None
    with mmap.mmap(pool.fd, SHAPE.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ) as seen:
        pool.tensor[2, 1, 4] = 3.0
        assert seen[-4:] == bytes(torch.tensor(3.0).numpy())
    with pytest.raises(PermissionError):
        mmap.mmap(pool.fd, SHAPE.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        os.write(pool.fd, b"x")


@sealed
@pytest.mark.parametrize("num_bytes", [0, 2 * SHAPE.num_bytes])
def test_a_peer_can_neither_shrink_nor_grow_it(pool: KVPool, num_bytes: int) -> None:
    assert pool.fd is not None
    with pytest.raises(PermissionError):
        os.ftruncate(pool.fd, num_bytes)


@sealed
def test_closing_leaves_neither_descriptor_nor_mapping() -> None:
    before, mappings = len(os.listdir("/proc/self/fd")), num_mappings()
    for _ in range(3):
        pool = KVPool(SHAPE)
        pool.close()
        pool.close()
        with pytest.raises(ValueError, match="closed"):
            pool.memory()
    assert len(os.listdir("/proc/self/fd")) == before
    assert num_mappings() == mappings


@sealed
def test_a_view_that_outlives_the_pool_keeps_the_mapping_until_it_goes() -> None:
    mappings = num_mappings()
    pool = KVPool(SHAPE)
    view = pool.block_view(0, 0, 0)
    pool.close()
    view[0] = 1
    assert num_mappings() == mappings + 1
    view.release()
    del pool
    assert num_mappings() == mappings


def num_mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("pdmesh-kv" in line for line in maps)


def test_without_seals_a_pool_is_shown_to_no_peer_and_its_ranks_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(capabilities.VARIABLE, "memfd")
    before = len(os.listdir("/proc/self/fd"))
    with_peers = KVPool(SHAPE)
    assert with_peers.fd is None
    seen: list[mmap.mmap] = []
    pool = KVPool(SHAPE, before_seal=lambda fd: seen.append(mmap.mmap(fd, SHAPE.num_bytes)))
    assert pool.fd is None
    pool.tensor.fill_(3.0)
    assert seen[0][-4:] == bytes(torch.tensor(3.0).numpy())
    seen[0][:4] = bytes(torch.tensor(5.0).numpy())
    assert float(pool.tensor.flatten()[0]) == 5.0
    for each in (with_peers, pool, seen[0]):
        each.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_unlinked_file_has_no_name_and_no_other_user_may_open_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(capabilities.VARIABLE, "memfd")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    modes: list[int] = []
    memory, fd = shared_memory("unused", 4096, lambda fd: modes.append(os.fstat(fd).st_mode & 0o777))
    assert (fd, modes, list(tmp_path.iterdir())) == (None, [0o600], [])
    memory.close()
