"""Whether to ask a proposer that runs a model, by what asking cost and brought so far.

It is asked for the sequences of which more is hoped than others have guessed for nothing, and only where the tokens that it
brings are worth the time that it takes beside them. Where they are not, it is asked again after a while, and after twice that
while if nothing has changed: what is generated changes, and so do the sequences beside it. The dearer it is to ask, the longer
the while: asking in vain takes at most IN_VAIN of the time.

What asking takes is believed to be what it took at least, lately, for about as many sequences. A draft model that computes a
long prompt first does that once; and calls that touch new memory, or in which others have the machine, say nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Sequence_
from dataclasses import replace
from weakref import WeakKeyDictionary

from engine.runner import Draw
from engine.sequence import Sequence
from engine.speculation.chance import Bent, Calibration
from engine.speculation.cost_curve import CostCurve
from engine.speculation.door import Door
from engine.speculation.draft import ROOT, Draft
from engine.speculation.policy import MARGIN, Load
from engine.speculation.proposer import Ask, promise

FIRST_HOPE = 1.0
"""Tokens kept of a draft, before anything is known."""
LEARNING = 0.1
EMPTY_LEARNING = 0.02
"""Where it had no draft: it may have been making up for a prompt that it has not seen, which takes several calls."""
DEARER_LEARNING = 0.05
NUM_BUCKETS = 16
FIRST_PAUSE, LONGEST_PAUSE = 16, 256
"""Steps without asking, where it does not pay."""
IN_VAIN = 0.005
PROBE = 4
"""Steps in a row for which it is asked behind a pause: one alone would tell little."""


class Asking:
    """One proposer that is not free. What it calls a chance is a probability by its own model: what became of guesses as
    probable as that is what it is taken for."""

    def __init__(self, proposer: Door, clock_ns: Callable[[], int]) -> None:
        self.proposer = proposer
        self._clock_ns = clock_ns
        self._calibration = Calibration.of_probabilities(NUM_BUCKETS)
        self._bent: WeakKeyDictionary[Sequence, Bent] = WeakKeyDictionary()
        self._proposed: dict[Sequence, Draft] = {}  # in this step, as the proposer gave them
        self.spent_ns = 0
        self._hopes: WeakKeyDictionary[Sequence, float] = WeakKeyDictionary()
        self._hope = FIRST_HOPE  # of a sequence that was never asked for
        self._num_rows = 4.0  # drafted and verified for a sequence that was asked for
        self._prices_s: dict[int, float] = {}  # of a call, by how many sequences it was asked for: powers of two
        self._pause = FIRST_PAUSE
        self._num_to_skip = 0
        self._num_to_probe = PROBE

    def ask_all(self, asks: Sequence_[Ask], drafts: list[Draft]) -> list[Draft]:
        """`drafts`, of these asks, or the proposer's own where that promises more."""
        return self._ask(range(len(asks)), asks, drafts)

    def improve(self, asks: Sequence_[Ask], drafts: list[Draft], load: Load, curve: CostCurve) -> list[Draft]:
        """The same, but the proposer is asked only where that may pay."""
        self._proposed = {}
        hopeful = [index for index, ask in enumerate(asks) if self._hope_of(ask.sequence) > promise(drafts[index])]
        if not hopeful:
            return drafts
        if self._num_to_skip:
            self._num_to_skip -= 1
            return drafts
        if self._num_to_probe:
            self._num_to_probe -= 1
        else:
            self._decide_on_next(hopeful, asks, drafts, load, curve)
        return self._ask(hopeful, asks, drafts)

    def _ask(self, hopeful: Sequence_[int], asks: Sequence_[Ask], drafts: list[Draft]) -> list[Draft]:
        started_ns = self._clock_ns()
        proposed = self.proposer.propose([asks[index] for index in hopeful])
        self._spent(self._clock_ns() - started_ns, len(hopeful))
        self._proposed, better = {}, list(drafts)
        for index, draft in zip(hopeful, proposed, strict=True):
            sequence = asks[index].sequence
            self._proposed[sequence] = draft
            better[index] = max(drafts[index], self._calibrated(sequence, draft), key=promise)
        return better

    def learn(self, draws: Mapping[Sequence, list[Draw]]) -> None:
        """What became of the drafts that it was asked for."""
        for sequence, proposed in self._proposed.items():
            for draw in draws.get(sequence, ()):
                if draw.verified is not None:
                    is_own = draw.verified.draft.proposer == self.proposer.name
                    kept, rows = (len(draw.verified.kept), len(draw.verified.draft)) if is_own else (0, 0)
                    learning = LEARNING if proposed else EMPTY_LEARNING
                    self._hopes[sequence] = _moved(self._hope_of(sequence), kept, learning)
                    self._hope = _moved(self._hope, kept, learning)
                    self._num_rows = max(1.0, _moved(self._num_rows, rows))
                    self._compare(sequence, proposed, draw.verified.new_tokens)
        self._proposed = {}  # it may not be asked before the next steps; and who has ended is not to be held here

    def _calibrated(self, sequence: Sequence, draft: Draft) -> Draft:
        bent, calibration = self._bent.get(sequence), self._calibration
        chances = [calibration.chance(calibration.bucket_of(chance)) for chance in draft.chances]
        return replace(draft, chances=tuple(chances if bent is None else map(bent.chance, chances)))

    def _compare(self, sequence: Sequence, proposed: Draft, new_tokens: Sequence_[int]) -> None:
        """Whether or not anybody had it verified: as far as the model's tokens say what of it was right."""
        bent, calibration = self._bent.setdefault(sequence, Bent()), self._calibration
        at = ROOT
        for token_id in new_tokens:
            children = [index for index, parent in enumerate(proposed.parents) if parent == at]
            for index in children:
                bucket, is_right = calibration.bucket_of(proposed.chances[index]), proposed.token_ids[index] == token_id
                bent.saw(calibration.chance(bucket), is_right)
                calibration.saw(bucket, is_right)
            at = next((index for index in children if proposed.token_ids[index] == token_id), len(proposed))

    def _hope_of(self, sequence: Sequence) -> float:
        return self._hopes.get(sequence, self._hope)

    def _decide_on_next(
        self, hopeful: list[int], asks: Sequence_[Ask], drafts: list[Draft], load: Load, curve: CostCurve
    ) -> None:
        """Asked now in any case, to know; again at once only where what is known so far says that it pays."""
        found = [promise(draft) for draft in drafts]
        more = sum(self._hope_of(asks[index].sequence) - found[index] for index in hopeful)
        plain_s = curve.step_s(load.num_rows + sum(map(len, drafts))) + load.attention_s
        with_s = curve.step_s(load.num_rows + sum(map(len, drafts)) + round(self._num_rows * len(hopeful))) + load.attention_s
        plain = load.num_decoding + sum(found)
        price_s = self._prices_s.get(len(hopeful).bit_length(), 0.0)
        if (plain + more) * plain_s >= (1 + MARGIN) * plain * (with_s + price_s):
            self._pause = FIRST_PAUSE
            return
        shortest = int((PROBE + 1) * price_s / (IN_VAIN * plain_s))
        self._num_to_skip, self._pause = max(shortest, self._pause), min(LONGEST_PAUSE, 2 * self._pause)
        self._num_to_probe = PROBE

    def _spent(self, took_ns: int, num_asked: int) -> None:
        self.spent_ns += took_ns
        took_s, size = took_ns / 1e9, num_asked.bit_length()
        self._prices_s[size] = min(took_s, _moved(self._prices_s.get(size, took_s), took_s, DEARER_LEARNING))


def _moved(old: float, new: float, learning: float = LEARNING) -> float:
    return old + learning * (new - old)
