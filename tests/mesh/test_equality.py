"""The real model, six prompts, every way: the tokens of transformers. All prompts: `make equality`."""

from pathlib import Path

import pytest

from benchmarks import reference
from benchmarks.engine_runs import GREEDY, SAMPLED
from benchmarks.equality_ways import engine_ways, mesh_ways
from benchmarks.prompts import encode_all
from pdmesh.models import ensure_model
from text.tokenizer import Tokenizer

NUM_TOKENS = 64
# One token, English, code, German, Japanese, and one of a few hundred tokens.
CHOSEN = (0, 1, 2, 3, 7, 21)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return ensure_model("smollm2-135m-instruct", print)


@pytest.mark.real_model
@pytest.mark.timeout(900)
async def test_every_way_gives_the_tokens_of_transformers(smollm2: Path) -> None:
    everything = encode_all(Tokenizer.load(smollm2).encode)
    prompts = [everything[number] for number in CHOSEN]
    expected = reference.greedy(smollm2, prompts, NUM_TOKENS)
    for outcome in engine_ways(smollm2, prompts, GREEDY, NUM_TOKENS):
        assert outcome.tokens == expected, outcome.way
        assert outcome.evidence > 0, outcome.way
    async for outcome in mesh_ways(smollm2, prompts, GREEDY, NUM_TOKENS):
        assert outcome.tokens == expected, outcome.way
        assert outcome.evidence > 0, outcome.way


@pytest.mark.real_model
@pytest.mark.timeout(900)
async def test_a_seed_gives_the_same_tokens_every_way(smollm2: Path) -> None:
    everything = encode_all(Tokenizer.load(smollm2).encode)
    prompts = [everything[number] for number in CHOSEN]
    outcomes = list(engine_ways(smollm2, prompts, SAMPLED, NUM_TOKENS))
    outcomes += [outcome async for outcome in mesh_ways(smollm2, prompts, SAMPLED, NUM_TOKENS)]
    for outcome in outcomes:
        assert outcome.tokens == outcomes[0].tokens, outcome.way
        assert outcome.evidence > 0, outcome.way
