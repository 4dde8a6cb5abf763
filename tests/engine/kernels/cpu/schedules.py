"""Schedules of sequences that share steps, to be compared bit by bit with each prompt alone.

What is compared with are the logits of a whole prompt, alone, on one thread: since a token sees only what comes before it, they
are those of every sequence that begins like the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.engine.kernels.cpu.native_models import prompt
from tests.engine.paged_loop import Chunk, PagedLoop

LENGTH = 300  # three chunks of keys
PROMPTS = [prompt(LENGTH, seed) for seed in range(4)]


@dataclass(frozen=True)
class Run:
    """The beginning of a prompt, in chunks, from a step on. `rows`: whose logits each chunk asks for."""

    prompt: int
    first_step: int
    sizes: list[int]
    rows: str

    def chunk(self, table: list[int], step: int) -> Chunk | None:
        index = step - self.first_step
        if not 0 <= index < len(self.sizes):
            return None
        done = sum(self.sizes[:index])
        tokens = PROMPTS[self.prompt][done : done + self.sizes[index]]
        return Chunk(table, tokens, done, every_row=self.rows == "all", wanted=self.rows != "none")


SIZES = st.sampled_from([1, 1, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 48, 49, 64, 97, 127, 128, 129, 200])


@st.composite
def runs(draw: st.DrawFn) -> Run:
    sizes = draw(st.lists(SIZES, min_size=1, max_size=5))
    fitting = [size for size, end in zip(sizes, accumulate(sizes), strict=True) if end <= LENGTH]
    return Run(draw(st.integers(0, 3)), draw(st.integers(0, 2)), fitting, draw(st.sampled_from(["all", "all", "last", "none"])))


def play(loop: PagedLoop, schedule: list[Run], alone: list[Tensor]) -> None:
    """Runs all of the schedule in company; every row must be that of the prompt alone."""
    tables = [loop.table(sum(run.sizes)) for run in schedule]
    for step in range(max(run.first_step + len(run.sizes) for run in schedule)):
        both = [(run, run.chunk(table, step)) for run, table in zip(schedule, tables, strict=True)]
        present = [(run, chunk) for run, chunk in both if chunk is not None]
        if present:
            expected = torch.cat([wanted(chunk, alone[run.prompt]) for run, chunk in present])
            assert torch.equal(loop.step([chunk for _, chunk in present]), expected), f"step {step}"
    for table in tables:
        loop.release(table)


def wanted(chunk: Chunk, logits: Tensor) -> Tensor:
    """What of a prompt's logits the chunk asks for."""
    end = chunk.num_computed + len(chunk.token_ids)
    count = len(chunk.token_ids) if chunk.every_row else int(chunk.wanted)
    return logits[end - count : end]
