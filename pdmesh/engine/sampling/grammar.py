"""What the engine needs of a constraint on the output. Who calls it compiles grammars (pdmesh/text/grammar.py); here are tokens
only.

Where a choice is in its grammar is a function of its output alone. So nothing but the tokens travels: after a hand-off, a
resubmission or a preemption the same tokens lead to the same place, and the same tokens come next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint32]  # [ceil(vocabulary / 32)]: token t is bit t % 32 of word t // 32


class Matcher(Protocol):
    """Where one choice is in its grammar."""

    @property
    def forced(self) -> int | None:
        """Return the token that comes next, where the grammar leaves no choice; end-of-sequence where it is complete or has
        failed."""
        ...

    @property
    def failed(self) -> bool:
        """The grammar cannot be followed any further: too complex, a dead end, or a token that it does not allow was taken."""
        ...

    def take(self, token_id: int) -> None:
        """The output goes on with this token."""
        ...

    def copy(self) -> Matcher:
        """At the same place, and on its own from here: much less work than to take all tokens again."""
        ...

    def allowed(self) -> Bits:
        """Return the tokens that may come next, at least one; only `forced` if there is one."""
        ...

    def num_possible(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens, from the first on, may come one after the other. Much less work than `allowed` behind
        each, and a little less strict: of several ways to spell a text that is forced it takes any."""
        ...


class MatcherTree:
    """A matcher behind an output, and those behind guesses of how the output goes on: each place is found once."""

    def __init__(self, here: Matcher) -> None:
        self.here = here
        self._ahead: dict[tuple[int, ...], Matcher] = {}  # by the tokens that lead there from here

    def behind(self, guessed: tuple[int, ...]) -> Matcher:
        """Return where these tokens would lead. The matcher stays here's: nobody else may move it."""
        if not guessed:
            return self.here
        known = self._ahead.get(guessed)
        if known is None:
            known = self._ahead[guessed] = self.behind(guessed[:-1]).copy()
            known.take(guessed[-1])
        return known

    def take(self, token_id: int) -> None:
        """The output goes on with this token: guesses that began with it are that much nearer, others are forgotten."""
        guessed = self._ahead.get((token_id,))
        if guessed is None:
            self.here.take(token_id)
        else:
            self.here = guessed
        self._ahead = {path[1:]: matcher for path, matcher in self._ahead.items() if len(path) > 1 and path[0] == token_id}


class Grammar(Protocol):
    """A compiled constraint. Shared by requests and threads."""

    @property
    def vocab_size(self) -> int: ...

    def matcher(self) -> Matcher:
        """At the beginning of an output."""
        ...

    def first_stray(self, output: Sequence[int]) -> int | None:
        """Return the index of the first token of `output` that does not follow the grammar; None if all do."""
        ...
