"""Rows of the model's output that do not draw, and the log-probabilities of a prompt's tokens, which come from them.

prompt  t0 t1 t2 | t3 t4        two chunks; the row after t0 has the log-probability of t1, ... the row after t4 draws
rows    t0 t1 t2 | t3 (t4)
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from pdmesh.engine.sampling.logprobs import logprobs_of
from pdmesh.engine.scheduler.scheduler import ScheduledSequence


def rows_of(pieces: list[ScheduledSequence]) -> Iterator[tuple[ScheduledSequence, range]]:
    """Yield the rows of each scheduled sequence: those of tokens that do not draw, then those that do."""
    row = 0
    for piece in pieces:
        draws = piece.reaches_end and bool(piece.sequence.choices_to_draw)
        end = row + piece.num_prompt_rows + (1 + len(piece.draft) if draws else 0)
        yield piece, range(row, end)
        row = end


def take_scores(pieces: list[ScheduledSequence], logits: Tensor) -> None:
    """Append to sequences the log-probabilities of those tokens of their prompts that follow a row of `logits` [R, vocab]; after
    a preemption some are there already."""
    for piece, rows in rows_of(pieces):
        sequence, request = piece.sequence, piece.sequence.group.request
        count = request.sampling.prompt_logprobs
        if count is None or not piece.num_prompt_rows:
            continue
        num_known = max(0, len(sequence.prompt_logprobs) - sequence.num_computed)
        first, end = rows.start + num_known, rows.start + piece.num_prompt_rows
        if first < end:
            position = sequence.num_computed + num_known + 1
            tokens = request.prompt[position : position + end - first]
            sequence.prompt_logprobs += logprobs_of(logits[first:end], tokens, count)
