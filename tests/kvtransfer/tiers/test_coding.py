"""Compressed blocks: what comes back is what was written, or is refused; sizes are those that are stored."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
from redis import Redis

from kvtransfer.framing import checksum
from kvtransfer.tiers import opening
from kvtransfer.tiers.backends import coding, disk
from kvtransfer.tiers.backends.block_file import HEADER_BYTES, BadBlockFile, BlockHeader
from kvtransfer.tiers.backends.coding import BlockForm, CannotDecode
from kvtransfer.tiers.backends.disk import DiskTier
from kvtransfer.tiers.backends.redis_blocks import RedisBlocks
from kvtransfer.tiers.backends.store import StoreTier
from kvtransfer.tiers.base import BlockBytes
from kvtransfer.tiers.settings import TierConfig
from pdmesh.runtime.registry.redis_server import EmbeddedRedis
from pdmesh.v1 import common_pb2
from tests.kvtransfer.tiers.blocks import FORM, IDENTITY, SIZE, block, chain, files_in

zstandard = pytest.importorskip("zstandard", reason="the extra `compression` is not installed")

[NAME] = chain(1)


def numbers(width: int, seed: int = 0) -> BlockBytes:
    """Normally distributed numbers, as KV has them."""
    values = np.random.default_rng(seed).normal(size=SIZE // width).astype(np.float32)
    small, halves = values.clip(-3, 3).astype(np.int8), (values.view(np.uint32) >> 16).astype(np.uint16)
    content = memoryview(bytearray({1: small.tobytes(), 2: halves.tobytes(), 4: values.tobytes()}[width]))
    return BlockBytes(content, checksum([content]))


def value_of(form: BlockForm, content: BlockBytes) -> memoryview:
    return memoryview(b"".join(form.pack(NAME, content)))


@pytest.mark.parametrize(("width", "share"), [(1, 0.5), (2, 0.75), (4, 0.9)])
def test_what_comes_back_is_what_was_written_in_fewer_bytes(width: int, share: float) -> None:
    form, content = BlockForm(IDENTITY, SIZE, width), numbers(width)
    value = value_of(form, content)
    assert value.nbytes < HEADER_BYTES + share * SIZE
    for reader in (form, FORM, BlockForm(IDENTITY, SIZE, 4)):  # how a worker writes does not say what it can read
        back = reader.unpack(NAME, value)
        assert (bytes(back.content), back.crc) == (bytes(content.content), content.crc)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_what_does_not_become_smaller_stays_as_it_is(width: int) -> None:
    value = value_of(BlockForm(IDENTITY, SIZE, width), block(1))
    assert value == value_of(FORM, block(1)) and value.nbytes == FORM.max_bytes


@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_damaged_value_never_passes(width: int) -> None:
    form, content, choice = BlockForm(IDENTITY, SIZE, width), numbers(width), random.Random(width)
    whole = value_of(form, content)
    for _ in range(400):
        damaged = bytearray(whole)
        match choice.randrange(4):
            case 0:
                damaged[choice.randrange(len(damaged))] ^= 1 << choice.randrange(8)
            case 1:
                del damaged[choice.randrange(len(damaged)) :]
            case 2:
                damaged += choice.randbytes(choice.randint(1, 50))
            case _:
                start = choice.randrange(HEADER_BYTES, len(damaged))
                damaged[start : start + 20] = choice.randbytes(len(damaged[start : start + 20]))
        if damaged == whole:
            continue
        try:
            back = form.unpack(NAME, memoryview(damaged))
        except BadBlockFile:
            continue
        assert back.content.nbytes == SIZE and back.crc == content.crc
        assert (checksum([back.content]) == back.crc) == (bytes(back.content) == bytes(content.content))


def coded(frame: bytes, width: int = 1) -> memoryview:
    """A value with a right header."""
    rest = bytes(SIZE - SIZE // width)
    header = BlockHeader(IDENTITY, NAME.root, NAME.block_hash, SIZE, 0, width, len(rest) + len(frame))
    return memoryview(header.pack() + rest + frame)


@pytest.mark.parametrize(
    "frame",
    [
        zstandard.compress(bytes(1 << 28)),
        zstandard.compress(bytes(SIZE + 1)),
        zstandard.compress(bytes(SIZE - 1)),
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(SIZE)),
        zstandard.compress(bytes(SIZE))[:-1],
        b"",
        b"no frame",
    ],
    ids=["a bomb", "longer", "shorter", "of no length", "cut", "empty", "none"],
)
def test_no_more_than_a_block_comes_out(frame: bytes) -> None:
    with pytest.raises(BadBlockFile):
        FORM.unpack(NAME, coded(frame))


def test_a_frame_that_says_less_than_it_holds_is_refused() -> None:
    honest = bytearray(zstandard.ZstdCompressor(write_checksum=False).compress(random.Random(1).randbytes(2 * SIZE)))
    size = zstandard.frame_content_size(bytes(honest))
    at = honest.index((size - 256).to_bytes(2, "little"))
    honest[at : at + 2] = (SIZE - 256).to_bytes(2, "little")
    assert zstandard.frame_content_size(bytes(honest)) == SIZE
    with pytest.raises(BadBlockFile, match="cannot be decompressed"):
        FORM.unpack(NAME, coded(bytes(honest)))


@pytest.mark.parametrize("width", [3, 255])
def test_a_width_that_cannot_be_is_refused(width: int) -> None:
    with pytest.raises(BadBlockFile, match="are no numbers of"):
        FORM.unpack(NAME, coded(zstandard.compress(bytes(SIZE // width)), width))


def opened(folder: Path, max_bytes: int = 10 * FORM.max_bytes, width: int = 2) -> DiskTier:
    return DiskTier(folder, max_bytes, BlockForm(IDENTITY, SIZE, width))


def test_files_count_with_the_bytes_that_they_have(tmp_path: Path) -> None:
    tier, names = opened(tmp_path, 3 * FORM.max_bytes), chain(5)
    for number, name in enumerate(names):
        tier.write(name, numbers(2, number), 0.0)
        assert tier.num_bytes == sum(path.stat().st_size for path in files_in(tmp_path)) <= tier.max_bytes
    assert tier.num_blocks == 4  # three of them without compression
    later = opened(tmp_path, width=0)
    assert later.num_blocks == 4 and later.num_bytes == tier.num_bytes
    blocks = later.lend_batch(names[:4])
    assert [bytes(each.content) for each in blocks] == [bytes(numbers(2, number).content) for number in range(4)]
    assert all(checksum([each.content]) == each.crc for each in blocks)
    later.write(names[4], numbers(2), 0.0)
    assert later.num_bytes == tier.num_bytes + FORM.max_bytes
    later.check()


def test_a_compressed_file_cut_short_before_the_start_is_removed(tmp_path: Path) -> None:
    opened(tmp_path).write(NAME, numbers(2), 0.0)
    [path] = files_in(tmp_path)
    os.truncate(path, path.stat().st_size - 1)
    later = opened(tmp_path)
    assert later.num_blocks == 0 and later.counts.num_corrupt == 1 and files_in(tmp_path) == []


def test_without_the_package_compressed_files_are_left_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, other = opened(tmp_path), opened(tmp_path, width=0)
    tier.write(NAME, numbers(2), 0.0)
    other.rescan()
    for module in (coding, disk):
        monkeypatch.setattr(module, "is_installed", lambda: False)
    with pytest.raises(CannotDecode, match=r"pip install 'pdmesh\[compression\]'"):
        FORM.unpack(NAME, value_of(BlockForm(IDENTITY, SIZE, 2), numbers(2)))
    assert other.holds([NAME]) == [True] and other.lend(NAME) is None and other.holds([NAME]) == [False]
    assert opened(tmp_path, width=0).num_blocks == 0
    assert len(files_in(tmp_path)) == 1 and other.counts.num_corrupt == other.counts.num_failed == 0


def test_a_worker_that_should_compress_and_cannot_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "is_installed", lambda: False)
    config = TierConfig(kv_store="redis://host/0", kv_tier_compression="zstd")
    with pytest.raises(ValueError, match=r"kv_tier_compression: .* package zstandard; pip install 'pdmesh\[compression\]'"):
        opening.open_tiers(config, common_pb2.Identity(), common_pb2.KVLayout(kv_dtype="bfloat16"), SIZE, "m")


async def test_a_store_counts_what_it_stores() -> None:
    async with EmbeddedRedis() as server:
        tiers = [
            StoreTier(RedisBlocks(server.url, "m", 1.0), 10 * FORM.max_bytes, BlockForm(IDENTITY, SIZE, width), shown_url="")
            for width in (2, 0)
        ]
        names = chain(3)
        tiers[0].write_batch([(name, numbers(2, number), 0.0) for number, name in enumerate(names)])
        with Redis.from_url(server.url, protocol=2) as redis:
            stored = sum(redis.strlen(key) for key in redis.scan_iter(f"pdmesh:m:kv:{IDENTITY.hex()}:*"))
        assert tiers[0].num_bytes == stored < 2.4 * SIZE
        tiers[1].find(names)
        lent = tiers[1].lend_batch(names)
        assert [bytes(each.content) for each in lent] == [bytes(numbers(2, number).content) for number in range(3)]
        for tier in tiers:
            tier.close()
