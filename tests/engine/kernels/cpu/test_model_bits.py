"""On the native backend a token's logits have the same bits in every company, however its prompt was cut, with any number of
threads, wherever its blocks lie and whatever the free ones hold.

For what is compared with what see schedules.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.engine.backends import needs_native
from tests.engine.kernels.cpu.native_models import SHAPES, native
from tests.engine.kernels.cpu.schedules import PROMPTS, Run, play, runs
from tests.engine.paged_loop import Chunk, PagedLoop
from tests.support.tiny_models import make_tiny_model

pytestmark = needs_native
THREADS = (1, 2, 3)
GARBAGE = (0xFF, 0x7F)  # NaN, and numbers so large that sums of them overflow
CASES = [
    ("llama-odd-groups", "float32", "float32"),
    ("groups-7", "bfloat16", "bfloat16"),
    ("hidden-72", "bfloat16", "int8"),
    ("qwen3", "int8", "bfloat16"),
    ("mistral-window", "int8", "int8"),
    ("qwen2-window", "int4", "bfloat16"),
    ("llama-bias", "int4", "int8"),
]


@dataclass(frozen=True)
class Case:
    """One model in one set of formats: a loop for each number of threads, and the logits [300, vocab] of each prompt alone."""

    loops: dict[int, PagedLoop]
    alone: list[Tensor]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    name, weights, kv_dtype = request.param
    kind, overrides = SHAPES[name]
    folder = make_tiny_model(tmp_path_factory.mktemp(name), kind, **overrides)
    loops = {num: native(folder, weights, kv_dtype=kv_dtype, num_threads=num, num_blocks=900) for num in THREADS}
    return Case(loops, [loops[1].logits(tokens) for tokens in PROMPTS])


@pytest.mark.parametrize("num_threads", THREADS)
@given(st.data())
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
def test_company_and_chunks_change_no_bit(case: Case, num_threads: int, data: st.DataObject) -> None:
    loop = case.loops[num_threads]
    count = data.draw(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 25, 32, 40]))
    loop.fill_free_blocks(data.draw(st.sampled_from(GARBAGE)))
    for _ in range(2):  # the second time in blocks that hold what the first left
        play(loop, data.draw(st.lists(runs(), min_size=count, max_size=count)), case.alone)


@pytest.mark.parametrize(
    ("size", "num_threads", "num_tokens"),
    [
        (1, 1, 240),
        (2, 2, 300),
        (3, 1, 300),
        (5, 2, 240),
        (8, 1, 240),
        (16, 2, 300),
        (64, 1, 300),
        (127, 2, 300),
        (128, 1, 300),
        (129, 2, 300),
    ],
)
def test_chunks_of_one_size(case: Case, size: int, num_threads: int, num_tokens: int) -> None:
    play(case.loops[num_threads], [Run(0, 0, [size] * (num_tokens // size), "all")], case.alone)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("batch_size", [*range(1, 10), 12, 13, 24, 33, 40])
def test_decode_steps_of_every_batch(case: Case, batch_size: int, num_threads: int) -> None:
    """All of them in the same step, with histories of none to three chunks of keys."""
    loop, lengths = case.loops[num_threads], [(37 * index + batch_size) % 299 for index in range(batch_size)]
    tables = [loop.table(length + 1) for length in lengths]
    histories = [Chunk(t, PROMPTS[i % 4][:n], 0, wanted=False) for i, (t, n) in enumerate(zip(tables, lengths, strict=True)) if n]
    if histories:
        loop.step(histories)
    chunks = [Chunk(t, [PROMPTS[i % 4][n]], n) for i, (t, n) in enumerate(zip(tables, lengths, strict=True))]
    expected = torch.stack([case.alone[i % 4][n] for i, n in enumerate(lengths)])
    assert torch.equal(loop.step(chunks), expected)
    for table in tables:
        loop.release(table)


def test_a_shared_prefix_changes_no_bit(case: Case) -> None:
    """Prefix hit: the first blocks belong to other sequences' tables, too."""
    loop, tokens = case.loops[2], PROMPTS[1]
    table = loop.table(300)
    loop.step([Chunk(table, tokens[:210], 0)])
    shared = [[*table[:blocks], *loop.table(300 - 16 * blocks)] for blocks in (2, 8, 13)]
    chunks = [Chunk(table, tokens[210:], 210, every_row=True)]
    chunks += [Chunk(t, tokens[16 * blocks :], 16 * blocks, every_row=True) for t, blocks in zip(shared, (2, 8, 13), strict=True)]
    expected = torch.cat([case.alone[1][start:] for start in (210, 32, 128, 208)])
    assert torch.equal(loop.step(chunks), expected)


def test_a_rejected_draft_leaves_no_trace(case: Case) -> None:
    """Slots behind a sequence's end hold tokens that were computed and then given up, as after speculation."""
    loop, tokens = case.loops[1], PROMPTS[2]
    table = loop.table(300)
    loop.step([Chunk(table, tokens[:100], 0)])
    for start in range(100, 130, 3):
        loop.step([Chunk(table, [tokens[start], 7, 7, 7, 7, 7, 7, 7, 7], start)])
        accepted = loop.step([Chunk(table, tokens[start : start + 3], start, every_row=True)])
        assert torch.equal(accepted, case.alone[2][start : start + 3])
