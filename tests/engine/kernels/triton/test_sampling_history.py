"""What sequences have had is counted on the device, and is what the lists say whatever happens to the sequences."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch

from pdmesh.engine.kernels.triton.sampling.batch import IN_PROMPT, HistoryCounts
from pdmesh.engine.kernels.triton.sampling.sampler import DeviceSampler
from pdmesh.engine.sampling.sampler import Sampler, SampleRow
from pdmesh.sampling_params import SamplingParams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB, CHUNK = 50, 32
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.2, "frequency_penalty": 1.5, "presence_penalty": 0.5}


class Owner:
    """A sequence: compared by identity."""

    def __init__(self, prompt: tuple[int, ...] = (1, 2, 2), output: list[int] | None = None, **params: Any) -> None:
        self.prompt, self.output = prompt, [] if output is None else output
        self.params = SamplingParams(**{"temperature": 0.8, "seed": 5, "max_tokens": 99, **PENALTIES, **params})

    def row(self, guessed: tuple[int, ...] = (), choice: int = 0) -> SampleRow:
        output = [*self.output, *guessed] if guessed else self.output
        place = (self.params, choice, len(output), self.prompt, output, frozenset[int]())
        return SampleRow(*place, num_guessed=len(guessed), owner=self)


def logits_of(num_rows: int, seed: int) -> torch.Tensor:
    return torch.randn((num_rows, VOCAB), generator=torch.Generator().manual_seed(seed))


def stepped(sampler: DeviceSampler, rows: list[SampleRow], seed: int) -> list[int]:
    """The tokens of a step, which are the reference's."""
    logits = logits_of(len(rows), seed)
    expected = [token.token_id for token in Sampler().sample(logits, rows)]
    assert [token.token_id for token in sampler.sample(logits.to(DEVICE), rows)] == expected
    return expected


def history_of(sampler: DeviceSampler) -> HistoryCounts:
    assert sampler._maker is not None
    return sampler._maker.history


def counts_of(sampler: DeviceSampler, owner: Owner) -> list[int]:
    """Of a sequence that was drawn for. What stands in rows that are nobody's is not defined."""
    history = history_of(sampler)
    [place], _ = history.place([owner.row()])
    assert history.counts is not None
    counts: list[int] = history.counts[place].tolist()
    return counts


def test_a_sequence_is_counted_on_as_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what came since goes to the device: the prompt is converted once, and each output token once."""
    converted = list[int]()
    as_array = np.asarray

    def noted(tokens: Any, dtype: Any) -> Any:
        converted.append(len(tokens))
        return as_array(tokens, dtype)

    monkeypatch.setattr("pdmesh.engine.kernels.triton.sampling.batch.np.asarray", noted)
    sampler, owners = DeviceSampler(CHUNK), [Owner(tuple(range(i, 30))) for i in range(2)]
    for step in range(5):
        for owner, token in zip(owners, stepped(sampler, [owner.row() for owner in owners], step), strict=True):
            owner.output.append(token)
    assert converted == [30, 29] + [1] * 8


def test_the_counts_are_those_of_the_lists() -> None:
    sampler, owner = DeviceSampler(CHUNK), Owner((1, 2, 2), [2, 3, 3])
    stepped(sampler, [owner.row()], 0)
    assert counts_of(sampler, owner)[:5] == [0, IN_PROMPT, IN_PROMPT + 1, 2, 0]


def test_drafted_tokens_count_for_those_behind_them_and_for_nobody_else() -> None:
    """Branches of a draft in one step, of which none, then some are kept."""
    sampler, owner, other = DeviceSampler(CHUNK), Owner(output=[4]), Owner(output=[9, 9])
    rows = [owner.row(), owner.row((7,)), owner.row((7, 7)), owner.row((8,)), other.row()]
    stepped(sampler, rows, 1)
    stepped(sampler, rows, 2)
    owner.output += [7, 7, 3]
    stepped(sampler, [other.row(), owner.row(), owner.row((7,))], 3)


def test_a_drafts_first_tokens_are_guessed_before_there_is_an_output() -> None:
    owner = Owner(repetition_penalty=1.0)
    stepped(DeviceSampler(CHUNK), [owner.row(), owner.row((7,)), owner.row((7, 7))], 4)


def test_choices_share_a_history_until_they_part() -> None:
    sampler, trunk = DeviceSampler(CHUNK), Owner(tuple(range(20)))
    tokens = stepped(sampler, [trunk.row(choice=choice) for choice in range(3)], 5)
    branches = [Owner(trunk.prompt, [token]) for token in tokens]
    assert history_of(sampler).num_held == 1
    del trunk
    gc.collect()
    stepped(sampler, [branch.row() for branch in branches], 6)
    assert history_of(sampler).num_held == 3


def test_an_output_that_was_changed_is_counted_anew() -> None:
    """Nothing does that today; who does it tomorrow does not draw from another's counts."""
    sampler, owner = DeviceSampler(CHUNK), Owner(output=[4, 5, 6])
    stepped(sampler, [owner.row()], 7)
    owner.output = [4, 9]
    stepped(sampler, [owner.row()], 8)
    owner.output = [4, 3, 3]
    stepped(sampler, [owner.row()], 9)
    owner.prompt = (30, 31)
    stepped(sampler, [owner.row()], 10)


def test_another_prompt_is_counted_anew_whatever_the_output() -> None:
    """By the output alone what is held would fit: it is the same, or has grown."""
    sampler, owner = DeviceSampler(CHUNK), Owner((1, 2), [4, 5])
    stepped(sampler, [owner.row()], 7)
    for prompt, output in (((30, 31), [4, 5]), ((32,), [4, 5, 6])):
        owner.prompt, owner.output = prompt, output
        stepped(sampler, [owner.row()], 8)
        assert [token for token, count in enumerate(counts_of(sampler, owner)) if count & IN_PROMPT] == list(prompt)


def test_rows_that_are_nobodys_are_counted_for_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdmesh.engine.kernels.triton.sampling.batch.MOST_ROWS", 4)
    sampler = DeviceSampler(CHUNK)
    for step in range(6):
        owner = Owner(output=[step, step])
        row = owner.row()
        stepped(sampler, [SampleRow(row.params, 0, 2, row.prompt, row.output, frozenset())] * 3, step)
    counts = history_of(sampler).counts
    assert counts is not None and len(counts) == 4 and history_of(sampler).num_held == 0


def test_rows_come_free_with_their_sequences_and_are_bounded() -> None:
    history = HistoryCounts(VOCAB, DEVICE, most_rows=6)
    owners = [Owner(output=[i]) for i in range(20)]
    for first in (0, 4, 8, 12, 16):
        history.place([owner.row() for owner in owners[first : first + 4]])
    assert history.num_held <= 6 and history.counts is not None and len(history.counts) <= 6
    _, update = history.place([owners[19].row(), owners[0].row()])
    assert [len(places) for places in update.outputs] == [1]  # the last is still held, the first was given up
    rows, _ = history.place([owner.row() for owner in owners[:9]])
    assert len(set(rows)) == 9 and len(history.counts) == 16  # a step that needs more has them
    grown = history.counts
    history.place([owner.row() for owner in owners[:14]])
    assert history.counts is grown  # and one with a few more takes no memory for them
    del owners
    gc.collect()
    assert history.num_held == 0


def test_growing_keeps_what_was_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdmesh.engine.kernels.triton.sampling.batch.MOST_ROWS", 2)
    sampler, owners = DeviceSampler(CHUNK), [Owner((i, i + 1), [i + 2] * i) for i in range(7)]
    stepped(sampler, [owner.row() for owner in owners[:2]], 0)
    stepped(sampler, [owner.row() for owner in owners], 1)
    stepped(sampler, [owner.row() for owner in reversed(owners)], 2)


def test_buffers_have_room_for_an_engines_sequences_from_the_first_on() -> None:
    sampler, owners = DeviceSampler(CHUNK, num_seqs=70), [Owner(output=[i]) for i in range(70)]
    held = []
    for count in (1, 70):
        logits = logits_of(count, count).to(DEVICE)
        history = sampler._maker_for(logits).history
        history.place([owner.row() for owner in owners[:count]])
        held.append((sampler._room(logits).adjusted, history.counts))
    assert [one is other for one, other in zip(*held, strict=True)] == [True, True]
    assert [len(buffer) for buffer in held[0] if buffer is not None] == [128, 70]
