"""Moves of tokens between slots, read back by the other description of how a block lies (kvtransfer/conversion.py)."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtransfer.conversion import KVFormat
from pdmesh.engine.kernels.cpu.model import kv_head_size
from pdmesh.engine.kv_cache.moves import move_slots
from pdmesh.engine.kv_cache.pool import KVPool, KVShape
from tests.engine.backends import needs_native

LAYERS, BLOCKS, HEADS, DIM = 3, 4, 2, 48
FORMS = [KVFormat("plain", dtype, 5, HEADS, DIM) for dtype in ("float32", "bfloat16", "float8_e4m3fn")]
FORMS += [KVFormat("panels", dtype, size, HEADS, DIM) for dtype, size in product(("float32", "bfloat16", "int8"), (16, 48))]


def filled(form: KVFormat) -> KVPool:
    dtype = getattr(torch, form.dtype)
    head = kv_head_size(DIM, dtype) if form.arrangement == "panels" else DIM
    pool = KVPool(KVShape(LAYERS, BLOCKS, form.block_size, HEADS, head, dtype), shared=False)
    raw = np.frombuffer(pool.memory(), np.uint8)
    raw[:] = np.random.default_rng(5).integers(0, 256, raw.size, np.uint8)
    return pool


def tokens(form: KVFormat, kv: Tensor) -> list[np.ndarray]:
    """[slots, bytes of a token and its scales] of the keys and values of all layers."""
    raw = kv.view(torch.uint8).numpy().reshape(LAYERS, 2, BLOCKS, -1)
    found = []
    for layer, is_value in product(range(LAYERS), (False, True)):
        numbers = form.unpack(raw[layer, int(is_value)], is_value=is_value)
        parts = [part for part in (numbers.values, numbers.scales) if part is not None]
        found.append(np.concatenate([part.reshape(len(part), -1).view(np.uint8) for part in parts], axis=1))
    return found


@pytest.fixture(
    params=[pytest.param(form, marks=needs_native if form.arrangement == "panels" else ()) for form in FORMS], ids=str
)
def form(request: pytest.FixtureRequest) -> KVFormat:
    found: KVFormat = request.param
    return found


def assert_moves(form: KVFormat, sources: list[int], targets: list[int]) -> None:
    pool = filled(form)
    expected = tokens(form, pool.tensor)
    for each in expected:
        each[targets] = each[sources]
    move_slots(pool.tensor, sources, targets, form.arrangement)
    for before, after in zip(expected, tokens(form, pool.tensor), strict=True):
        np.testing.assert_array_equal(after, before)
    pool.close()


@pytest.mark.parametrize("sources", [[], [7], [3, 4, 5], [1, 5, 9], [19, 0, 7], [17, 18, 19]])
def test_tokens_lie_where_they_were_sent(form: KVFormat, sources: list[int]) -> None:
    assert_moves(form, sources, [2 + i for i in range(len(sources))])
    assert_moves(form, sources, sources)


@pytest.mark.parametrize("sources", [[1, 0], [1, 2, 3, 4, 0], [0, 0, 1, 2], list(range(19, -1, -1))])
def test_sources_are_read_before_targets_are_written(form: KVFormat, sources: list[int]) -> None:
    assert_moves(form, sources, list(range(len(sources))))


def test_any_moves(form: KVFormat) -> None:
    slots = st.integers(0, BLOCKS * form.block_size - 1)

    @given(st.lists(st.tuples(slots, slots), max_size=20, unique_by=lambda move: move[1]))
    @settings(max_examples=30, deadline=None)
    def check(moves: list[tuple[int, int]]) -> None:
        assert_moves(form, [source for source, _ in moves], [target for _, target in moves])

    check()


@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [
        ([0, 1], [2], "targets: 1 for 2 sources"),
        ([0, 1], [2, 2], "targets: .* name a slot twice"),
        ([-1], [2], "sources: slots -1 to -1; the pool has 0 to "),
        ([1, 2], [3, 10_000], "targets: slots 3 to 10000; the pool has 0 to "),
    ],
)
def test_impossible_moves_are_refused(form: KVFormat, sources: list[int], targets: list[int], message: str) -> None:
    pool = filled(form)
    with pytest.raises(ValueError, match=message):
        move_slots(pool.tensor, sources, targets, form.arrangement)
    pool.close()
