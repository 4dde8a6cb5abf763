"""The engine's interface to a constraint on the output. Its caller compiles grammars (pdmesh/text/grammar.py); this module has
tokens only.

The state of a choice in its grammar is a function of its output alone. So only tokens are transferred: after a hand-off, a
resubmission or a preemption the same tokens lead to the same state, and the same tokens come next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint32]  # [ceil(vocabulary / 32)]: token t is bit t % 32 of word t // 32


class Matcher(Protocol):
    """The state of one choice in its grammar."""

    @property
    def forced(self) -> int | None:
        """Return the token that comes next, where the grammar leaves no choice; end-of-sequence where it is complete or has
        failed."""
        ...

    @property
    def failed(self) -> bool:
        """Return whether the grammar cannot be followed any further: too complex, a dead end, or a token that it does not allow
        was taken."""
        ...

    def take(self, token_id: int) -> None:
        """Continue the output with this token."""
        ...

    def copy(self) -> Matcher:
        """Return an independent copy in the same state: much less work than taking all tokens again."""
        ...

    def allowed(self) -> Bits:
        """Return the tokens that may come next, at least one; only `forced` if there is one."""
        ...

    def num_possible(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens, from the first on, may come one after the other. Much less work than `allowed` behind
        each, and a little less strict: of several ways to spell a forced text it accepts any."""
        ...


class MatcherTree:
    """Hold the matcher behind an output, and those behind draft tokens: each state is found once."""

    def __init__(self, here: Matcher) -> None:
        self.here = here
        self._ahead: dict[tuple[int, ...], Matcher] = {}  # by the tokens that lead there from the output

    def behind(self, guessed: tuple[int, ...]) -> Matcher:
        """Return the matcher behind these tokens. It belongs to this tree: callers must not advance it."""
        if not guessed:
            return self.here
        known = self._ahead.get(guessed)
        if known is None:
            known = self._ahead[guessed] = self.behind(guessed[:-1]).copy()
            known.take(guessed[-1])
        return known

    def take(self, token_id: int) -> None:
        """Continue the output with this token: matchers behind drafts that began with it are kept, others are dropped."""
        guessed = self._ahead.get((token_id,))
        if guessed is None:
            self.here.take(token_id)
        else:
            self.here = guessed
        self._ahead = {path[1:]: matcher for path, matcher in self._ahead.items() if len(path) > 1 and path[0] == token_id}


class Grammar(Protocol):
    """A compiled constraint, shared by requests and threads."""

    @property
    def vocab_size(self) -> int: ...

    def matcher(self) -> Matcher:
        """Return a matcher at the beginning of an output."""
        ...

    def first_stray(self, output: Sequence[int]) -> int | None:
        """Return the index of the first token of `output` that does not follow the grammar; None if all do."""
        ...
