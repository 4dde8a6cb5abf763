"""A worker whose steps hold one prompt each is an M/D/1 queue, and waits are as its formula says."""

import random
from dataclasses import replace

import pytest

from pdmesh.planning.latency_model import Work
from pdmesh.simulator.events import EventQueue
from pdmesh.simulator.workers.kv_room import Sequence
from pdmesh.simulator.workers.worker import ModelledWorker
from tests.simulator.specs import SMALL

NUM_PROMPTS = 30_000


class Clock:
    """Sums how long prompts took."""

    def __init__(self) -> None:
        self.num, self.total_s = 0, 0.0

    def on_prompt(self, sequence: Sequence, at_s: float) -> None:
        assert isinstance(sequence.tag, float)
        self.num += 1
        self.total_s += at_s - sequence.tag

    def on_end(self, sequence: Sequence, at_s: float) -> None:
        """One token each: none decodes."""


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_mean_wait(load: float) -> None:
    """Pollaczek and Khinchine: load · service / (2 · (1 - load)) for services that all take as long."""
    num_tokens = SMALL.max_num_batched_tokens  # a step holds one
    service_s = SMALL.speed.step_s(Work(num_tokens, num_tokens * (num_tokens + 1) // 2))
    events, clock, rng = EventQueue(), Clock(), random.Random(7)
    worker = ModelledWorker("w", replace(SMALL, max_num_seqs=95, num_blocks=2000), events)

    def come(left: int) -> None:
        sequence = Sequence(clock, events.now, num_tokens, 1)
        worker.call(lambda _: enter(sequence))
        if left:
            events.after(rng.expovariate(load / service_s), come, left - 1)

    def enter(sequence: Sequence) -> None:
        assert worker.reserve(sequence), "there are seats for a longer queue than ever comes"
        worker.run_local(sequence)

    come(NUM_PROMPTS - 1)
    events.run()
    expected_s = load * service_s / (2 * (1 - load))
    assert clock.num == NUM_PROMPTS
    assert clock.total_s / clock.num - service_s == pytest.approx(expected_s, rel=0.06)
