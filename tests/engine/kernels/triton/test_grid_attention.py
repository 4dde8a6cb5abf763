"""Attention equals the plain way wherever two of its properties meet: heads, groups, widths, blocks, windows, steps, tails."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from pdmesh.engine.kernels.triton.attention import paged_attention
from pdmesh.engine.kernels.triton.split_kv import SPLIT_BOUNDS, Splits
from tests.engine.kernels.triton.grid import name_of, pairwise
from tests.engine.kernels.triton.paged import DEVICE, FEW, Sequences, Shape, naive_attention
from tests.engine.kernels.triton.test_attention import BOUNDS

# (context, queries): one token; ends of splits, and of blocks; a chunk with keys before it; a sequence that computes nothing now.
STEPS = {
    "decode": [(1, 1), (64, 1), (129, 1)],
    "verify": [(2, 2), (66, 3)],
    "prefill": [(17, 17), (66, 18)],
    "mixed": [(33, 1), (7, 0), (40, 20)],
}
SCALES = (0.5, 0.25)
ROWS = pairwise(
    head_dim=[64, 96, 128, 256, 8],
    group=[1, 2, 4, 7, 8],
    block_size=[16, 8, 32, 64, 5],
    window=[None, 1, 31, 64, 1000],
    step=list(STEPS),
    kv_heads=[2, 1],
    pool=["bfloat16", "float32", "float8 bfloat16", "float8 float32", "float16"],
    tail=[0, 1, 5],
    splits=[Splits(32, 2), Splits(16, 4), Splits()],
    padding=[0, 2],
    bounds=[FEW, SPLIT_BOUNDS],
)


@dataclass
class Case:
    """One row of the grid."""

    sequences: Sequences
    expected: Tensor  # [T, heads, head_dim] float32
    scales: Tensor | None

    @classmethod
    def of(cls, shape: Shape, step: str, pool: str, tail: int, window: int | None) -> Case:
        dtype = getattr(torch, pool.split()[-1])
        sequences = Sequences(shape, STEPS[step], dtype, tail=tail)
        if not pool.startswith("float8"):
            return cls(sequences, sequences.naive(window), None)
        scales = torch.tensor(SCALES, device=DEVICE)
        by_scale = scales.view(2, 1, 1, 1, 1)
        sequences.kv = (sequences.kv.float() / by_scale).to(torch.float8_e4m3fn)
        data = [(query, _rounded(key, SCALES[0]), _rounded(value, SCALES[1])) for query, key, value in sequences.data]
        return cls(sequences, torch.cat([naive_attention(*each, window) for each in data]).to(DEVICE), scales)


def _rounded(x: Tensor, scale: float) -> Tensor:
    """What a pool in float8 holds of it."""
    return (x.float() / scale).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_attention(row: dict[str, object]) -> None:
    shape = Shape(row["group"] * row["kv_heads"], row["kv_heads"], row["head_dim"], row["block_size"])  # type: ignore[operator, arg-type]
    case = Case.of(shape, row["step"], row["pool"], row["tail"], row["window"])  # type: ignore[arg-type]
    sequences, padding = case.sequences, int(row["padding"])  # type: ignore[call-overload]
    exact = sequences.capacity(row["bounds"])  # type: ignore[arg-type]
    # Rows of no sequence, one a padding sequence: what is theirs is NaN, and must come to nothing.
    wide = replace(exact, num_tokens=exact.num_tokens + padding, num_seqs=exact.num_seqs + padding)
    query = torch.cat(
        (sequences.query, torch.full((padding, *sequences.query.shape[1:]), float("nan"), device=DEVICE).to(sequences.dtype))
    )
    result = paged_attention(
        query,
        sequences.kv,
        sequences.meta(wide),
        window=row["window"],  # type: ignore[arg-type]
        kv_scales=case.scales,
        splits=row["splits"],  # type: ignore[arg-type]
        out=torch.full_like(query, 7.0),
    )
    torch.testing.assert_close(result[: exact.num_tokens].float(), case.expected, atol=BOUNDS[sequences.dtype], rtol=0)
    assert (result[exact.num_tokens :] == 0).all()
