"""Which slots of a draft's pool hold a sequence's tokens."""

from __future__ import annotations

import random

import pytest
import torch

from pdmesh.engine.kv_cache.pool import KVShape
from pdmesh.engine.loader.loader import LoadedModel
from pdmesh.engine.request import EngineRequest
from pdmesh.engine.scheduler.sequence import Phase, Sequence, SequenceGroup
from pdmesh.engine.speculation.draft_models.kv import Chunk, ParallelKV, batch_of
from pdmesh.sampling_params import SamplingParams
from tests.engine.speculation.models.driver import load_tiny
from tests.support.tiny_models import make_tiny_model

BLOCK = 4
NUM_BLOCKS = 6


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny(make_tiny_model(tmp_path_factory.mktemp("draft"), num_hidden_layers=1), "torch")


@pytest.fixture
def kv(loaded: LoadedModel) -> ParallelKV:
    return ParallelKV(loaded, KVShape(1, NUM_BLOCKS, BLOCK, 1, 16, torch.float32))


def sequence_of(tokens: str, *block_ids: int, tenant: bytes = b"") -> Sequence:
    request = EngineRequest("r", tuple(tokens.encode()), SamplingParams(max_tokens=50), cache_root=tenant)
    [sequence] = SequenceGroup(request, 0, Phase.ACTIVE).sequences
    sequence.block_ids = list(block_ids)
    return sequence


def write(kv: ParallelKV, sequence: Sequence, first: int, tokens: str) -> None:
    kv.wrote(Chunk(sequence, first, tuple(tokens.encode()), 1))


def test_what_was_written_is_valid_and_no_more(kv: ParallelKV) -> None:
    sequence = sequence_of("abcdef", 3, 1)
    assert kv.num_valid(sequence) == 0
    write(kv, sequence, 0, "abc")
    assert kv.num_valid(sequence) == 3
    write(kv, sequence, 3, "def")
    assert kv.num_valid(sequence) == 6


def test_drafted_tokens_count_as_far_as_they_became_known(kv: ParallelKV) -> None:
    sequence = sequence_of("abc", 3, 1)
    write(kv, sequence, 0, "abcxyz")
    assert kv.num_valid(sequence) == 3
    sequence.output += b"xyq"
    assert kv.num_valid(sequence) == 5
    write(kv, sequence, 5, "q")
    assert kv.num_valid(sequence) == 6


def test_a_right_token_behind_a_wrong_one_is_wrong(kv: ParallelKV) -> None:
    sequence = sequence_of("abc", 0, 1)
    write(kv, sequence, 0, "axc")
    assert kv.num_valid(sequence) == 1


def test_another_sequence_with_the_same_beginning_finds_it(kv: ParallelKV) -> None:
    write(kv, sequence_of("abcdefgh", 2, 5), 0, "abcdefgh")
    assert kv.num_valid(sequence_of("abcdefxx", 2, 4)) == 4
    assert kv.num_valid(sequence_of("abcdefxx", 2, 5)) == 6
    assert kv.num_valid(sequence_of("xbcdefgh", 2, 5)) == 0
    assert kv.num_valid(sequence_of("abcdefgh", 2, 5, tenant=b"other")) == 0


def test_blocks_that_came_back_after_others_had_them(kv: ParallelKV) -> None:
    """Preempted: the same ids in the same order, but another sequence wrote the beginning of one meanwhile."""
    sequence = sequence_of("abcdefgh", 2, 5)
    write(kv, sequence, 0, "abcdefgh")
    write(kv, sequence_of("zz", 5), 0, "zz")
    assert kv.num_valid(sequence) == 4
    write(kv, sequence, 4, "ef")
    assert kv.num_valid(sequence) == 8  # the block's end is still what it was


def test_a_copied_block_is_empty_here(kv: ParallelKV) -> None:
    sequence = sequence_of("abcdef", 2, 5)
    write(kv, sequence, 0, "abcdef")
    sequence.block_ids[1] = 0
    assert kv.num_valid(sequence) == 4


def test_fewer_blocks_than_tokens(kv: ParallelKV) -> None:
    sequence = sequence_of("abcdef", 2)
    assert kv.num_valid(sequence) == 0
    write(kv, sequence, 0, "abcd")
    assert kv.num_valid(sequence) == 4
    sequence.block_ids = []
    assert kv.num_valid(sequence) == 0


def test_against_books_of_whole_histories(kv: ParallelKV) -> None:
    """Random writes by sequences that share blocks: valid is what a slot-by-slot record of complete histories says."""
    chance = random.Random(3)
    histories: dict[tuple[int, int], str] = {}
    for _ in range(3000):
        tokens = "".join(chance.choices("ab", k=chance.randint(1, 3 * BLOCK)))
        sequence = sequence_of(tokens, *chance.sample(range(NUM_BLOCKS), 3))
        expected = 0
        while expected < len(tokens) and histories.get(_place(sequence, expected)) == tokens[: expected + 1]:
            expected += 1
        assert kv.num_valid(sequence) == expected
        end = chance.randint(expected, len(tokens))
        if end > expected:
            write(kv, sequence, expected, tokens[expected:end])
            histories |= {_place(sequence, p): tokens[: p + 1] for p in range(expected, end)}


def _place(sequence: Sequence, position: int) -> tuple[int, int]:
    return sequence.block_ids[position // BLOCK], position % BLOCK


def test_the_batch_of_chunks() -> None:
    chunks = [
        Chunk(sequence_of("abcdefg", 3, 1), 2, (12, 13, 14), 2),
        Chunk(sequence_of("x", 5), 0, (7,), 1),
        Chunk(sequence_of("abcdefghi", 2, 4, 0), 4, (1, 2), 0),
    ]
    batch = batch_of(chunks, BLOCK)
    assert batch.token_ids.tolist() == [12, 13, 14, 7, 1, 2]
    assert batch.positions.tolist() == [2, 3, 4, 0, 4, 5]
    assert batch.slot_mapping.tolist() == [14, 15, 4, 20, 16, 17]
    assert batch.query_starts == [0, 3, 4, 6]
    assert batch.context_lens == [5, 1, 6]
    assert batch.block_tables == [[3, 1], [5], [2, 4]]
    assert batch.logits_rows.tolist() == [1, 2, 3]
