"""What a sequence is believed to copy, token after token, and how likely it goes on so.

    source      … a b c d e f …        the sequence has copied a b c: its rung is 3, its place that of d
    sequence    … a b c                d comes: rung 4, place e. Another token comes: the trail is lost

Rungs up to LONGEST say how many tokens matched. A few more are for a trail that was lost at one token and is taken up again
behind it: a text copied with changes. How likely the next token is right is learned for each rung, from all sequences.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from itertools import cycle, islice

from pdmesh.engine.speculation.acceptance_rate import Bent, Calibration
from pdmesh.engine.speculation.draft import NOTHING, ROOT, Draft
from pdmesh.engine.speculation.ngrams.index import LONGEST, NO_MATCH, Match
from pdmesh.engine.speculation.proposer import Ask

RESUMED = LONGEST + 1  # one token was another one here, so the source goes on behind it; the next rung: a token of it was seen
_SECURE = 8  # a match of so many tokens is followed without looking for a better one
NEXT_RUNG = [*range(1, LONGEST + 1), LONGEST, RESUMED + 1, RESUMED + 2, RESUMED + 3, _SECURE]
_RUNG_PRIORS = (
    *(0.01, 0.05, 0.2, 0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.82, 0.84, 0.86, 0.88, 0.9, 0.92),
    *(0.3, 0.4, 0.5, 0.6),
)
_OTHER_PRIOR = 0.2  # that the other match is right where the first one is wrong
_NEARBY = 8  # tokens behind the one where a trail was lost, among which it is looked for
_LOST_AFTER = 12  # tokens

Branch = tuple[Sequence_[int], list[float]]  # tokens, and the chance of each behind the one before


class Rungs:
    """What all trails of a proposer have shown."""

    def __init__(self) -> None:
        self.first = Calibration(_RUNG_PRIORS)
        self.other = Calibration([_OTHER_PRIOR] * len(_RUNG_PRIORS))


class Trail:
    """`source[place]` is the next token if the trail holds; rung 0: there is none. The other match is a second guess beside it.

    A trail ends where its source does, unless the source is the sequence's own tokens (`own`): there it goes round, as what is
    guessed becomes the source.
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
        """So long a match is followed without looking for a better one."""
        return _SECURE <= self.rung <= LONGEST and self.place < len(self.source)

    def follow(self, new_tokens: Sequence_[int]) -> None:
        """The sequence goes on with these tokens. Learns from them, whether or not anybody had the guess verified."""
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
        """What was found, unless what the trail is at, or comes back to, is likelier; the second best of them beside it."""
        here = (self.source, self.place, self.rung) if self.rung else self._nearby(last_token)
        # Of its own tokens none follows the last one yet: a trail there would be right for ever, comparing each with itself.
        if here[2] and here[1] < len(here[0]):
            chances = self._rungs.first.chances
            if chances[here[2]] >= chances[match[2]]:
                match, other = here, match if _differ(here, match) else other
            elif not other[2]:
                other = here
        self.source, self.place, self.rung = match
        self.other = other if _differ(match, other) else NO_MATCH

    def _nearby(self, last_token: int) -> Match:
        """Behind the last token, if that stands soon behind the place where the trail was lost; or right behind that place."""
        lost_at = self._lost_at
        if not lost_at or self._lost_for > _LOST_AFTER:
            return NO_MATCH
        source = self._lost_in
        nearby = source[lost_at : lost_at + _NEARBY]
        if last_token in nearby:
            return source, lost_at + nearby.index(last_token) + 1, RESUMED + 1
        return (source, lost_at + 1, RESUMED) if self._lost_for == 1 else NO_MATCH

    def draft(self, ask: Ask, proposer: str) -> Draft:
        """What comes behind the place, as far as it is likely enough; and the other match as a second branch."""
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
    """Both are matches, and their next tokens are not the same."""
    source, place, rung = match
    other_source, other_place, other_rung = other
    if not rung or not other_rung or place >= len(source) or other_place >= len(other_source):
        return False
    return source[place] != other_source[other_place]


def _go_round(tokens: Sequence_[int], count: int) -> list[int]:
    """The source has no more than these tokens, and goes on with what is guessed."""
    return list(islice(cycle(tokens), count))


def tree(first: Branch, other: Branch, max_tokens: int, proposer: str) -> Draft:
    """Two branches from the root; where they are too long together, the likeliest tokens of both."""
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
