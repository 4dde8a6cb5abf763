"""A query's result has the same bits alone and in a batch, wherever its blocks lie, and however tokens were cut into steps."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdmesh.engine.kernels.triton.attention import paged_attention
from pdmesh.engine.kernels.triton.attention_kernels import split_len_of
from pdmesh.engine.kernels.triton.split_kv import SPLITS, SplitBounds, Splits
from tests.engine.kernels.triton.paged import DEVICE, FEW, Sequences, Shape

SMALL = Splits(64, 4)
SHAPE = Shape(2, 1, 16)
LENGTHS = [(258, 4), (1, 1), (70, 17), (64, 1)]


def attend(
    sequences: Sequences,
    window: int | None = None,
    splits: Splits = SMALL,
    invariant: bool = False,
    bounds: SplitBounds = FEW,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    meta, more = sequences.meta(sequences.capacity(bounds)), {"window": window, "splits": splits, "invariant": invariant}
    return paged_attention(sequences.query, sequences.kv, meta, softcap=softcap, sinks=sinks, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, None), (torch.float16, 70)], ids=str)
def test_alone_as_in_a_batch_and_elsewhere(dtype: torch.dtype, window: int | None) -> None:
    together = attend(Sequences(SHAPE, LENGTHS, dtype), window)
    again = attend(Sequences(SHAPE, LENGTHS, dtype, layout=1, tail=5), window)
    alone = [attend(Sequences(SHAPE, [each], dtype, seeds=[seed]), window) for seed, each in enumerate(LENGTHS)]
    assert torch.equal(together, again)
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, None), (torch.float16, 70), (torch.bfloat16, None)], ids=str)
def test_prefill_verification_and_decode_agree(dtype: torch.dtype, window: int | None) -> None:
    """Positions on both sides of 256, where splits double."""
    num_queries = 2 * FEW.max_queries
    walked = attend(Sequences(SHAPE, [(270, num_queries)], dtype, seeds=[0]), window)
    verified = attend(Sequences(SHAPE, [(270, FEW.max_queries)], dtype, seeds=[0]), window)
    assert torch.equal(walked[-FEW.max_queries :], verified)
    whole = Sequences(SHAPE, [(270, num_queries)], dtype, seeds=[0])
    for back in (1, 13, 15, 30):
        assert torch.equal(decode_one(whole, 270 - back, window)[0], walked[-back])


@pytest.mark.parametrize("window", [None, 70])
def test_walking_and_splitting_agree_with_a_softcap_and_sinks(window: int | None) -> None:
    sequences = Sequences(SHAPE, [(270, 40), (70, 3), (30, 1)])
    given = {"softcap": 2.0, "sinks": torch.tensor([1.0, -2.0], device=DEVICE)}
    walked = attend(sequences, window, bounds=SplitBounds(1, 1), **given)  # type: ignore[arg-type]
    assert torch.equal(walked, attend(sequences, window, bounds=SplitBounds(65, 200), **given))  # type: ignore[arg-type]
    assert not torch.allclose(walked, attend(sequences, window), atol=1e-2)


@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, None), (torch.bfloat16, 70)], ids=str)
def test_chunks_and_long_drafts_are_split_to_the_bits_of_walking(dtype: torch.dtype, window: int | None) -> None:
    """Tiles of several sequences, beside decode and a sequence that computes nothing; a draft of 64 tokens is one."""
    sequences = Sequences(SHAPE, [(270, 65), (70, 1), (9, 0), (40, 40), (300, 33)], dtype)
    walked = attend(sequences, window, bounds=SplitBounds(1, 1))
    assert torch.equal(walked, attend(sequences, window, bounds=SplitBounds(65, 200)))
    assert torch.equal(walked, attend(sequences, window, bounds=SplitBounds(65, 100)))


def decode_one(whole: Sequences, position: int, window: int | None) -> Tensor:
    """The query at a position by itself, over the pool as it was then."""
    context, queries = whole.lengths[0]
    step = Sequences(whole.shape, [(position + 1, 1)], whole.dtype, seeds=[0])
    step.query = whole.query[position - context + queries :][:1]
    step.kv, step.batch.block_tables[0][:] = whole.kv, whole.batch.block_tables[0][: len(step.batch.block_tables[0])]
    return attend(step, window)


def test_the_switch_for_one_shape_of_tiles_changes_no_bit_here() -> None:
    for dtype in (torch.float32, torch.float16):
        sequences = Sequences(SHAPE, [(270, 20), (90, 3)], dtype)
        assert torch.equal(attend(sequences), attend(sequences, invariant=True))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_matrix_units_agree_whatever_the_rows(head_dim: int, dtype: torch.dtype) -> None:
    shape = Shape(32, 8, head_dim)
    walked = Sequences(shape, [(17000, 900)], dtype, seeds=[0])
    verified = Sequences(shape, [(17000, 8)], dtype, seeds=[0])
    assert torch.equal(attend(walked, splits=SPLITS)[-8:], attend(verified, splits=SPLITS))
    assert torch.equal(attend(walked, splits=SPLITS), attend(walked, splits=SPLITS, invariant=True))


@given(st.integers(1, 2**28), st.sampled_from([SPLITS, SMALL, Splits(16, 8)]))
@settings(max_examples=300, deadline=None)
def test_splits_cover_a_context_with_neither_too_many_nor_too_few(context: int, splits: Splits) -> None:
    length, count = splits.split_len(context), splits.num_splits(context)
    if context > splits.min_keys * splits.most << 14:
        return  # beyond what doubles: a context of 2 ** 20 keys with the smallest of these
    assert length % splits.min_keys == 0
    assert (count - 1) * length < context <= count * length
    assert count <= splits.bound(context) <= splits.most
    assert length == splits.min_keys or count > splits.most // 2
    assert splits.split_len(max(context - 1, 1)) in (length, length // 2)


@triton.jit
def lengths_of(
    contexts: tl.tensor, out: tl.tensor, COUNT: tl.constexpr, MIN_KEYS: tl.constexpr, MOST: tl.constexpr
) -> None:  # fmt: skip
    at = tl.arange(0, COUNT)
    tl.store(out + at, split_len_of(tl.load(contexts + at), MIN_KEYS, MOST))


def test_kernels_split_as_the_host_does() -> None:
    """Every context around a doubling, in the kernels' own arithmetic."""
    for splits in (SPLITS, SMALL):
        doublings = [splits.min_keys * splits.most << power for power in range(12)]
        contexts = [1, 2, splits.min_keys, 1000, *(c + d for c in doublings for d in (-1, 0, 1, 2, 100))]
        contexts = [*contexts, *([1] * (64 - len(contexts)))]
        out = torch.zeros(64, dtype=torch.int32, device=DEVICE)
        lengths_of[(1,)](torch.tensor(contexts, dtype=torch.int32, device=DEVICE), out, 64, splits.min_keys, splits.most)
        assert out.tolist() == [splits.split_len(context) for context in contexts]


@pytest.mark.parametrize(("name", "values"), [("min_keys", (48, 4)), ("most", (64, 0))])
def test_splits_that_are_not_powers_of_two_are_refused(name: str, values: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=name):
        Splits(*values)
