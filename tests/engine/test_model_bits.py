"""A token's logits have the same bits whatever shares its step, however its prompt was cut, wherever its blocks lie.

This is about the torch backend; for the native one see tests/engine/kernels/cpu/test_model_bits.py.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine.model_kinds import KINDS
from tests.engine.paged_loop import Chunk, PagedLoop, load, make_batch
from tests.support.tiny_models import make_tiny_model

NAMES = ["llama", "llama-odd-groups", "llama-mqa", "mistral-window", "qwen2-window", "qwen3"]


@pytest.fixture(scope="module", params=NAMES)
def loop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PagedLoop:
    torch.set_num_threads(1)
    kind, overrides = KINDS[request.param]
    folder = make_tiny_model(tmp_path_factory.mktemp(request.param), kind, **overrides)
    return PagedLoop(load(folder, backend="torch"), num_blocks=2000)


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=num_tokens)


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 5, 16, 64, 127, 128, 129, 200])
def test_chunking_changes_no_bit(loop: PagedLoop, chunk_size: int) -> None:
    token_ids = prompt(290)
    assert torch.equal(loop.logits(token_ids, chunk_size), loop.logits(token_ids))


@pytest.mark.parametrize("batch_size", [2, 3, 4, 5, 7, 8, 9, 17, 33])
def test_company_changes_no_bit_of_a_decode_step(loop: PagedLoop, batch_size: int) -> None:
    lengths = [random.Random(batch_size).randint(1, 300) for _ in range(batch_size)]
    chunks = []
    for seed, length in enumerate(lengths):
        table = loop.table(length + 1)
        if length:
            loop.step([Chunk(table, prompt(length, seed), 0)])
        chunks.append(Chunk(table, [seed], length))
    together = loop.step(chunks)
    alone = torch.cat([loop.step([chunk]) for chunk in chunks])
    assert torch.equal(together, alone)


def test_a_mixed_step_changes_no_bit(loop: PagedLoop) -> None:
    """Decode rows, chunks in the middle of a prompt and whole prompts in one step."""
    tables = [loop.table(320) for _ in range(5)]
    for seed, table in enumerate(tables[:3]):
        loop.step([Chunk(table, prompt(140, seed), 0)])
    chunks = [
        Chunk(tables[0], [7], 140),
        Chunk(tables[3], prompt(33, 3), 0, every_row=True),
        Chunk(tables[1], prompt(90, 4), 140, every_row=True),
        Chunk(tables[2], [9], 140),
        Chunk(tables[4], prompt(2, 5), 0, every_row=True),
    ]
    assert torch.equal(loop.step(chunks), torch.cat([loop.step([chunk]) for chunk in chunks]))


def test_a_step_may_need_no_logits(loop: PagedLoop) -> None:
    """A chunk in the middle of a prompt: nothing is drawn, its keys and values are there for the next step."""
    token_ids, table = prompt(40), loop.table(40)
    batch = make_batch([Chunk(table, token_ids[:20], 0)], loop.block_size)
    nothing = replace(batch, logits_rows=torch.tensor([], dtype=torch.int64))
    assert loop.loaded.model.forward(nothing, loop.pool.tensor).shape == (0, loop.loaded.config.vocab_size)
    assert torch.equal(loop.step([Chunk(table, token_ids[20:], 20, every_row=True)]), loop.logits(token_ids)[20:])


def test_a_shared_prefix_changes_no_bit(loop: PagedLoop) -> None:
    """Prefix hit: the first blocks belong to another sequence's table."""
    token_ids = prompt(200)
    whole = loop.logits(token_ids)
    table = loop.table(200)
    loop.step([Chunk(table, token_ids[:96], 0)])
    shared = [*table[:6], *loop.table(104)]
    assert torch.equal(loop.step([Chunk(shared, token_ids[96:], 96, every_row=True)]), whole[96:])


def test_prefill_and_decode_agree(loop: PagedLoop) -> None:
    """A recomputed output token (after preemption or on another worker) has the bits it had when it was decoded."""
    [output] = loop.generate([prompt(50)], 20)
    recomputed = loop.logits([*prompt(50), *output])[49:-1]
    assert recomputed.argmax(-1).tolist() == output
    assert torch.equal(recomputed, loop.logits([*prompt(50), *output], 1)[49:-1])


@pytest.mark.parametrize("num_threads", [2, 4])
def test_the_number_of_threads_changes_no_bit(loop: PagedLoop, num_threads: int) -> None:
    token_ids = prompt(60)
    expected = loop.logits(token_ids)
    torch.set_num_threads(num_threads)
    try:
        assert all(torch.equal(loop.logits(token_ids, size), expected) for size in (5, 60))
    finally:
        torch.set_num_threads(1)


def test_bits_of_bfloat16(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    loop = PagedLoop(load(make_tiny_model(tmp_path, "llama", dtype="bfloat16"), backend="torch"))
    token_ids = prompt(150)
    assert all(torch.equal(loop.logits(token_ids, size), loop.logits(token_ids)) for size in (1, 7, 64))
