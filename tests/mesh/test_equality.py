"""The real model, six prompts, every way: in float32 the tokens of transformers, in the default numbers (int8) one engine's.
All prompts: `make equality`; int8: `make test-thorough`."""

from pathlib import Path

import pytest

from benchmarks.engine_runs import FLOAT32, GREEDY, SAMPLED, Draw
from pdmesh.models.registry import ensure_model
from pdmesh.text.tokenizer import Tokenizer
from tests.equality import reference
from tests.equality.prompts import encode_all
from tests.equality.ways import Task, engine_ways, mesh_ways, preempting_mesh

NUM_TOKENS = 32
# One token, English, code, German, Japanese, and one of a few hundred tokens.
CHOSEN = (0, 1, 2, 3, 7, 21)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return ensure_model("smollm2-135m-instruct", print)


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> list[list[int]]:
    everything = encode_all(Tokenizer.load(smollm2).encode)
    return [everything[number] for number in CHOSEN]


@pytest.mark.real_model
@pytest.mark.timeout(900)
async def test_every_way_gives_the_tokens_of_transformers(smollm2: Path, prompts: list[list[int]]) -> None:
    expected = reference.greedy(smollm2, prompts, NUM_TOKENS)
    task = Task(smollm2, prompts, GREEDY, NUM_TOKENS, FLOAT32)
    for outcome in engine_ways(task):
        assert outcome.tokens == expected, outcome.way
        assert outcome.evidence > 0, outcome.way
    async for outcome in mesh_ways(task):
        assert outcome.tokens == expected, outcome.way
        assert outcome.evidence > 0, outcome.way


@pytest.mark.real_model
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "draw", [pytest.param(GREEDY, marks=pytest.mark.thorough, id="greedy"), pytest.param(SAMPLED, id="with a seed")]
)
async def test_every_way_gives_the_tokens_of_one_engine(smollm2: Path, prompts: list[list[int]], draw: Draw) -> None:
    """In the default numbers: weights in int8, activations quantized token by token."""
    task = Task(smollm2, prompts, draw, NUM_TOKENS)
    outcomes = list(engine_ways(task))
    outcomes += [outcome async for outcome in mesh_ways(task)]
    outcomes.append(await preempting_mesh(task))
    for outcome in outcomes:
        assert outcome.tokens == outcomes[0].tokens, outcome.way
        assert outcome.evidence > 0, outcome.way
