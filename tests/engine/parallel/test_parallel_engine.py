"""Two ranks give the tokens of one: greedy, drawn, in chunks, from the cache, after preemption, guessed ahead, handed off."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pdmesh.engine.engine import Engine
from pdmesh.engine.kv_cache.pool import KVShape
from pdmesh.engine.loader.loader import load_model
from pdmesh.engine.parallel.model import ParallelModel
from pdmesh.engine.request import EngineRequest, Pooling
from pdmesh.engine.runner.batch import StepBatch
from pdmesh.engine.speculation.draft_heads.weights import save_heads
from pdmesh.sampling_params import SamplingParams
from tests.engine.parallel.conftest import config_of, running
from tests.engine.speculation.heads.tiny_heads import make_heads
from tests.support.handed_over import hand_over
from tests.support.mock_engine import run_to_end

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="not tried elsewhere yet")
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=16, n=2, seed=11)


def prompts() -> list[tuple[int, ...]]:
    """Six; every second one begins like the one before it."""
    generator = random.Random(5)
    drawn: list[tuple[int, ...]] = []
    for length in (1, 2, 33, 47, 70, 31):
        tokens = tuple(generator.randrange(320) for _ in range(length))
        beginning = drawn[-1][: length // 2] if len(drawn) % 2 else ()
        drawn.append((*beginning, *tokens[len(beginning) :]))
    return drawn


def answers(engine: Engine, sampling: SamplingParams) -> list[tuple[int, ...]]:
    """To all prompts at once, of every choice."""
    for index, prompt in enumerate(prompts()):
        assert engine.add(EngineRequest(str(index), prompt, sampling))
    collector = run_to_end(engine)
    return [collector.answer(str(index), choice).token_ids for index in range(len(prompts())) for choice in range(sampling.n)]


@pytest.fixture(scope="module")
def one(folder: Path) -> dict[SamplingParams, list[tuple[int, ...]]]:
    """What one rank answers."""
    with running(config_of(folder, 1)) as engine:
        return {sampling: answers(engine, sampling) for sampling in (GREEDY, DRAWN)}


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[Engine]:
    with running(config_of(folder, 2)) as engine:
        yield engine


def test_logits_are_those_of_one_rank(folder: Path) -> None:
    """A prompt's chunk and a decode row in one step; of each all logits."""
    loaded = [load_model(config_of(folder, degree)) for degree in (1, 2)]
    model = loaded[0].config
    shape = KVShape(model.num_layers, 8, 16, model.num_kv_heads, model.head_dim, torch.float32)
    parallel = loaded[1].model
    assert isinstance(parallel, ParallelModel)
    pool = parallel.open_pool(shape)
    try:
        alone = torch.zeros(shape.tensor_shape)
        for batch in batches():
            expected = loaded[0].model.forward(batch, alone)
            found = parallel.forward(batch, pool.tensor)
            assert found.shape == expected.shape == (len(batch.logits_rows), model.vocab_size)
            torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)
        # All ranks' heads lie in one pool as one rank's would: that is what a hand-off reads.
        torch.testing.assert_close(pool.tensor, alone, rtol=2e-4, atol=2e-4)
    finally:
        parallel.close()
        pool.close()


@pytest.mark.parametrize(("degree", "dtype"), [(2, "float32"), (2, "bfloat16"), (4, "float32"), (4, "bfloat16")])
def test_bits_depend_on_neither_batch_nor_chunks(folder: Path, degree: int, dtype: str) -> None:
    """A prompt at once, in two chunks, and in two chunks beside another sequence."""
    loaded = load_model(replace(config_of(folder, degree), dtype=dtype))
    model, config = loaded.model, loaded.config
    assert isinstance(model, ParallelModel)
    pool = model.open_pool(KVShape(config.num_layers, 8, 16, config.num_kv_heads, config.head_dim, loaded.kv_dtype))
    try:
        [whole] = model.forward(chunk(0, 20), pool.tensor)
        model.forward(chunk(0, 7), pool.tensor)
        [behind] = model.forward(chunk(7, 20), pool.tensor)
        model.forward(chunk(0, 7), pool.tensor)
        beside = model.forward(chunk(7, 20, others=9), pool.tensor)[-1]
        assert torch.equal(whole, behind)
        assert torch.equal(whole, beside)
    finally:
        model.close()
        pool.close()


def chunk(start: int, end: int, others: int = 0) -> StepBatch:
    """Tokens of a prompt in blocks 3 and 4, behind as many of another in block 6; logits of the last one."""
    return StepBatch(
        numbers([*range(100, 100 + others), *range(7 + start, 7 + end)]),
        numbers([*range(others), *range(start, end)]),
        numbers([*range(96, 96 + others), *range(48 + start, 48 + end)]),
        [0, others, others + end - start] if others else [0, end - start],
        [others, end] if others else [end],
        [[6], [3, 4]] if others else [[3, 4]],
        numbers([others + end - start - 1]),
    )


def numbers(values: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def batches() -> list[StepBatch]:
    first = StepBatch(
        numbers(range(7, 27)), numbers(range(20)), numbers(range(48, 68)), [0, 20], [20], [[3, 4]], numbers([4, 19])
    )
    second = StepBatch(
        numbers([99, *range(50, 60)]),
        numbers([20, *range(10)]),
        numbers([68, *range(16, 26)]),
        [0, 1, 11],
        [21, 10],
        [[3, 4], [1]],
        numbers([0, 10]),
    )
    return [first, second, replace(second, logits_rows=numbers([]))]


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_together_and_again_from_the_cache(
    pair: Engine, one: dict[SamplingParams, list[tuple[int, ...]]], sampling: SamplingParams
) -> None:
    for _ in range(2):
        assert answers(pair, sampling) == one[sampling]
    assert pair.stats().num_prefix_hit_tokens > 0
    assert pair.stats().num_free_blocks == 128


@pytest.mark.parametrize(("budget", "num_blocks"), [(9, 128), (64, 8)])
def test_in_chunks_and_after_preemption(
    folder: Path, one: dict[SamplingParams, list[tuple[int, ...]]], budget: int, num_blocks: int
) -> None:
    with running(config_of(folder, 2, max_num_batched_tokens=budget, num_blocks=num_blocks)) as engine:
        assert answers(engine, GREEDY) == one[GREEDY]
        assert (engine.stats().num_preemptions > 0) == (num_blocks == 8)


def test_four_ranks(folder: Path, one: dict[SamplingParams, list[tuple[int, ...]]]) -> None:
    """Of more than two the sum's order is fixed: one at a time and together give the same."""
    with running(config_of(folder, 4)) as engine:
        assert answers(engine, GREEDY) == one[GREEDY]


def test_guessed_ahead(folder: Path, one: dict[SamplingParams, list[tuple[int, ...]]]) -> None:
    """Drafted trees: rank 0 moves what is kept of a branch, for every rank."""
    with running(config_of(folder, 2, speculation="prompt_lookup", draft_length=4)) as engine:
        assert answers(engine, GREEDY) == one[GREEDY]
        assert engine.stats().speculation is not None


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_guessed_by_heads(
    folder: Path, one: dict[SamplingParams, list[tuple[int, ...]]], sampling: SamplingParams, tmp_path: Path
) -> None:
    """They read the hidden state behind the last sum, which rank 0 has whole, and its embedding, which is not split."""
    config = config_of(folder, 2, speculation="heads", draft_length=3, draft_heads=str(tmp_path / "heads.safetensors"))
    sizes = json.loads((folder / "config.json").read_text())
    save_heads(make_heads(hidden_size=sizes["hidden_size"], vocab_size=sizes["vocab_size"]), config.draft_heads)
    with running(config) as engine:
        assert answers(engine, sampling) == one[sampling]
        speculation = engine.stats().speculation
        assert speculation is not None
        assert speculation.by_proposer["heads"].num_verified > 0


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1)])
def test_prefilled_by_one_degree_and_decoded_by_another(
    folder: Path, one: dict[SamplingParams, list[tuple[int, ...]]], prefill: int, decode: int
) -> None:
    with running(config_of(folder, prefill)) as source, running(config_of(folder, decode)) as target:
        for index, expected in enumerate(one[GREEDY]):
            request = EngineRequest(str(index), prompts()[index], GREEDY)
            assert source.add(replace(request, prefill_only=True))
            [first] = run_to_end(source).answer(str(index)).token_ids
            hand_over(source, target, request, {0: first})
            assert (first, *run_to_end(target).answer(str(index)).token_ids) == expected, f"prompt {index}"


def test_embeddings_are_those_of_one_rank(folder: Path, pair: Engine) -> None:
    """States are whole on rank 0, whose norm is the model's; a prompt of several chunks, and short ones beside it."""
    assert pair.can_pool
    with running(config_of(folder, 1)) as one:
        alone, shared = embeddings(one, prompts()), embeddings(pair, prompts())
    assert shared.keys() == alone.keys() and len(alone) == 2 * len(prompts())
    for name, found in shared.items():
        torch.testing.assert_close(found, alone[name], rtol=1e-4, atol=1e-5)
    assert answers(pair, GREEDY)


def embeddings(engine: Engine, texts: Sequence[tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Of all texts at once, pooled in every way."""
    one_token = SamplingParams(temperature=0.0, max_tokens=1)
    for number, text in enumerate(texts):
        for pooling in Pooling:
            assert engine.add(EngineRequest(f"{pooling.value}-{number}", text, one_token, pooling=pooling))
    found: dict[str, torch.Tensor] = {}
    while engine.has_work:
        result = engine.step()
        assert result is not None
        found |= {update.request_id: torch.tensor(update.pooled) for update in result.updates if update.pooled}
    return found
