"""Prompt lookup: what followed the last tokens when they stood in the sequence before is likely to follow again.

Saxena, "Prompt Lookup Decoding" (2023). Here every step costs microseconds, whatever the length of the sequence: pairs of tokens
are entered as they come, a long prompt in portions, and a sequence that copies follows its trail without searching.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from weakref import WeakKeyDictionary

from torch import Tensor

from engine.sequence import Sequence
from engine.speculation.draft import Draft, Verified
from engine.speculation.ngrams.index import NgramIndex
from engine.speculation.ngrams.trail import Rungs, Trail
from engine.speculation.proposer import Ask

NAME = "prompt_lookup"
_PORTION = 2048  # pairs entered in a step, of all sequences: about 0.3 ms


class PromptLookup:
    """A Proposer. It learns from the tokens that came, so that it knows what a draft is worth while nobody has any verified."""

    name = NAME
    is_free = True
    wants_hidden = False

    def __init__(self) -> None:
        self._rungs = Rungs()
        self._readers: WeakKeyDictionary[Sequence, _Reader] = WeakKeyDictionary()

    def propose(self, asks: Sequence_[Ask]) -> list[Draft]:
        left = _PORTION
        drafts: list[Draft] = []
        for ask in asks:
            sequence = ask.sequence
            reader = self._readers.get(sequence)
            if reader is None:
                reader = self._readers[sequence] = _Reader(sequence, self._rungs)
            left -= reader.read(sequence.output, left)
            drafts.append(reader.trail.draft(ask, NAME))
        return drafts

    def learn(self, sequence: Sequence, verified: Verified, hidden: Tensor | None) -> None:
        """Nothing here: `propose` finds the new tokens in the sequence."""


class _Reader:
    """What is known of one sequence."""

    __slots__ = ("_behind_prompt", "_index", "trail")

    def __init__(self, sequence: Sequence, rungs: Rungs) -> None:
        prompt = sequence.group.request.prompt
        self._behind_prompt = len(prompt)
        self._index = NgramIndex(prompt)
        self._index.tokens += sequence.output
        self.trail = Trail(rungs, own=self._index.tokens)

    def read(self, output: list[int], most: int) -> int:
        """Takes the new tokens and looks where the trail leads now; returns how many missing pairs were entered."""
        index, trail = self._index, self.trail
        tokens = index.tokens
        new_tokens = output[len(tokens) - self._behind_prompt :]
        tokens += new_tokens
        trail.follow(new_tokens)
        if trail.is_secure:
            return 0
        entered = index.catch_up(most)
        match, other = index.search()
        trail.choose(match, other, tokens[-1])
        return entered
