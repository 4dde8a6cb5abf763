"""The native library computes what the crc32c package computes and copies what a plain copy copies; so does Python without it."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import crc32c
import numpy as np
import pytest

from kvtransfer import framing
from kvtransfer.errors import PeerClosed
from kvtransfer.native import library
from kvtransfer.native.library import Native, address_of, pieces_of
from kvtransfer.stream import SocketStream
from pdmesh.engine.kernels.cpu import build
from tests.engine.backends import needs_native

GUARD = 64
# Around the widths of registers, of unrolled loops, of lanes; and large ones.
SIZES = [*range(66), 127, 128, 255, 256, 257, 383, 384, 511, 512, 513, 575, 576, 1024, 3071, 3072, 3073, 6144, 65537, 1 << 20]
SIZES += [size + more for size in (768, 3840, 12_288, 28_928) for more in (-1, 0, 1)]  # blocks of several lanes


@pytest.fixture(scope="module")
def tiers() -> list[Native]:
    """One for each tier of this processor."""
    loaded = build.load_library(lambda _text: None, project=library.PROJECT)
    return [Native(loaded, name) for name in Native(loaded).tiers() if name != "unsummed"]


@pytest.fixture(params=["native", "python"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """The best tier, and none."""
    before = library.native()
    if request.param == "native":
        request.applymarker(needs_native)
        library.prepare()
        library.use(Native(build.load_library(lambda _text: None, project=library.PROJECT)))
    else:
        library.use(None)
    yield str(request.param)
    library.use(before)


def crc(data: bytes | memoryview, value: int = 0) -> int:
    return int(crc32c.crc32c(data, value))


def cut(data: memoryview, random_numbers: random.Random) -> list[memoryview]:
    """At random places, which may be the same: pieces may be empty."""
    places = sorted(random_numbers.randrange(len(data) + 1) for _ in range(random_numbers.randrange(9)))
    return [data[begin:end] for begin, end in pairwise([0, *places, len(data)])]


@needs_native
def test_every_tier_sums_like_the_package(tiers: list[Native]) -> None:
    random_numbers = random.Random(1)
    data = random_numbers.randbytes((1 << 20) + GUARD)
    assert tiers[-1].tier == "portable"
    for size in SIZES:
        start, before = random_numbers.randrange(GUARD), random_numbers.getrandbits(32)
        piece = memoryview(data)[start : start + size]
        for tier in tiers:
            assert tier.sum(before, pieces_of([piece])) == crc(piece, before), (tier.tier, size, start)


@needs_native
def test_every_tier_sums_pieces_like_one(tiers: list[Native]) -> None:
    random_numbers = random.Random(2)
    data = memoryview(random_numbers.randbytes(20_000))
    for _ in range(200):
        start = random_numbers.randrange(len(data))
        pieces = cut(data[start : random_numbers.randrange(start, len(data)) + 1], random_numbers)
        for tier in tiers:
            assert tier.sum(0, pieces_of(pieces)) == crc(b"".join(pieces)), tier.tier


@needs_native
@pytest.mark.parametrize("streams", [False, True])
def test_every_tier_copies_what_it_sums_and_nothing_else(tiers: list[Native], streams: bool) -> None:
    random_numbers = random.Random(3)
    source = memoryview(random_numbers.randbytes((1 << 20) + 2 * GUARD))
    for size in SIZES:
        origin, to = random_numbers.randrange(GUARD), random_numbers.randrange(GUARD)
        for tier in tiers:
            target = bytearray(b"\xa5" * (to + size + GUARD))
            runs = np.array([[address_of(memoryview(target)) + to, address_of(source) + origin, size]])
            assert tier.copy(7, runs, streams=streams) == crc(source[origin : origin + size], 7)
            assert target[to : to + size] == source[origin : origin + size], (tier.tier, size)
            assert target[:to] == b"\xa5" * to and target[to + size :] == b"\xa5" * GUARD, (tier.tier, size)


def test_runs_are_copied_in_order(way: str) -> None:
    random_numbers = random.Random(4)
    source = memoryview(random_numbers.randbytes(3 << 20))
    target, expected, copied = bytearray(len(source)), bytearray(len(source)), b""
    runs = []
    for begin in range(0, len(source), 1 << 18):  # the second half of the target from the first of the source, and the reverse
        to, size = (begin + len(source) // 2) % len(source), random_numbers.choice([0, 1, 4096, 1 << 18])
        runs.append([to, begin, size])
        expected[to : to + size] = source[begin : begin + size]
        copied += source[begin : begin + size]
    value = framing.copy_runs(5, memoryview(target), source, np.array(runs))
    assert (value, target) == (crc(copied, 5), expected)


def test_pieces_are_filled_until_they_or_the_source_are_used_up(way: str) -> None:
    random_numbers = random.Random(6)
    source = memoryview(random_numbers.randbytes(1 << 19))
    for size in (0, 1, 4096, 70_000, len(source)):
        target = bytearray(300_000)
        pieces = cut(memoryview(target), random_numbers)
        room = sum(piece.nbytes for piece in pieces)
        num_bytes, value = framing.fill_pieces(3, pieces, source[:size])
        assert (num_bytes, value) == (min(room, size), crc(source[:num_bytes], 3))
        assert b"".join(pieces)[:num_bytes] == source[:num_bytes] and not any(b"".join(pieces)[num_bytes:])


def test_checksum_of_pieces(way: str) -> None:
    random_numbers = random.Random(5)
    data = memoryview(random_numbers.randbytes(100_000))
    for size in (0, 1, 4095, 4096, 50_000, 100_000):
        assert framing.checksum(cut(data[:size], random_numbers)) == crc(data[:size])
        assert framing.extend(9, data[:size]) == crc(data[:size], 9)


async def test_views_cross_a_socket(way: str) -> None:
    random_numbers = random.Random(6)
    data = memoryview(random_numbers.randbytes(6 << 20))
    target = memoryview(bytearray(len(data)))
    left: list[int] = []
    seen: list[int] = []
    with ThreadPoolExecutor(2) as executor:
        sender, receiver = (SocketStream(sock, executor, 10.0) for sock in socket.socketpair())
        try:
            sent, value = await asyncio.gather(
                sender.send_views(cut(data, random_numbers), left.append),
                receiver.receive_views(cut(target, random_numbers), seen.append),
            )
        finally:
            sender.close()
            receiver.close()
    assert (sent, value) == (crc(data), crc(data))
    assert target == data and sum(left) == sum(seen) == len(data)


async def test_a_peer_that_closes_is_noticed(way: str) -> None:
    target = memoryview(bytearray(1000))
    with ThreadPoolExecutor(2) as executor:
        sender, receiver = (SocketStream(sock, executor, 10.0) for sock in socket.socketpair())
        try:
            await sender.send_views([memoryview(b"x" * 600)], lambda _count: None)
            sender.close()
            with pytest.raises(PeerClosed, match="with 400 bytes of a part missing"):
                await receiver.receive_views([target], lambda _count: None)
            with pytest.raises(OSError, match=r"pipe|reset"):
                await receiver.send_views([target], lambda _count: None)
        finally:
            receiver.close()


@needs_native
def test_a_foreign_library_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other.cpp").write_text('extern "C" int answer() { return 42; }\n', encoding="ascii")
    monkeypatch.setenv("PDMESH_CACHE", str(tmp_path))
    monkeypatch.setattr(library, "PROJECT", build.Project(tmp_path, is_tiered=False))
    assert library._load() is None


def test_without_a_compiler_python_does_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PDMESH_CACHE", str(tmp_path))
    monkeypatch.delenv("PDMESH_KERNELS_DIR", raising=False)
    assert library._load() is None


@needs_native
def test_a_tier_that_is_not_there_is_named() -> None:
    loaded = build.load_library(lambda _text: None, project=library.PROJECT)
    with pytest.raises(ValueError, match="tier: 'abacus' is not among"):
        Native(loaded, "abacus")
