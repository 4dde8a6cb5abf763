"""KV in fewer bits for the tiers: how far it is from what it was, how many bytes it takes, and that no more is lost than once."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtransfer.conversion import KVFormat, Numbers
from kvtransfer.framing import checksum
from kvtransfer.rounding import Rounding
from kvtransfer.tiers.base import BlockBytes
from kvtransfer.tiers.opening import digest_of
from pdmesh.v1 import common_pb2

LAYERS, TOKENS, HEADS, DIM = 3, 16, 2, 32
SHAPE = (LAYERS * TOKENS, HEADS, DIM)
POOLS = [(arrangement, dtype) for arrangement in ("plain", "panels") for dtype in ("bfloat16", "float16", "float32")]
BOUNDS = {"int8": 1 / 254 + 2.0**-8, "fp8": 1 / 16}
"""Largest error beside the largest number of the head (int8) or the number itself (fp8): half a step, and the pool's own
rounding."""


def rounding_of(arrangement: str, dtype: str, tier_dtype: str) -> Rounding:
    return Rounding(KVFormat(arrangement, dtype, TOKENS, HEADS, DIM), LAYERS, tier_dtype)


def floats_like_kv(seed: int = 1) -> NDArray[np.float32]:
    """Heads differ by a factor of thousands, as do the dimensions of keys; one head is zero."""
    random = np.random.default_rng(seed)
    floats = random.standard_normal(SHAPE) * 10.0 ** random.uniform(-2, 2, (1, HEADS, DIM))
    floats[:TOKENS, 1] = 0
    return floats.astype(np.float32)


def block_of(rounding: Rounding, floats: NDArray[np.float32]) -> BlockBytes:
    numbers = Numbers("float32", floats).converted(rounding.source.dtype)
    planes = [rounding.source.pack(numbers, is_value=is_value) for is_value in (False, True)]
    content = memoryview(np.stack(planes, axis=1).tobytes())
    return BlockBytes(content, checksum([content]))


def floats_of(rounding: Rounding, block: BlockBytes) -> NDArray[np.float32]:
    """[keys and values, tokens, heads, dimensions]"""
    planes = np.frombuffer(block.content, np.uint8).reshape(LAYERS, 2, -1)
    unpacked = [rounding.source.unpack(planes[:, kv], is_value=bool(kv)).converted("float32").values for kv in (0, 1)]
    return np.stack(unpacked).astype(np.float32)


@pytest.mark.parametrize("tier_dtype", ["int8", "fp8"])
@pytest.mark.parametrize(("arrangement", "dtype"), POOLS)
def test_the_error_is_bounded_and_a_second_rounding_changes_nothing(arrangement: str, dtype: str, tier_dtype: str) -> None:
    rounding = rounding_of(arrangement, dtype, tier_dtype)
    block = block_of(rounding, floats_like_kv())
    rounded = rounding.rounded(block)
    assert rounded.content.nbytes == rounding.num_bytes and rounded.crc == checksum([rounded.content])
    restored = rounding.restored(rounded)
    assert restored.content.nbytes == block.content.nbytes and restored.crc == checksum([restored.content])
    before, after = floats_of(rounding, block), floats_of(rounding, restored)
    if tier_dtype == "int8":
        allowed = BOUNDS["int8"] * np.abs(before).max(axis=3, keepdims=True)
    else:  # small numbers of a head are multiples of a step
        peaks = np.abs(before).reshape(2, LAYERS, TOKENS, HEADS, DIM).max(axis=(2, 4))
        steps = np.repeat(peaks, TOKENS, axis=1)[..., None] / 224 * 2**-10
        allowed = BOUNDS["fp8"] * np.abs(before) + steps
    assert np.all(np.abs(after - before) <= allowed + 1e-7)
    assert np.any(after != before)
    assert bytes(rounding.restored(rounding.rounded(restored)).content) == bytes(restored.content)


def test_the_bytes_of_a_block() -> None:
    plain = KVFormat("plain", "bfloat16", 16, 3, 64)
    of_a_plane = 16 * 3 * 64
    assert Rounding(plain, 30, "int8").num_bytes == 60 * (of_a_plane + 4 * 16 * 3)
    assert Rounding(plain, 30, "fp8").num_bytes == 60 * (of_a_plane + 4 * 3)
    assert Rounding(plain, 30, "int8").plane_bytes == KVFormat("plain", "int8", 16, 3, 64).num_bytes


@pytest.mark.parametrize("tier_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_not_finite_does_not_become_finite(dtype: str, tier_dtype: str) -> None:
    """Blocks of it are withdrawn, and must be known as such if they come back all the same."""
    rounding = rounding_of("plain", dtype, tier_dtype)
    for bad in (np.nan, np.inf, -np.inf):
        floats = floats_like_kv()
        floats[5, 0, 7] = bad
        after = floats_of(rounding, rounding.restored(rounding.rounded(block_of(rounding, floats))))
        assert not np.any(np.isfinite(after[:, 5, 0, 7]))
        assert np.all(np.isfinite(after[:, TOKENS:]))


@pytest.mark.parametrize("tier_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("peak", [3e38, 448.0, 224.0, 1e-30])
def test_very_large_and_very_small_heads(peak: float, tier_dtype: str) -> None:
    rounding = rounding_of("plain", "float32", tier_dtype)
    floats = np.full(SHAPE, peak, np.float32)
    after = floats_of(rounding, rounding.restored(rounding.rounded(block_of(rounding, floats))))
    assert np.all(np.abs(after - peak) <= BOUNDS[tier_dtype] * peak)


@pytest.mark.parametrize("tier_dtype", ["int8", "fp8"])
def test_damage_is_seen_behind_the_widening(tier_dtype: str) -> None:
    rounding = rounding_of("panels", "bfloat16", tier_dtype)
    rounded = rounding.rounded(block_of(rounding, floats_like_kv()))
    for position in (0, rounded.content.nbytes // 2, rounded.content.nbytes - 1):
        content = bytearray(rounded.content)
        content[position] ^= 8
        restored = rounding.restored(BlockBytes(memoryview(content), rounded.crc))
        assert restored.crc != checksum([restored.content])


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a_pool_that_is_rounded_already_is_refused(dtype: str) -> None:
    with pytest.raises(ValueError, match=f"kv_tier_dtype: the pool's KV is in {dtype} already"):
        rounding_of("plain", dtype, "int8")
    with pytest.raises(ValueError, match="kv_tier_dtype: 'int4' is not one of int8, fp8"):
        rounding_of("plain", "bfloat16", "int4")


def test_blocks_of_each_rounding_have_an_identity_of_their_own() -> None:
    """That of blocks that are not rounded is what it was before tiers could round."""
    identity, layout = common_pb2.Identity(model="m"), common_pb2.KVLayout(kv_dtype="bfloat16")
    digests = {each: digest_of(identity, layout, 100, each) for each in ("pool", "int8", "fp8")}
    assert len(set(digests.values())) == 3
    assert digests["pool"] == digest_of(identity, layout, 100) == bytes.fromhex("772bd50ad3baee6a")
