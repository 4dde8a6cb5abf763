"""What is told of a step's work."""

from __future__ import annotations

import pytest

from pdmesh.engine.outputs import StepWork
from pdmesh.engine.scheduler.scheduler import ScheduledSequence
from pdmesh.engine.scheduler.sequence import Sequence
from pdmesh.engine.scheduler.stats import work_of
from pdmesh.engine.speculation.draft import NOTHING, Draft
from tests.engine.speculation.copying import decoding

CHAIN = Draft.chain([1, 2, 3], [1.0] * 3, "test")
TREE = Draft((1, 2, 3), (-1, 0, -1), (1.0,) * 3, "test")


def sequence(num_output: int, num_missing: int) -> Sequence:
    """Ten tokens of prompt, and so many of output; the last ones are not computed."""
    made = decoding(range(10), range(num_output))
    made.num_computed = made.num_tokens - num_missing
    made.num_to_restore = 10
    return made


@pytest.mark.parametrize(
    ("num_output", "num_missing", "draft", "work"),
    [
        (0, 10, NOTHING, StepWork(10, 55, 0, 0)),
        (4, 1, NOTHING, StepWork(0, 0, 1, 14)),
        (4, 1, CHAIN, StepWork(0, 0, 4, 14)),
        (4, 3, NOTHING, StepWork(3, 12 + 13 + 14, 0, 0)),
        (4, 3, CHAIN, StepWork(6, 12 + 13 + 14 + 15 + 16 + 17, 0, 0)),
        (4, 3, TREE, StepWork(6, 12 + 13 + 14 + 15 + 16 + 15, 0, 0)),
    ],
    ids=["prompt", "decoding", "guessed", "forced", "guessed behind forced", "a tree behind forced"],
)
def test_each_token_that_is_computed_is_work(num_output: int, num_missing: int, draft: Draft, work: StepWork) -> None:
    assert work_of([ScheduledSequence(sequence(num_output, num_missing), num_missing, draft=draft)]) == work
