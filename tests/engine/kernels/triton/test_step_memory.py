"""What steps take beside weights and pool: counted by hand, and, on a GPU, not more than is counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.kernels.triton.model import NODE_BYTES, OTHERS_BYTES, StepBounds, StepMemory, bounds_of
from pdmesh.engine.kernels.triton.split_kv import SPLITS, SplitBounds
from pdmesh.engine.loader.loader import load_model
from pdmesh.engine.models.config import ExpertsConfig
from pdmesh.engine.models.registry import model_config
from pdmesh.engine.request import EngineRequest
from pdmesh.sampling_params import SamplingParams
from tests.engine.kernels.triton.paged import DEVICE
from tests.support.mock_engine import open_engine, run_to_end
from tests.support.tiny_models import make_tiny_model

CONFIG = model_config(
    {
        "model_type": "llama",
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
    }
)
MEMORY = StepMemory(CONFIG, itemsize=2, is_expanded=False, splits=SPLITS, row_buckets=(), token_buckets=())
BOUNDS = StepBounds(num_tokens=100, num_rows=8, max_context=1024)
PARTS = 4 * 4 * (16 + 2) * 4  # heads, parts of 1024 tokens, numbers, bytes: of a query


def test_what_is_counted() -> None:
    activations = 100 * (4 * 64 + 2 * 64 + 3 * 128) * 2
    draw = 8 * 1000 * (4 + 2 + 12 + 28) + 64 * 1000 * 4  # and counts of 64 sequences
    assert MEMORY.num_bytes(BOUNDS) == OTHERS_BYTES + activations + draw + 100 * PARTS


def test_parts_are_counted_as_far_as_a_step_is_split() -> None:
    """That is what metadata allows: as many rows of heads as leave half of the chip idle, or all rows of logits."""
    of_token, wide = MEMORY.activations(1), replace(BOUNDS, num_tokens=10_000)
    parts = MEMORY.draft_bytes(wide) - 10_000 * of_token
    assert parts == SplitBounds.of(4, 8).num_tokens * PARTS == 2048 * PARTS
    more = replace(wide, num_rows=3000)
    assert MEMORY.draft_bytes(more) - 10_000 * of_token == 3000 * PARTS


def test_words_are_expanded_for_many_rows_alone() -> None:
    words = replace(MEMORY, is_expanded=True)
    assert words.num_bytes(BOUNDS) == MEMORY.num_bytes(BOUNDS)
    many, more = replace(BOUNDS, num_tokens=129), replace(BOUNDS, num_tokens=129, num_rows=129)
    assert words.num_bytes(many) - MEMORY.num_bytes(many) == 256 * 64 * 2
    assert words.num_bytes(more) - MEMORY.num_bytes(more) == 1000 * 64 * 2


def test_in_float32_few_rows_are_expanded() -> None:
    wide = replace(MEMORY, itemsize=4)
    assert replace(wide, is_expanded=True).num_bytes(BOUNDS) - wide.num_bytes(BOUNDS) == 1000 * 64 * 4
    one = replace(BOUNDS, num_tokens=1, num_rows=1)
    assert replace(wide, is_expanded=True).num_bytes(one) - wide.num_bytes(one) == 1000 * 64 * 4


@pytest.mark.parametrize(
    ("row_buckets", "token_buckets", "more"),
    [
        ((4, 128), (4, 128), 0),
        ((4, 128), (4, 128, 132), 256 * 64 * 2),  # gate and up
        ((4, 128, 256), (4,), 1000 * 64 * 2),  # the head, which is the larger
        ((4, 8), (4, 256), 256 * 64 * 2),  # whose rows of logits are multiplied outside
    ],
)
def test_graphs_that_expand_hold_a_map_of_their_own(
    row_buckets: tuple[int, ...], token_buckets: tuple[int, ...], more: int
) -> None:
    plain = replace(MEMORY, row_buckets=row_buckets, token_buckets=token_buckets)
    assert replace(plain, is_expanded=True).graphs(1024) - plain.graphs(1024) == more


def test_activations_in_fp8_are_counted_where_products_round_them() -> None:
    rounded = replace(MEMORY, is_rounded=True)
    assert rounded.activations(128) == MEMORY.activations(128)
    assert rounded.activations(200) - MEMORY.activations(200) == 200 * (128 + 4 + 128 * 2)


EXPERTS = ExpertsConfig(num_experts=8, top_k=4, intermediate_size=96, layers=(True, True), shared_intermediate_size=40)
MIXED = replace(MEMORY, config=replace(CONFIG, experts=EXPERTS, intermediate_size=0))


def test_what_experts_read_and_give_is_counted_for_each_choice() -> None:
    kept, choices = 4 * 64 + 2 * 64, 4 * (64 + 96)
    scores = 8 + 1 + 3 * 4  # logits and a gate, scores and choices and their order: 4 bytes each
    assert MIXED.activations(100) == 100 * ((kept + choices) * 2 + 4 * scores)


def test_experts_of_words_are_not_expanded() -> None:
    words, many = replace(MIXED, is_expanded=True), replace(BOUNDS, num_tokens=129)
    assert words.num_bytes(many) - MIXED.num_bytes(many) == (4 + 2 * 2) * 16 * 64 * 2  # queries, keys and values
    dense = replace(words, config=replace(words.config, intermediate_size=70, experts=replace(EXPERTS, layers=(False, True))))
    plain = replace(dense, is_expanded=False)
    assert dense.num_bytes(many) - plain.num_bytes(many) == 2 * 70 * 64 * 2


def test_graphs_of_experts_have_more_launches() -> None:
    graphs = [replace(each, row_buckets=(4,)).graphs(64) - replace(each, row_buckets=()).graphs(64) for each in (MEMORY, MIXED)]
    assert graphs[1] - graphs[0] - 4 * (MIXED.activations(1) - MEMORY.activations(1)) == 6 * 3 * NODE_BYTES


def test_graphs_of_decode_steps_keep_their_logits() -> None:
    graphs = replace(MEMORY, row_buckets=(4, 8))
    least = 12 * 1000 * 4 + 8 * 1000 * 2 + 8 * PARTS
    assert least < graphs.num_bytes(BOUNDS) - MEMORY.num_bytes(BOUNDS) < least + (2 << 20)
    assert replace(graphs, token_buckets=(4, 8, 16)).num_bytes(BOUNDS) > graphs.num_bytes(BOUNDS)


def test_guesses_have_rows_of_logits() -> None:
    config = EngineConfig(model="m", max_num_seqs=8, max_num_batched_tokens=64, max_draft_tokens=4)
    assert bounds_of(config, 99) == StepBounds(64, 8, 99)
    assert config.speculation == "auto", "which drafts nothing there by itself"
    assert bounds_of(replace(config, speculation="prompt_lookup"), 99).num_rows == 40
    assert bounds_of(replace(config, speculation="prompt_lookup", max_draft_tokens=16), 99).num_rows == 64
    assert bounds_of(replace(config, draft_length=2), 99).num_rows == 40


@pytest.mark.gpu
def test_an_engine_takes_no_more_than_was_counted(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, vocab_size=32_000, hidden_size=1024, intermediate_size=4096)
    config = EngineConfig(model=str(folder), backend="triton", device=DEVICE, dtype="bfloat16", num_blocks=64, max_context=512)
    loaded = load_model(config)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    engine = open_engine(config, loaded)
    for index in range(4):
        prompt = tuple(range(10 + index, 210 + index))
        assert engine.add(EngineRequest(str(index), prompt, SamplingParams(temperature=0.7, max_tokens=4)))
    run_to_end(engine)
    taken = free - torch.cuda.mem_get_info()[0] - engine.kv.tensor.nbytes
    assert taken <= loaded.step_bytes(config)
