"""Rows of a worker as sums: what many steps take is what one step after the other takes."""

import random

from pdmesh.simulator.workers.batch import Rows
from pdmesh.simulator.workers.kv_room import Sequence

FAR = 10_000


def test_blocks_of_many_steps_are_those_of_each() -> None:
    """From every step of a block's cycle, for fewer and more steps than a cycle has."""
    draw = random.Random(3)
    for size in (1, 4, 16):
        rows = Rows(size)
        for _ in range(60):
            rows.enter(Sequence(Deaf(), None, draw.randrange(1, 200), FAR))
            foretold = [rows.growth(num_steps) for num_steps in range(3 * size + 2)]
            counted = [0]
            for _ in foretold[1:]:
                counted.append(counted[-1] + rows.next_growth)
                rows.advance(1)
            assert foretold == counted


class Deaf:
    """Nobody here gets as far as a last token."""

    def on_prompt(self, sequence: Sequence, at_s: float) -> None:
        raise AssertionError(sequence)

    def on_end(self, sequence: Sequence, at_s: float) -> None:
        raise AssertionError(sequence)
