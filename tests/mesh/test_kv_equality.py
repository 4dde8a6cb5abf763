"""The tiny model, every way through a mesh that restores and fetches KV whatever it costs: one engine's tokens. SmolLM2, all
prompts: `make equality`."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

import pytest

from benchmarks.engine_runs import GREEDY, SAMPLED, Draw, run_alone
from tests.equality.kv_ways import first_ways, forced_ways
from tests.equality.ways import Outcome, Task
from tests.mesh import oracle


class Ways(Protocol):
    def __call__(self, task: Task, folder: Path, *, kills: bool = True) -> AsyncIterator[Outcome]: ...


NUM_TOKENS = 24
LENGTHS = (1, 15, 16, 33, 100, 150, 130, 140, 90, 160, 64, 170, 120, 110, 100, 140)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ways", [first_ways, forced_ways])
@pytest.mark.parametrize("draw", [GREEDY, SAMPLED], ids=["greedy", "with a seed"])
async def test_kv_that_is_restored_and_fetched_gives_the_tokens_of_one_engine(
    tiny: Path, tmp_path: Path, draw: Draw, ways: Ways
) -> None:
    prompts = [oracle.prompt_of(number, length) for number, length in enumerate(LENGTHS)]
    task = Task(tiny, prompts, draw, NUM_TOKENS)
    expected = run_alone(task.engine(), prompts, draw.params(NUM_TOKENS))
    async for outcome in ways(task, tmp_path, kills=False):
        assert outcome.tokens == expected, outcome.way
        assert outcome.evidence > 0, outcome.way
