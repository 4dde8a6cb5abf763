"""Where the last tokens of a sequence stood before.

tokens    … a b c d e … a b c          `search`: "a b c" stood here before, so d comes next: a match of 3
                  ▲
                place
"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_

LONGEST = 16  # tokens of a match that are counted
_MOST_CANDIDATES = 8

# In which tokens, the place behind what matches, and how many tokens do.
Match = tuple[Sequence_[int], int, int]
NO_MATCH: Match = ((), 0, 0)


def match_length(source: Sequence_[int], place: int, tokens: Sequence_[int], end: int, known: int) -> int:
    """How many tokens before `place` of the source equal those before `end` of the tokens, up to LONGEST; `known` of them do."""
    length = known
    most = min(LONGEST, place, end)
    while length < most and source[place - 1 - length] == tokens[end - 1 - length]:
        length += 1
    return length


class NgramIndex:
    """One sequence's tokens and where each pair of them stood. Plain lists: a step has microseconds for this.

    `_latest[pair]`: the place behind the pair where it stood last; `_before[place]`: the one where that pair stood before.
    """

    __slots__ = ("_before", "_latest", "tokens")

    def __init__(self, tokens: Sequence_[int]) -> None:
        self.tokens = list(tokens)
        self._latest: dict[int, int] = {}
        self._before = [0, 0]  # of the places 0 and 1, before which there is no pair

    def catch_up(self, most: int) -> int:
        """Enters the pairs that are missing, but for the last one, and at most so many; returns how many."""
        tokens, latest, before = self.tokens, self._latest, self._before
        first = len(before)
        last = min(len(tokens), first + most)
        for place in range(first, last):
            pair = tokens[place - 2] << 24 | tokens[place - 1]
            before.append(latest.get(pair, 0))
            latest[pair] = place
        return max(0, last - first)

    def search(self) -> tuple[Match, Match]:
        """The longest match of the last tokens, the latest of equals, and the best that goes on differently.

        Enters the last pair. NO_MATCH for both unless all other pairs are entered.
        """
        tokens, before = self.tokens, self._before
        end = len(tokens)
        if len(before) != end:
            return NO_MATCH, NO_MATCH
        pair = tokens[-2] << 24 | tokens[-1]
        candidate = self._latest.get(pair, 0)
        before.append(candidate)
        self._latest[pair] = end
        return self._best(candidate, end) if candidate else (NO_MATCH, NO_MATCH)

    def _best(self, candidate: int, end: int) -> tuple[Match, Match]:
        tokens, before = self.tokens, self._before
        place = length = other_place = other_length = 0
        for _ in range(_MOST_CANDIDATES):
            found = match_length(tokens, candidate, tokens, end, 2)
            if found > length:
                if length and tokens[place] != tokens[candidate]:
                    other_place, other_length = place, length
                place, length = candidate, found
            elif found > other_length and tokens[candidate] != tokens[place]:
                other_place, other_length = candidate, found
            candidate = before[candidate]
            if not candidate or length == LONGEST:
                break
        return (tokens, place, length), (tokens, other_place, other_length)
