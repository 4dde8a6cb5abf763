"""Prompt lookup: tokens that followed an earlier occurrence of the sequence's last tokens are likely to follow again.

Saxena, "Prompt Lookup Decoding" (2023). Here every step costs microseconds, whatever the length of the sequence: pairs of tokens
are indexed as they come, a long prompt in portions, and a sequence that copies follows its trail without searching.
"""

from __future__ import annotations

from pdmesh.engine.scheduler.sequence import Sequence
from pdmesh.engine.speculation.ngrams.token_history import NgramIndex, Reading, Rungs, TokenTrail

NAME = "prompt_lookup"


class PromptLookup(Reading):
    """Propose by prompt lookup."""

    def __init__(self) -> None:
        rungs = Rungs()
        super().__init__(NAME, lambda sequence: _Reader(sequence, rungs))


class _Reader:
    """Read one sequence; implements Reader."""

    __slots__ = ("_behind_prompt", "_index", "trail")

    def __init__(self, sequence: Sequence, rungs: Rungs) -> None:
        prompt = sequence.group.request.prompt
        self._behind_prompt = len(prompt)
        self._index = NgramIndex(prompt)
        self._index.tokens += sequence.output
        self.trail = TokenTrail(rungs, own=self._index.tokens)

    def read(self, output: list[int], most: int) -> int:
        """Take the new tokens and find the present place of the trail; return how many missing pairs were entered."""
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


def make(_parts: object) -> PromptLookup:
    """Return a proposer for an engine; it needs none of the parts."""
    return PromptLookup()
