"""Paged attention in Triton equals the plain way, over shapes, block sizes, ragged batches, windows and tails."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pdmesh.engine.kernels.triton.attention import paged_attention
from pdmesh.engine.kernels.triton.metadata import Capacity
from pdmesh.engine.kernels.triton.split_kv import Splits
from tests.engine.kernels.triton.paged import DEVICE, Sequences, Shape

# float32: its sums in another order. float16: weights are rounded to it before they are multiplied with values (2 ** -11 each),
# and so is the result; values are normal numbers, most below 3.
BOUNDS = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SMALL = Splits(64, 4)  # splits double behind 256 keys instead of 16384
# One token, ends of blocks and of splits, more queries than are split, a chunk with keys before it; and decode rows.
RAGGED = [(1, 1), (64, 1), (65, 2), (40, 18), (130, 3)]


def check(sequences: Sequences, window: int | None = None, splits: Splits = SMALL, **more: object) -> Tensor:
    result = paged_attention(sequences.query, sequences.kv, sequences.meta(), window=window, splits=splits, **more)  # type: ignore[arg-type]
    torch.testing.assert_close(result.float(), sequences.naive(window), atol=BOUNDS[sequences.dtype], rtol=0)
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 256])
def test_head_dims(head_dim: int, dtype: torch.dtype) -> None:
    check(Sequences(Shape(2, 1, head_dim), [(70, 1), (33, 17), (3, 2)], dtype))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (3, 1), (7, 1), (4, 2), (20, 1)])
def test_groups(num_heads: int, num_kv_heads: int) -> None:
    check(Sequences(Shape(num_heads, num_kv_heads, 16), [(70, 1), (50, 17)]))


@pytest.mark.parametrize("block_size", [5, 8, 16, 128])
def test_block_sizes(block_size: int) -> None:
    check(Sequences(Shape(2, 1, 16, block_size), RAGGED))


@pytest.mark.parametrize("window", [1, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_windows(window: int, dtype: torch.dtype) -> None:
    check(Sequences(Shape(2, 1, 16), RAGGED, dtype), window)


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("softcap", "sinks"), [(1.5, None), (0.0, (2.0, -3.0)), (0.7, (0.5, 4.0))])
def test_softcaps_and_sinks(softcap: float, sinks: tuple[float, ...] | None, dtype: torch.dtype, window: int | None) -> None:
    """Of sequences with one split and with several, split and walked."""
    sequences = Sequences(Shape(2, 1, 16), RAGGED, dtype)
    logits = None if sinks is None else torch.tensor(sinks, dtype=dtype, device=DEVICE)
    result = paged_attention(
        sequences.query, sequences.kv, sequences.meta(), window=window, softcap=softcap, sinks=logits, splits=SMALL
    )
    expected = sequences.naive(window, softcap, logits)
    torch.testing.assert_close(result.float(), expected, atol=BOUNDS[dtype], rtol=0)
    assert not torch.allclose(expected, sequences.naive(window), atol=1e-2)


def test_a_softcap_is_of_scores_whose_keys_have_a_scale() -> None:
    wide = Sequences(Shape(2, 1, 16), RAGGED)
    scales = torch.tensor([0.5, 2.0], device=DEVICE)
    stored = (wide.kv / scales.view(2, 1, 1, 1, 1)).to(torch.float8_e4m3fn)
    wide.kv = stored.float() * scales.view(2, 1, 1, 1, 1)
    found = paged_attention(wide.query, stored, wide.meta(), kv_scales=scales, softcap=1.5, splits=SMALL)
    expected = paged_attention(wide.query, wide.kv, wide.meta(), softcap=1.5, splits=SMALL)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("tail", [1, 3, 30])
def test_tails(tail: int) -> None:
    check(Sequences(Shape(2, 1, 16), RAGGED, tail=tail))


@pytest.mark.parametrize("length", [256, 513])
def test_contexts_at_which_splits_double(length: int) -> None:
    """Queries on both sides of it share a tile."""
    check(Sequences(Shape(2, 1, 16), [(length + 2, 4), (length + 9, 17)]))


def test_more_splits_than_are_merged_at_once() -> None:
    """Eight are: one more, eight more, and one behind those."""
    check(Sequences(Shape(2, 1, 16), [(129, 1), (144, 2), (256, 1), (257, 1)]), splits=Splits(16, 32))


def test_the_splits_that_serve() -> None:
    check(Sequences(Shape(2, 1, 16), [(256, 1), (257, 1), (530, 17)]), splits=Splits())


def test_a_sequence_without_queries_and_no_sequence_at_all() -> None:
    check(Sequences(Shape(head_dim=16), [(5, 0), (9, 1), (30, 0), (30, 17), (4, 0)]))
    nothing = Sequences(Shape(head_dim=16), [(5, 0)])
    assert paged_attention(nothing.query, nothing.kv, nothing.meta()).shape == (0, 4, 16)


def test_strided_queries_and_a_given_place_for_the_result() -> None:
    sequences = Sequences(Shape(head_dim=16), RAGGED)
    expected = check(sequences)
    fused = torch.randn((len(sequences.query), 9, 16), device=DEVICE)
    fused[:, 2:6] = sequences.query
    out = torch.full((len(sequences.query), 6, 16), 7.0, device=DEVICE)
    paged_attention(fused[:, 2:6], sequences.kv, sequences.meta(), splits=SMALL, out=out[:, 1:5])
    assert torch.equal(out[:, 1:5], expected)
    assert (out[:, [0, 5]] == 7).all()


@pytest.mark.parametrize(("max_query_len", "max_split_len"), [(1, 16), (40, 16), (40, 40)])
def test_padding_is_answered_with_zeros_and_changes_nothing(max_query_len: int, max_split_len: int) -> None:
    """A graph's buffer: more tokens and sequences than the step has, wider tables, a longer context. Zeros come from either
    kernel, and from one tile of several."""
    sequences = Sequences(Shape(head_dim=16), [(70, 1), (300, 1), (1, 1)])
    wide = Capacity(3 + 2 * max_query_len, 6, sequences.capacity().table_width + 2, 4, 8, max_query_len, 1000, 6, max_split_len)
    query = torch.cat((sequences.query, torch.full((2 * max_query_len, 4, 16), float("nan"), device=DEVICE)))
    result = paged_attention(query, sequences.kv, sequences.meta(wide), splits=SMALL)
    assert torch.equal(result[:3], check(sequences))
    assert (result[3:] == 0).all()


def test_padding_beside_long_chunks_alone() -> None:
    sequences = Sequences(Shape(head_dim=16), [(20, 20)])
    wide = replace(sequences.capacity(), num_tokens=23, num_seqs=2)
    query = torch.cat((sequences.query, sequences.query[:3]))
    result = paged_attention(query, sequences.kv, sequences.meta(wide), splits=SMALL)
    assert torch.equal(result[:20], check(sequences))
    assert (result[20:] == 0).all()


def test_float8_keys_and_values() -> None:
    for dtype in (torch.float32, torch.float16):
        check_float8(Sequences(Shape(2, 1, 64), RAGGED[2:], dtype), SMALL)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_float8_in_large_shapes(head_dim: int) -> None:
    lengths = [(20000, 1), (16400, 16), (3000, 300), (1, 1), (2048, 2048)]
    check_float8(Sequences(Shape(32, 8, head_dim), lengths, torch.bfloat16), Splits())


def check_float8(sequences: Sequences, splits: Splits) -> None:
    """Equal to attention over what the numbers stand for."""
    scales = torch.tensor([0.5, 0.25], device=DEVICE)
    narrow = (sequences.kv.float() / scales.view(2, 1, 1, 1, 1)).to(torch.float8_e4m3fn)
    wide = replace_kv(sequences, (narrow.float() * scales.view(2, 1, 1, 1, 1)).to(sequences.dtype))
    result = paged_attention(sequences.query, narrow, sequences.meta(), kv_scales=scales, splits=splits)
    expected = paged_attention(wide.query, wide.kv, wide.meta(), splits=splits)
    torch.testing.assert_close(result, expected, atol=BOUNDS[sequences.dtype], rtol=0)


def replace_kv(sequences: Sequences, kv: Tensor) -> Sequences:
    copy = Sequences(sequences.shape, sequences.lengths, sequences.dtype)
    copy.kv = kv
    return copy


def test_what_does_not_fit_is_refused_by_name() -> None:
    good = Sequences(Shape(head_dim=16), [(5, 1)])
    meta = good.meta()
    cases: dict[str, Callable[[], object]] = {
        "query": lambda: paged_attention(good.query.double(), good.kv, meta),
        "kv: ": lambda: paged_attention(good.query, good.kv.half(), meta),
        "kv_scales": lambda: paged_attention(good.query, good.kv, meta, kv_scales=torch.ones(2, device=DEVICE)),
        "window": lambda: paged_attention(good.query, good.kv, meta, window=0),
        "out": lambda: paged_attention(good.query, good.kv, meta, out=good.query[:, :2]),
        "heads": lambda: paged_attention(good.query[:, :3], good.kv, meta),
        "rows": lambda: paged_attention(good.query[:0], good.kv, meta),
    }
    for name, call in cases.items():
        with pytest.raises(ValueError, match=name):
            call()
    with pytest.raises(ValueError, match="num_tokens"):
        good.meta(replace(good.capacity(), num_tokens=0))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 700])
def test_large_shapes(head_dim: int, dtype: torch.dtype, window: int | None) -> None:
    lengths = [(20000, 1), (16400, 16), (3000, 300), (1, 1), (257, 1), (2048, 2048), (9000, 9)]
    result = check(Sequences(Shape(32, 8, head_dim), lengths, dtype), window, Splits())
    assert not math.isnan(result.float().sum().item())
