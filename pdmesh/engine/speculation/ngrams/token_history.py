"""The token history of a sequence: the source that it seems to copy (its trail), and the chance that it goes on copying.

    source      … a b c d e f …        the sequence has copied a b c: its rung (matched tokens) is 3, its place is that of d
    sequence    … a b c                d comes: rung 4, place e. Another token comes: the trail is lost

Rungs up to LONGEST count matched tokens. A few more are for a trail that was lost at one token and resumes after it: a text
copied with changes. The chance of the next token is learned for each rung, from all sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Sequence_
from itertools import cycle, islice
from typing import Protocol
from weakref import WeakKeyDictionary

from torch import Tensor

from pdmesh.engine.scheduler.sequence import Sequence
from pdmesh.engine.speculation.acceptance_rate import Bent, Calibration
from pdmesh.engine.speculation.draft import NOTHING, ROOT, Draft, Verified
from pdmesh.engine.speculation.proposer import Ask

# Earlier occurrences of the last tokens of a sequence
#
# tokens    … a b c d e … a b c          `search`: "a b c" occurred here before, so d comes next: a match of 3
#                   ▲
#                 place


LONGEST = 16  # tokens of a match that are counted
_MOST_CANDIDATES = 8

# The tokens of the source, the place after the match, and how many tokens match
Match = tuple[Sequence_[int], int, int]
NO_MATCH: Match = ((), 0, 0)


def match_length(source: Sequence_[int], place: int, tokens: Sequence_[int], end: int, known: int) -> int:
    """Return how many tokens before `place` of the source equal those before `end` of the tokens, up to LONGEST; `known` of them
    do."""
    length = known
    most = min(LONGEST, place, end)
    while length < most and source[place - 1 - length] == tokens[end - 1 - length]:
        length += 1
    return length


class NgramIndex:
    """Index one sequence's tokens by pairs. Plain lists: a step has microseconds for this.

    `_latest[pair]`: the place after the last occurrence of the pair; `_before[place]`: that after the previous occurrence.
    """

    __slots__ = ("_before", "_latest", "tokens")

    def __init__(self, tokens: Sequence_[int]) -> None:
        self.tokens = list(tokens)
        self._latest: dict[int, int] = {}
        self._before = [0, 0]  # for places 0 and 1, before which there is no pair

    def catch_up(self, most: int) -> int:
        """Enter missing pairs, except the last one, and at most so many; return how many."""
        tokens, latest, before = self.tokens, self._latest, self._before
        first = len(before)
        last = min(len(tokens), first + most)
        for place in range(first, last):
            pair = tokens[place - 2] << 24 | tokens[place - 1]
            before.append(latest.get(pair, 0))
            latest[pair] = place
        return max(0, last - first)

    def search(self) -> tuple[Match, Match]:
        """Return the longest match of the last tokens, the latest of equals, and the best that continues differently.

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


RESUMED = LONGEST + 1  # one token differed here, and the source continues after it; the next rung: one such token was seen
_SECURE = 8  # a match of so many tokens is followed without looking for a better one
NEXT_RUNG = [*range(1, LONGEST + 1), LONGEST, RESUMED + 1, RESUMED + 2, RESUMED + 3, _SECURE]
_RUNG_PRIORS = (
    *(0.01, 0.05, 0.2, 0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.82, 0.84, 0.86, 0.88, 0.9, 0.92),
    *(0.3, 0.4, 0.5, 0.6),
)
_OTHER_PRIOR = 0.2  # chance that the other match is right where the first one is wrong
_NEARBY = 8  # tokens after the one where a trail was lost, among which it is searched
_LOST_AFTER = 12  # tokens after which a lost trail is given up

Branch = tuple[Sequence_[int], list[float]]  # tokens, and the chance of each after the one before


class Rungs:
    """Hold the results of all trails of a proposer."""

    def __init__(self) -> None:
        self.first = Calibration(_RUNG_PRIORS)
        self.other = Calibration([_OTHER_PRIOR] * len(_RUNG_PRIORS))


class TokenTrail:
    """Follow a source: `source[place]` is the next token if the trail holds; rung 0: no trail. The other match is a second
    branch.

    A trail ends where its source does, unless the source is the sequence's own tokens (`own`): there it wraps around, as what is
    drafted becomes the source.
    """

    __slots__ = ("_bent", "_lost_at", "_lost_for", "_lost_in", "_own", "_rungs", "other", "place", "rung", "source")

    def __init__(self, rungs: Rungs, own: Sequence_[int] = ()) -> None:
        self.source, self.place, self.rung = NO_MATCH
        self.other = NO_MATCH
        self._own = own
        self._rungs = rungs
        self._bent = Bent()
        self._lost_in, self._lost_at, self._lost_for = NO_MATCH  # where a secure match was lost; how many tokens came since

    @property
    def is_secure(self) -> bool:
        """Return whether the match is so long that no better one is searched."""
        return _SECURE <= self.rung <= LONGEST and self.place < len(self.source)

    def follow(self, new_tokens: Sequence_[int]) -> None:
        """Continue the sequence with these tokens, and learn from them, whether or not the draft was verified."""
        self._lost_for += len(new_tokens)
        rungs = self._rungs.first
        for at, token_id in enumerate(new_tokens):
            rung = self.rung
            if not rung:
                return
            if self.place >= len(self.source):
                self.rung = 0
                return
            kept = self.source[self.place] == token_id
            self._bent.saw(rungs.chances[rung], kept)
            rungs.saw(rung, kept)
            if kept:
                self.place += 1
                self.rung = NEXT_RUNG[rung]
                self.other = NO_MATCH
            else:
                self._lose(token_id, len(new_tokens) - at)

    def _lose(self, token_id: int, num_behind: int) -> None:
        if self.is_secure:
            self._lost_in, self._lost_at, self._lost_for = self.source, self.place, num_behind
        source, place, rung = self.other
        self.rung, self.other = 0, NO_MATCH
        if rung and place < len(source):
            kept = source[place] == token_id
            self._rungs.other.saw(rung, kept)
            if kept:
                self.source, self.place, self.rung = source, place + 1, NEXT_RUNG[rung]

    def choose(self, match: Match, other: Match, last_token: int) -> None:
        """Choose the match, unless the present trail or a nearby one is likelier; the second best of them becomes the other."""
        here = (self.source, self.place, self.rung) if self.rung else self._nearby(last_token)
        # None of its own tokens follows the last one yet: a trail there would always be right, comparing tokens with themselves.
        if here[2] and here[1] < len(here[0]):
            chances = self._rungs.first.chances
            if chances[here[2]] >= chances[match[2]]:
                match, other = here, match if _differ(here, match) else other
            elif not other[2]:
                other = here
        self.source, self.place, self.rung = match
        self.other = other if _differ(match, other) else NO_MATCH

    def _nearby(self, last_token: int) -> Match:
        """Return a match after the last token, if it is soon after the place where the trail was lost, or right after it."""
        lost_at = self._lost_at
        if not lost_at or self._lost_for > _LOST_AFTER:
            return NO_MATCH
        source = self._lost_in
        nearby = source[lost_at : lost_at + _NEARBY]
        if last_token in nearby:
            return source, lost_at + nearby.index(last_token) + 1, RESUMED + 1
        return (source, lost_at + 1, RESUMED) if self._lost_for == 1 else NO_MATCH

    def draft(self, ask: Ask, proposer: str) -> Draft:
        """Return the tokens from the place on, as far as they are likely enough, and the other match as a second branch."""
        if not self.rung:
            return NOTHING
        first_chance = self._bent.chance(self._rungs.first.chances[self.rung])
        other_chance = (1.0 - first_chance) * self._rungs.other.chances[self.other[2]] if self.other[2] else 0.0
        if self.other[2] and other_chance >= ask.least_chance:
            first = self._branch((self.source, self.place, self.rung), first_chance, ask)
            return tree(first, self._branch(self.other, other_chance, ask), ask.max_tokens, proposer)
        if first_chance < ask.least_chance:
            return NOTHING
        tokens, chances = self._branch((self.source, self.place, self.rung), first_chance, ask)
        return Draft.chain(tokens, chances, proposer) if tokens else NOTHING

    def _branch(self, match: Match, first_chance: float, ask: Ask) -> Branch:
        source, place, rung = match
        usual, bent = self._rungs.first.chances, self._bent
        most, least = min(ask.max_depth, ask.max_tokens), ask.least_chance
        chances: list[float] = []
        chance = likely = first_chance
        while likely >= least and len(chances) < most:
            chances.append(chance)
            rung = NEXT_RUNG[rung]
            chance = bent.chance(usual[rung])
            likely *= chance
        tokens = source[place : place + len(chances)]
        if len(tokens) < len(chances) and source is self._own:
            tokens = _go_round(tokens, len(chances))
        return tokens, chances[: len(tokens)]


def _differ(match: Match, other: Match) -> bool:
    """Return whether both are matches, and their next tokens differ."""
    source, place, rung = match
    other_source, other_place, other_rung = other
    if not rung or not other_rung or place >= len(source) or other_place >= len(other_source):
        return False
    return source[place] != other_source[other_place]


def _go_round(tokens: Sequence_[int], count: int) -> list[int]:
    """Return the tokens repeated up to `count`: the source ends with them, and continues with the draft."""
    return list(islice(cycle(tokens), count))


def tree(first: Branch, other: Branch, max_tokens: int, proposer: str) -> Draft:
    """Return a tree of two branches from the root; where they are too long together, the likeliest tokens of both."""
    size, total = len(first[0]), len(first[0]) + len(other[0])
    if not total:
        return NOTHING
    parents = (*range(ROOT, size - 1), *(at - 1 if at > size else ROOT for at in range(size, total)))
    draft = Draft((*first[0], *other[0]), parents, (*first[1], *other[1]), proposer)
    if total <= max_tokens:
        return draft
    likely = draft.cumulative
    best = set(sorted(range(total), key=lambda index: -likely[index])[:max_tokens])
    return draft.keep([index in best for index in range(total)])


# The common part of the proposers that follow a trail: prompt lookup in the sequence itself, retrieval in others


PORTION = 2048
"""Tokens indexed in a step, of all sequences: about 0.3 ms."""


class Reader(Protocol):
    """Hold the state of one sequence."""

    trail: TokenTrail

    def read(self, output: list[int], most: int) -> int:
        """Take the new tokens and find the present place of the trail; return how many n-grams were entered, at most `most`."""
        ...


class Reading:
    """Propose from token history. It learns from all new tokens, so that it knows acceptance rates even when nothing is
    verified."""

    is_free = True
    wants_hidden = False
    learns = False

    def __init__(self, name: str, open_reader: Callable[[Sequence], Reader]) -> None:
        self.name = name
        self._open_reader = open_reader
        self._readers: WeakKeyDictionary[Sequence, Reader] = WeakKeyDictionary()

    def propose(self, asks: Sequence_[Ask]) -> list[Draft]:
        left = PORTION
        drafts: list[Draft] = []
        for ask in asks:
            sequence = ask.sequence
            reader = self._readers.get(sequence)
            if reader is None:
                reader = self._readers[sequence] = self._open_reader(sequence)
            left -= reader.read(sequence.output, left)
            drafts.append(reader.trail.draft(ask, self.name))
        return drafts

    def learn(self, sequence: Sequence, verified: Verified, hidden: Tensor | None) -> None:
        """Do nothing: `propose` finds the new tokens in the sequence."""
