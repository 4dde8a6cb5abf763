"""What is known of asking a proposer that runs a model: what it brings, what it takes, when it is not asked. Pure."""

from __future__ import annotations

from pdmesh.engine.speculation.acceptance_rate import Calibration
from pdmesh.engine.speculation.policy import MARGIN

FIRST_HOPE, FIRST_WEIGHT = 1.0, 4.0
"""Tokens kept of a draft before anything is known, and for so many drafts that counts."""
MEMORY = 64.0
"""About so many of the last drafts decide: fewer would end what pays on a few unlucky ones."""
MEMORY_BEHIND_PAUSE = 16.0
"""What was known before a pause counts for so many drafts: things may have changed."""
EMPTY = 0.2
"""A call without a draft counts for so much of one that was wrong: it may have been making up for a prompt that it has not seen,
which takes several calls."""
OWN_FADING, USUAL_WEIGHT = 0.97, 16.0
"""About the last 33 drafts of a sequence are its own way, beside so many that went as usual."""
NUM_BUCKETS = 16
FIRST_PAUSE, LONGEST_PAUSE = 16, 256
"""Steps without asking, where it does not pay."""
IN_VAIN = 0.005
PROBE = 4
"""Steps in a row for which it is asked behind a pause: one alone would tell little."""
PRICE_LEARNING, HELD_UP = 0.1, 2.0
NUM_FIRST_CALLS = 4


class Hope:
    """Tokens kept of one sequence's drafts."""

    __slots__ = ("_kept", "_num")

    def __init__(self) -> None:
        self._kept = self._num = 0.0

    def saw(self, kept: int, *, had_draft: bool) -> None:
        self._kept = self._kept * OWN_FADING + kept
        self._num = self._num * OWN_FADING + (1.0 if had_draft else EMPTY)

    def beside(self, usual: float) -> float:
        """Of the next draft."""
        return (self._kept + USUAL_WEIGHT * usual) / (self._num + USUAL_WEIGHT)


class Price:
    """Seconds of a call. Calls that touch new memory, compute a long prompt first, or in which others have the machine, say
    little: of the first few the cheapest counts, later ones at most for HELD_UP times what is believed."""

    __slots__ = ("_num_calls", "call_s", "token_s")

    def __init__(self) -> None:
        self.call_s = self.token_s = 0.0  # a call's, and what it would take longer for one token more of each sequence
        self._num_calls = 0

    def saw(self, took_s: float, deepest: int) -> None:
        """`deepest`: tokens of the longest draft; 0: there was none."""
        self._num_calls += 1
        if self._num_calls <= NUM_FIRST_CALLS:
            self.call_s = took_s if self._num_calls == 1 else min(self.call_s, took_s)
        else:
            self.call_s += PRICE_LEARNING * (min(took_s, HELD_UP * self.call_s) - self.call_s)
        if deepest:
            token_s = self.call_s / (deepest + 1)  # beside what a call takes whatever it guesses: about a token more
            self.token_s += PRICE_LEARNING * (token_s - self.token_s) if self.token_s else token_s


class Habit:
    """Of sequences of one kind."""

    def __init__(self) -> None:
        self.calibration = Calibration.of_probabilities(NUM_BUCKETS)
        self.hope = FIRST_HOPE  # of a sequence that was never asked for: tokens kept of its draft
        self.num_rows = 4.0  # drafted and verified for a sequence that was asked for
        self._weight = FIRST_WEIGHT
        self._is_paying = False
        self._pause = FIRST_PAUSE
        self._num_to_skip, self._num_to_probe = 0, PROBE

    @property
    def is_next(self) -> bool:
        """Whether it would be asked in the next step."""
        return not self._num_to_skip

    def is_due(self) -> bool:
        """Whether to ask now. Once for each step in which there is somebody to ask for."""
        if not self._num_to_skip:
            return True
        self._num_to_skip -= 1
        return False

    def rest(self) -> None:
        """A step in which nobody is asked."""
        self._num_to_skip = max(0, self._num_to_skip - 1)

    def is_probing(self) -> bool:
        """Asked now whatever that is worth. Once for each step in which it is due."""
        if not self._num_to_probe:
            return False
        self._num_to_probe -= 1
        return True

    def decide(self, gain: float, price: float) -> None:
        """It is asked now in any case, to know; again at once only where that is worth it: `gain` times the tokens per second of
        not asking. `price` of a call, in steps."""
        self._is_paying = gain >= (1.0 if self._is_paying else 1.0 + MARGIN)
        if self._is_paying:
            self._pause = FIRST_PAUSE
            return
        self._num_to_skip, self._pause = max(self._pause, int((PROBE + 1) * price / IN_VAIN)), min(LONGEST_PAUSE, 2 * self._pause)
        self._num_to_probe = PROBE
        self._weight = min(self._weight, MEMORY_BEHIND_PAUSE)

    def saw(self, kept: int, rows: int, *, had_draft: bool) -> None:
        """Of a draft that it was asked for, `rows` tokens were verified and `kept` of them were right."""
        self._weight = min(MEMORY, self._weight + 1.0)
        self.hope += (1.0 if had_draft else EMPTY) * (kept - self.hope) / self._weight
        self.num_rows = max(1.0, self.num_rows + (rows - self.num_rows) / self._weight)
