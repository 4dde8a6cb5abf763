"""The gate of a proposer that runs a model: it decides about calls by the cost and the gain of earlier calls.

The proposer is called for the sequences that are expected to gain more than by the free proposers' drafts, and only where the
tokens are worth the time. Where they are not, it is called again after a pause, and after twice that pause if nothing has
changed: outputs change, and so do the sequences of the step. The more a call costs, the longer the pause: calls in vain take at
most IN_VAIN of the time. Greedy and sampled sequences are recorded apart: drafts cost more and are accepted less often for the
latter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Sequence_
from dataclasses import replace
from weakref import WeakKeyDictionary

from pdmesh.engine.runner.model_runner import SampledOutput
from pdmesh.engine.scheduler.sequence import Sequence
from pdmesh.engine.speculation.acceptance_rate import Bent, Calibration
from pdmesh.engine.speculation.cost_curve import CostCurve
from pdmesh.engine.speculation.draft import ROOT, Draft
from pdmesh.engine.speculation.guarded_proposer import GuardedProposer
from pdmesh.engine.speculation.policy import MARGIN, Load
from pdmesh.engine.speculation.proposer import Ask, promise

# The record of a proposer that runs a model: what it gains, what it costs, when it pauses. Pure.


FIRST_HOPE, FIRST_WEIGHT = 1.0, 4.0
"""Accepted tokens of a draft before anything is known, and for how many drafts that counts."""
MEMORY = 64.0
"""About so many of the last drafts decide: fewer would end what pays on a few unlucky ones."""
MEMORY_BEHIND_PAUSE = 16.0
"""The record before a pause counts for so many drafts: things may have changed."""
EMPTY = 0.2
"""A call without a draft counts for so much of a wrong one: it may have been computing a prompt that it has not seen,
which takes several calls."""
OWN_FADING, USUAL_WEIGHT = 0.97, 16.0
"""About the last 33 drafts of a sequence decide its own rate, beside so many average ones."""
NUM_BUCKETS = 16
FIRST_PAUSE, LONGEST_PAUSE = 16, 256
"""Steps of a pause, where calls do not pay."""
IN_VAIN = 0.005
PROBE = 4
"""Calls in a row after a pause: one alone would tell little."""
PRICE_LEARNING, HELD_UP = 0.1, 2.0
NUM_FIRST_CALLS = 4


class Hope:
    """Track the accepted tokens of one sequence's drafts."""

    __slots__ = ("_kept", "_num")

    def __init__(self) -> None:
        self._kept = self._num = 0.0

    def saw(self, kept: int, *, had_draft: bool) -> None:
        self._kept = self._kept * OWN_FADING + kept
        self._num = self._num * OWN_FADING + (1.0 if had_draft else EMPTY)

    def beside(self, usual: float) -> float:
        """Return the expected accepted tokens of the next draft."""
        return (self._kept + USUAL_WEIGHT * usual) / (self._num + USUAL_WEIGHT)


class Price:
    """Track the seconds of a call. Calls that touch new memory, compute a long prompt first, or run on a busy machine, say
    little: of the first few the cheapest counts, later ones at most for HELD_UP times the expected time."""

    __slots__ = ("_num_calls", "call_s", "token_s")

    def __init__(self) -> None:
        self.call_s = self.token_s = 0.0  # a call's, and the increase for one more token of each sequence
        self._num_calls = 0

    def saw(self, took_s: float, deepest: int) -> None:
        """Record a call. `deepest`: tokens of the longest draft; 0: there was none."""
        self._num_calls += 1
        if self._num_calls <= NUM_FIRST_CALLS:
            self.call_s = took_s if self._num_calls == 1 else min(self.call_s, took_s)
        else:
            self.call_s += PRICE_LEARNING * (min(took_s, HELD_UP * self.call_s) - self.call_s)
        if deepest:
            token_s = self.call_s / (deepest + 1)  # besides the fixed cost of a call, which is about one token's
            self.token_s += PRICE_LEARNING * (token_s - self.token_s) if self.token_s else token_s


class ProposerRecord:
    """Record calls for sequences of one kind."""

    def __init__(self) -> None:
        self.calibration = Calibration.of_probabilities(NUM_BUCKETS)
        self.hope = FIRST_HOPE  # expected accepted tokens of a sequence without drafts so far
        self.num_rows = 4.0  # verified draft tokens of a sequence in a call
        self._weight = FIRST_WEIGHT
        self._is_paying = False
        self._pause = FIRST_PAUSE
        self._num_to_skip, self._num_to_probe = 0, PROBE

    @property
    def is_next(self) -> bool:
        """Return whether it would be called in the next step."""
        return not self._num_to_skip

    def is_due(self) -> bool:
        """Return whether to call it now. Once for each step with sequences to draft for."""
        if not self._num_to_skip:
            return True
        self._num_to_skip -= 1
        return False

    def rest(self) -> None:
        """Record a step without a call."""
        self._num_to_skip = max(0, self._num_to_skip - 1)

    def is_probing(self) -> bool:
        """Return whether it is called now whatever the gain. Once for each step in which it is due."""
        if not self._num_to_probe:
            return False
        self._num_to_probe -= 1
        return True

    def decide(self, gain: float, price: float) -> None:
        """Record a call that is made in any case, to learn; another follows at once only where that pays: `gain` times the tokens
        per second without it. `price` of a call, in steps."""
        self._is_paying = gain >= 1.0 + (MARGIN / 4 if self._is_paying else MARGIN)
        if self._is_paying:
            self._pause = FIRST_PAUSE
            return
        self._num_to_skip, self._pause = max(self._pause, int((PROBE + 1) * price / IN_VAIN)), min(LONGEST_PAUSE, 2 * self._pause)
        self._num_to_probe = PROBE
        self._weight = min(self._weight, MEMORY_BEHIND_PAUSE)

    def saw(self, kept: int, rows: int, *, had_draft: bool) -> None:
        """Record a draft of which `rows` tokens were verified and `kept` of them accepted."""
        self._weight = min(MEMORY, self._weight + 1.0)
        self.hope += (1.0 if had_draft else EMPTY) * (kept - self.hope) / self._weight
        self.num_rows = max(1.0, self.num_rows + (rows - self.num_rows) / self._weight)


class ProposerGate:
    """Gate one proposer that is not free. Its chances are probabilities of its own model, which are calibrated by the acceptance
    rate of earlier tokens with the same probability."""

    def __init__(self, proposer: GuardedProposer, clock_ns: Callable[[], int]) -> None:
        self.proposer = proposer
        self._clock_ns = clock_ns
        self._habits = {is_greedy: ProposerRecord() for is_greedy in (True, False)}
        self._prices: dict[tuple[int, int], Price] = {}  # of a call, by the number of sequences of each kind: powers of two
        self._bent: WeakKeyDictionary[Sequence, Bent] = WeakKeyDictionary()
        self._hopes: WeakKeyDictionary[Sequence, Hope] = WeakKeyDictionary()
        self._probing_ns = 0
        self._proposed: dict[Sequence, Draft] = {}  # drafts of this step, as the proposer made them

    def rest(self) -> None:
        """Make no call in this step. Its own pauses continue: otherwise one within the other would multiply."""
        for habit in self._habits.values():
            habit.rest()

    def ask_all(self, asks: Sequence_[Ask], drafts: list[Draft]) -> list[Draft]:
        """Return `drafts` of these asks, or the proposer's own where they are expected to gain more."""
        return self._ask(range(len(asks)), asks, drafts)

    def improve(self, asks: Sequence_[Ask], drafts: list[Draft], load: Load, curve: CostCurve) -> list[Draft]:
        """Do as `ask_all`, but call the proposer only where that may pay."""
        self._proposed = {}
        asked: list[int] = []
        is_probe = False
        for is_greedy, habit in self._habits.items():
            members = [index for index, ask in enumerate(asks) if _is_greedy(ask.sequence) is is_greedy]
            if not members or not habit.is_due():
                continue
            if hopeful := [index for index in members if self._hope_of(asks[index].sequence) > promise(drafts[index])]:
                if habit.is_probing():
                    is_probe = True
                else:
                    habit.decide(*self._worth(habit, hopeful, asks, drafts, load, curve))
                asked += hopeful
        if not asked:
            return drafts
        plain_s = load.plain_s(curve)
        least = self._price(asked, asks).token_s / len(asked) * load.num_decoding / plain_s
        started_ns = self._clock_ns()
        better = self._ask(asked, [ask._replace(least_chance=max(ask.least_chance, least)) for ask in asks], drafts)
        if is_probe:
            self._probing_ns += self._clock_ns() - started_ns
        return better

    def take_probing_ns(self) -> int:
        """Return the time spent on probes since the last call, which is accounted for otherwise."""
        spent_ns, self._probing_ns = self._probing_ns, 0
        return spent_ns

    @property
    def may_be_next(self) -> bool:
        """Return whether it may be called in the next step: if not, it need not learn from this one."""
        return any(habit.is_next for habit in self._habits.values())

    def learn(self, draws: Mapping[Sequence, list[SampledOutput]]) -> None:
        """Learn the results of its drafts."""
        for sequence, proposed in self._proposed.items():
            for draw in draws.get(sequence, ()):
                if draw.verified is not None:
                    verified, habit = draw.verified, self._habits[_is_greedy(sequence)]
                    is_own = verified.draft.proposer == self.proposer.name
                    kept, rows = (len(verified.kept), len(verified.draft)) if is_own else (0, 0)
                    habit.saw(kept, rows, had_draft=bool(proposed))
                    self._hopes.setdefault(sequence, Hope()).saw(kept, had_draft=bool(proposed))
                    self._compare(sequence, proposed, verified.new_tokens)
        self._proposed = {}  # it may not be called soon, and sequences that have ended must not be kept alive here

    def _ask(self, asked: Sequence_[int], asks: Sequence_[Ask], drafts: list[Draft]) -> list[Draft]:
        started_ns = self._clock_ns()
        proposed = self.proposer.propose([asks[index] for index in asked])
        deepest = max([max(draft.depths, default=0) for draft in proposed], default=0)
        self._price(asked, asks).saw((self._clock_ns() - started_ns) / 1e9, deepest)
        self._proposed, better = {}, list(drafts)
        for index, draft in zip(asked, proposed, strict=True):
            sequence = asks[index].sequence
            self._proposed[sequence] = draft
            better[index] = max(drafts[index], self._calibrated(sequence, draft), key=promise)
        return better

    def _worth(
        self, habit: ProposerRecord, hopeful: list[int], asks: Sequence_[Ask], drafts: list[Draft], load: Load, curve: CostCurve
    ) -> tuple[float, float]:
        """Return tokens per second with a call for these, over those without; and the time of a call, in steps."""
        found, num_drafted = [promise(draft) for draft in drafts], sum(map(len, drafts))
        more = sum(self._hope_of(asks[index].sequence) - found[index] for index in hopeful)
        is_drafted = sum(found) > MARGIN * load.num_decoding  # else nothing of them will be verified
        plain_s = load.drafted_s(curve, num_drafted if is_drafted else 0)
        with_s = load.drafted_s(curve, num_drafted + round(habit.num_rows * len(hopeful)))
        plain, price_s = load.num_decoding + sum(found), self._price(hopeful, asks).call_s
        return (plain + more) * plain_s / (plain * (with_s + price_s)), price_s / plain_s

    def _price(self, asked: Sequence_[int], asks: Sequence_[Ask]) -> Price:
        num_greedy = sum([_is_greedy(asks[index].sequence) for index in asked])
        return self._prices.setdefault((num_greedy.bit_length(), (len(asked) - num_greedy).bit_length()), Price())

    def _hope_of(self, sequence: Sequence) -> float:
        usual, own = self._habits[_is_greedy(sequence)].hope, self._hopes.get(sequence)
        return usual if own is None else own.beside(usual)

    def _calibrated(self, sequence: Sequence, draft: Draft) -> Draft:
        bent, calibration = self._bent.get(sequence), self._habits[_is_greedy(sequence)].calibration
        chances = [calibration.chance(calibration.bucket_of(chance)) for chance in draft.chances]
        return replace(draft, chances=tuple(chances if bent is None else map(bent.chance, chances)))

    def _compare(self, sequence: Sequence, proposed: Draft, new_tokens: Sequence_[int]) -> None:
        """Compare a draft with the model's tokens, whether or not it was verified."""
        bent, calibration = self._bent.setdefault(sequence, Bent()), self._habits[_is_greedy(sequence)].calibration
        at = ROOT
        for token_id in new_tokens:
            children = [index for index, parent in enumerate(proposed.parents) if parent == at]
            for index in children:
                bucket, is_right = calibration.bucket_of(proposed.chances[index]), proposed.token_ids[index] == token_id
                bent.saw(calibration.chance(bucket), is_right)
                calibration.saw(bucket, is_right)
            at = next((index for index in children if proposed.token_ids[index] == token_id), len(proposed))


def _is_greedy(sequence: Sequence) -> bool:
    return sequence.group.request.sampling.greedy
