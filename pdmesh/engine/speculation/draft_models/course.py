"""One sequence's way through a draft: what is computed next, what the draws are for, when it is over."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from dataclasses import replace

from pdmesh.engine.finish import stops
from pdmesh.engine.sampling.grammar import Bits
from pdmesh.engine.sampling.sampler import SampleRow
from pdmesh.engine.sampling_params import SamplingParams
from pdmesh.engine.speculation.draft import Draft
from pdmesh.engine.speculation.draft_models.batch import Chunk
from pdmesh.engine.speculation.proposer import Ask


class Course:
    """Drafts at most `depth` tokens. `first`: position of the first token whose KV is missing, at most the last known one's."""

    def __init__(self, ask: Ask, depth: int, first: int, eos_token_ids: frozenset[int]) -> None:
        request = ask.sequence.group.request
        self.sequence = ask.sequence
        self.depth = depth
        self.is_over = False
        self.ahead: tuple[int, ...] = ()  # somebody else's guess of what is drawn next; computed with the next chunk
        self._least_chance = ask.least_chance
        self._first = first
        self._prompt = request.prompt
        self._params = without_logprobs(request.sampling)
        self._eos_token_ids = eos_token_ids
        self._output = list(ask.sequence.output)  # and behind it what is drafted
        self._num_known = len(self._output)
        self._chances: list[float] = []
        self._cumulative = 1.0

    @property
    def is_unconstrained(self) -> bool:
        """No grammar says what may come."""
        return self.sequence.group.request.grammar is None

    @property
    def chunk(self) -> Chunk:
        """What is computed next; a row of logits for each of rows()."""
        num_prompt = len(self._prompt)
        tokens = (*self._prompt[self._first :], *self._output[max(0, self._first - num_prompt) :], *self.ahead)
        return Chunk(self.sequence, self._first, tokens, 1 + len(self.ahead))

    def rows(self) -> list[SampleRow]:
        """The next draw, and those behind each token that was guessed ahead: as the target draws them."""
        return [self._row(self.ahead[:count]) for count in range(1 + len(self.ahead))]

    def take(self, token_ids: Sequence_[int], chances: Sequence_[float]) -> None:
        """What was drawn in rows(), and how likely the target draws it. A draw behind a guess counts if the guess was right."""
        for index, (token_id, chance) in enumerate(zip(token_ids, chances, strict=True)):
            self._append(token_id, chance)
            if self.is_over or self.ahead[index : index + 1] != (token_id,):
                break
        self._first = len(self._prompt) + len(self._output) - 1
        self.ahead = ()

    def draft(self, proposer: str) -> Draft:
        return Draft.chain(self._output[self._num_known :], self._chances, proposer)

    def _append(self, token_id: int, chance: float) -> None:
        self._cumulative *= chance
        if self._cumulative < self._least_chance:
            self.is_over = True
            return
        self._output.append(token_id)
        self._chances.append(chance)
        self.is_over = len(self._chances) == self.depth or stops(self._params, token_id, self._eos_token_ids)

    def _row(self, ahead: tuple[int, ...]) -> SampleRow:
        return SampleRow(
            params=self._params,
            choice=self.sequence.choices[0],
            index=len(self._output) + len(ahead),
            prompt=self._prompt,
            output=[*self._output, *ahead] if ahead else self._output,
            eos_token_ids=self._eos_token_ids,
            allowed=self._allowed(ahead),
        )

    def _allowed(self, ahead: tuple[int, ...]) -> Bits | None:
        """Found once: the step that verifies the draft asks for the same places."""
        if self.is_unconstrained:
            return None
        return self.sequence.matcher_behind((*self._output[self._num_known :], *ahead)).allowed()


def without_logprobs(params: SamplingParams) -> SamplingParams:
    """Nobody reads a draft's. The same object where there are none: samplers know parameters by identity."""
    return params if params.logprobs is None else replace(params, logprobs=None)
