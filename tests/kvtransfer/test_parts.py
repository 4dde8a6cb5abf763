"""Planning parts, and the receiver's manifest."""

from collections import Counter

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.errors import TransferRefused
from kvtransfer.manifest import MAX_PART_BYTES, TARGET_PART_BYTES, Manifest, Part, cut
from pdmesh.v1 import transfer_pb2

SIZE = 512


def rectangle(layers: range, blocks: range, target: int) -> tuple[Part, ...]:
    return tuple(cut(0, layers, blocks, SIZE, target))


@given(
    first_layer=st.integers(0, 10),
    num_layers=st.integers(1, 40),
    first_block=st.integers(0, 30),
    num_blocks=st.integers(1, 60),
    size=st.sampled_from([64, 512, 12288, 1 << 20]),
    target=st.sampled_from([1, 4096, 1 << 16, TARGET_PART_BYTES]),
)
def test_every_layer_and_block_is_in_exactly_one_part(
    first_layer: int, num_layers: int, first_block: int, num_blocks: int, size: int, target: int
) -> None:
    layers, blocks = range(first_layer, first_layer + num_layers), range(first_block, first_block + num_blocks)
    parts = list(cut(5, layers, blocks, size, target))
    cells = Counter((layer, block) for p in parts for layer in p.layers for block in range(p.block_start, p.block_end))
    assert cells == Counter((layer, block) for layer in layers for block in blocks)
    assert all(part.num_bytes(size) <= max(target, 2 * size) for part in parts)
    assert [part.layer_start for part in parts] == sorted(part.layer_start for part in parts)
    assert [part.part_id for part in parts] == list(range(5, 5 + len(parts)))


def test_parts_are_some_megabytes() -> None:
    # SmolLM2: 30 layers, 3 KV heads of 64, fp32, 2 000 tokens
    size = 16 * 3 * 64 * 4
    assert all(32 << 20 <= part.num_bytes(size) <= 64 << 20 for part in cut(0, range(30), range(125), size, TARGET_PART_BYTES))


def header(part: Part, **changes: int) -> transfer_pb2.PartHeader:
    fields = {
        "part_id": part.part_id,
        "layer_start": part.layer_start,
        "layer_end": part.layer_end,
        "block_start": part.block_start,
        "block_end": part.block_end,
        "num_bytes": part.num_bytes(SIZE),
    }
    made = transfer_pb2.PartHeader()
    for name, value in {**fields, **changes}.items():
        setattr(made, name, value)
    return made


def commit(num_parts: int, num_tokens: int = 90) -> transfer_pb2.TransferCommit:
    return transfer_pb2.TransferCommit(num_parts=num_parts, num_tokens=num_tokens)


def filled(parts: tuple[Part, ...]) -> Manifest:
    manifest = Manifest(num_layers=4, first_block=2, num_blocks=6, bytes_per_layer_block=SIZE)
    for part in parts:
        manifest.accept(manifest.check(header(part)), num_bytes=part.num_bytes(SIZE))
    return manifest


PLAN = rectangle(range(4), range(2, 6), 2 * 2 * SIZE * 3)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layer_end": 5}, "part.layer_end"),
        ({"layer_start": 1, "layer_end": 1}, "part.layer_end"),
        ({"layer_start": 3, "layer_end": 2}, "part.layer_end"),
        ({"block_end": 7}, "part.block_end"),
        ({"block_start": 1}, "part.block_end"),
        ({"block_start": 5, "block_end": 5}, "part.block_end"),
        ({"block_end": 0xFFFFFFFF}, "part.block_end"),
        ({"num_bytes": 1}, "part.num_bytes"),
        ({"num_bytes": 1 << 60}, "part.num_bytes"),
    ],
)
def test_parts_out_of_range_are_refused(changes: dict[str, int], field: str) -> None:
    manifest = filled(())
    with pytest.raises(TransferRefused) as raised:
        manifest.check(header(Part(0, 0, 2, 2, 6), **changes))
    assert raised.value.code is grpc.StatusCode.INVALID_ARGUMENT and raised.value.field == field
    assert field in raised.value.message


def test_a_part_beyond_the_bound_is_refused() -> None:
    manifest = Manifest(1, 0, 2, MAX_PART_BYTES // 2)
    with pytest.raises(TransferRefused, match="the bound is"):
        manifest.check(transfer_pb2.PartHeader(layer_end=1, block_end=2, num_bytes=2 * MAX_PART_BYTES))


@pytest.mark.parametrize(
    ("part", "field"),
    [(Part(0, 0, 1, 2, 3), "part.part_id"), (Part(9, 0, 1, 3, 5), "part.block_start"), (Part(9, 0, 4, 4, 6), "part.block_start")],
)
def test_overlapping_parts_are_refused(part: Part, field: str) -> None:
    manifest = filled((Part(0, 0, 2, 3, 5),))
    with pytest.raises(TransferRefused) as raised:
        manifest.check(header(part))
    assert raised.value.field == field


def test_a_part_may_not_overlap_one_that_is_being_written() -> None:
    manifest = filled(())
    under_way = Part(0, 0, 2, 2, 4)
    manifest.begin(under_way)
    for part in (under_way, Part(1, 1, 3, 3, 5)):
        with pytest.raises(TransferRefused, match="which is being written"):
            manifest.check(header(part))
    manifest.check(header(Part(1, 2, 4, 2, 4)))
    with pytest.raises(TransferRefused, match=r"parts \[0\] are still being written"):
        manifest.check_complete(commit(0), 90)
    manifest.end(under_way)
    manifest.check(header(Part(1, 1, 3, 3, 5)))


def test_complete() -> None:
    manifest = filled(PLAN)
    manifest.check_complete(commit(len(PLAN)), 90)
    assert manifest.num_bytes == 4 * 2 * 4 * SIZE and manifest.num_parts == len(PLAN)


@pytest.mark.parametrize("missing", range(len(PLAN)))
def test_any_missing_part_is_noticed(missing: int) -> None:
    rest = tuple(part for part in PLAN if part.part_id != missing)
    with pytest.raises(TransferRefused, match=r"manifest: layer \d, block \d was never sent"):
        filled(rest).check_complete(commit(len(rest)), 90)


def test_a_commit_for_another_number_of_tokens_is_refused() -> None:
    with pytest.raises(TransferRefused, match=r"commit\.num_tokens"):
        filled(PLAN).check_complete(commit(len(PLAN), 91), 90)


def test_a_corrupt_part_may_come_once_more() -> None:
    manifest = filled(PLAN[1:])
    manifest.reject(PLAN[0])
    manifest.check(header(PLAN[0]))
    with pytest.raises(TransferRefused) as raised:
        manifest.reject(PLAN[0])
    assert raised.value.code is grpc.StatusCode.DATA_LOSS
