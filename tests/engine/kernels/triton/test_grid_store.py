"""What moves keys, values and a step's numbers equals plain writes over a grid of shapes, and touches nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pdmesh.engine.kernels.triton.blocks import TritonBlocks
from pdmesh.engine.kernels.triton.cuda_graphs import DecodeBuffers
from pdmesh.engine.kernels.triton.kv import rope_and_store, store_kv
from pdmesh.engine.kv_cache.block_moves import Move
from pdmesh.engine.models.layers import rms_norm, rotate
from pdmesh.engine.runner.batch import StepBatch
from tests.engine.kernels.triton.grid import name_of, pairwise
from tests.engine.kernels.triton.paged import DEVICE
from tests.engine.kernels.triton.test_blocks import ids, plain, random_pool, raw
from tests.engine.kernels.triton.test_kv_store import indices, random, table

HEADS = {
    "head_dim": [64, 96, 128, 256, 8],
    "kv_heads": [1, 2, 3],
    "group": [1, 2, 4, 7, 8],
    "block_size": [16, 8, 32, 64, 5],
    "num_tokens": [1, 0, 5, 21],
}
STORES = pairwise(
    **HEADS, pool=["bfloat16", "float32", "float8 bfloat16", "float8 float16"], norm=[0.0, 1e-6, 0.5], rotary=["all", "half"]
)
SCALES = (0.25, 2.0)


@pytest.mark.parametrize("row", STORES, ids=name_of)
def test_norm_rotation_and_store(row: dict[str, Any]) -> None:
    """`norm`: its epsilon; 0: there is none."""
    dim, kv_heads, eps, dtype = row["head_dim"], row["kv_heads"], row["norm"], getattr(torch, row["pool"].split()[-1])
    heads, num_tokens = row["group"] * kv_heads, row["num_tokens"]
    wide = random(num_tokens, (heads + 2 * kv_heads) * dim + 6, dtype=dtype)
    qkv = wide[:, 3:-3]  # a view, as of a wider product
    norm = random(heads + kv_heads, dim, dtype=dtype, seed=1) if eps else None
    rotary = table(dim, dtype, dim if row["rotary"] == "all" else dim // 2)
    positions = [(7 * token + 3) % 100 for token in range(num_tokens)]
    slots = _slots(num_tokens, row["block_size"])
    kv, scales = _pool(row, num_tokens)
    query = rope_and_store(
        qkv, kv, rotary, indices(positions), indices(slots), num_heads=heads, norm=norm, eps=eps, kv_scales=scales
    )
    split = qkv.reshape(num_tokens, heads + 2 * kv_heads, dim)
    rotated = split[:, : heads + kv_heads]
    rotated = rotated if norm is None else rms_norm(rotated, norm, eps)
    rotated = rotate(rotated, *rotary.at(torch.tensor(positions, dtype=torch.int64, device=DEVICE)))
    atol = 0.0 if norm is None else {torch.float32: 4e-6, torch.float16: 8e-3, torch.bfloat16: 6.4e-2}[dtype]
    torch.testing.assert_close(query, rotated[:, :heads], atol=atol, rtol=0)
    _assert_stored(kv, scales, slots, rotated[:, heads:], split[:, heads + kv_heads :], atol)


@pytest.mark.parametrize(
    "row", pairwise(**{**HEADS, "group": [1, 2]}, pool=["bfloat16", "float32", "float8 bfloat16"]), ids=name_of
)
def test_store(row: dict[str, Any]) -> None:
    dtype, kv_heads, num_tokens = getattr(torch, row["pool"].split()[-1]), row["kv_heads"], row["num_tokens"]
    heads = random(num_tokens, (row["group"] + 2) * kv_heads, row["head_dim"], dtype=dtype)
    key, value = heads[:, :kv_heads], heads[:, -kv_heads:]
    slots, (kv, scales) = _slots(num_tokens, row["block_size"]), _pool(row, num_tokens)
    store_kv(key, value, kv, indices(slots), kv_scales=scales)
    _assert_stored(kv, scales, slots, key, value, 0.0)


def _slots(num_tokens: int, block_size: int) -> list[int]:
    """In no order, the pool's last among them; every fourth token goes nowhere."""
    last = (num_tokens // block_size + 2) * block_size - 1
    return [-1 if token % 4 == 3 else (last - 3 * token) % (last + 1) for token in range(num_tokens)]


def _pool(row: dict[str, Any], num_tokens: int) -> tuple[Tensor, Tensor | None]:
    """The middle layer of three, so that what is written outside of it shows in its neighbours' padding; full of nines."""
    narrow = row["pool"].startswith("float8")
    dtype = torch.float8_e4m3fn if narrow else getattr(torch, row["pool"])
    shape = (3, 2, num_tokens // row["block_size"] + 2, row["block_size"], row["kv_heads"], row["head_dim"])
    scales = torch.tensor(SCALES, device=DEVICE) if narrow else None
    return torch.full(shape, 9.0, device=DEVICE).to(dtype)[1], scales


def _assert_stored(kv: Tensor, scales: Tensor | None, slots: list[int], key: Tensor, value: Tensor, atol: float) -> None:
    expected = torch.full(kv.shape, 9.0, device=DEVICE)
    for plane, given in enumerate((key, value)):
        what = given.float() if scales is None else (given.float() / SCALES[plane]).to(torch.float8_e4m3fn).float()
        for token, slot in enumerate(slots):
            if slot >= 0:
                expected[plane].flatten(0, 1)[slot] = what[token]
    # Where a norm's sum rounds otherwise, so may a float8: by one of its steps, an eighth.
    torch.testing.assert_close(kv.float(), expected, atol=atol, rtol=0.125 if scales is not None and atol else 0)
    base = kv._base if kv._base is not None else kv
    assert (base[[0, 2]].float() == 9).all()


MOVES = pairwise(
    block_size=[16, 8, 32, 64, 5],
    head_dim=[64, 96, 128, 256, 3],
    heads=[range(3), range(1, 3), range(2, 3), range(1)],
    dtype=[torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn],
    first=["0", "1", "last of a block", "in the second block"],
    num_tokens=["one", "to the end of a block", "one more", "two blocks"],
)


@pytest.mark.parametrize("row", MOVES, ids=name_of)
def test_blocks_both_ways(row: dict[str, Any]) -> None:
    size, heads, dtype = row["block_size"], row["heads"], row["dtype"]
    first = {"0": 0, "1": 1, "last of a block": size - 1, "in the second block": size + 2}[row["first"]]
    left = size - first % size
    num_tokens = {"one": 1, "to the end of a block": left, "one more": left + 1, "two blocks": 2 * size}[row["num_tokens"]]
    source, target = (random_pool(dtype, block_size=size, heads=3, dim=row["head_dim"], seed=seed) for seed in (0, 1))
    layers, block_ids, others = range(1, 3), [7, 2, 8, 0], [6, 0, 3, 5]
    expected = plain(source, block_ids, first, num_tokens, heads)
    # One number more on either side, which is nobody's.
    room = torch.full((raw(expected).numel() + 16,), 77, dtype=torch.int8, device=DEVICE)
    piece = room[8:-8].view(dtype).view(expected.shape)
    TritonBlocks().gather(Move(source, layers, ids(*block_ids), piece, first, heads))
    assert torch.equal(raw(piece), raw(expected))
    assert (room[:8] == 77).all() and (room[-8:] == 77).all()
    written = target.clone()
    TritonBlocks().scatter(Move(written, layers, ids(*others), piece, first, heads))
    for index in range(num_tokens):
        block, slot = others[(first + index) // size], (first + index) % size
        target[1:3, :, block, slot, heads.start : heads.stop] = expected[:, :, index]
    assert torch.equal(raw(written), raw(target))


@pytest.mark.parametrize(("num_rows", "num_seqs"), [(4, 1), (4, 4), (36, 4), (130, 1), (130, 130)])
def test_a_decode_step_is_unpacked(num_rows: int, num_seqs: int) -> None:
    """Two steps: whole tables; then a block more for some, and tokens that rows drew in the step before."""
    buffers = DecodeBuffers(num_rows, 64, 8, torch.device(DEVICE))
    buffers.drawn.copy_(torch.arange(1000, 1000 + num_rows))
    for grown in (0, 1):
        contexts = [8 * (seq % 7 + 1) + grown for seq in range(num_seqs)]
        tables = [[100 * seq + block + 1 for block in range(-(-context // 8))] for seq, context in enumerate(contexts)]
        tokens = [50 + seq if not grown or seq % 2 else -1 - seq for seq in range(num_seqs)]
        batch = StepBatch(
            token_ids=torch.tensor(tokens),
            positions=torch.tensor([context - 1 for context in contexts]),
            slot_mapping=torch.tensor([tables[seq][-1] * 8 + (context - 1) % 8 for seq, context in enumerate(contexts)]),
            query_starts=list(range(num_seqs + 1)),
            context_lens=contexts,
            block_tables=tables,
            logits_rows=torch.arange(num_seqs),
        )
        rows = buffers.send(batch, num_rows)
        buffers.unpack(num_rows)
        _assert_unpacked(buffers, batch, rows, num_rows)


def _assert_unpacked(buffers: DecodeBuffers, batch: StepBatch, rows: list[int], num_rows: int) -> None:
    meta, others = buffers.metadata(num_rows), sorted(set(range(num_rows)) - set(rows))
    expected = [token if token >= 0 else 1000 + (-1 - token) for token in batch.token_ids.tolist()]
    assert meta.token_ids[rows].tolist() == expected
    assert meta.positions[rows].tolist() == batch.positions.tolist()
    assert meta.slots[rows].tolist() == batch.slot_mapping.tolist()
    assert meta.context_lens[rows].tolist() == batch.context_lens
    assert meta.logits_rows[: len(rows)].tolist() == rows
    for row, table_of_row in zip(rows, batch.block_tables, strict=True):
        assert meta.block_tables[row, : len(table_of_row)].tolist() == table_of_row
    assert (meta.slots[others] == -1).all()
    assert not meta.context_lens[others].any() and not meta.token_ids[others].any() and not meta.block_tables[others].any()
    assert meta.query_starts.tolist() == list(range(num_rows + 1))
