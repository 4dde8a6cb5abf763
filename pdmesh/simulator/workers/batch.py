"""The batch of a modelled worker: steps under way, decoding rows and their TPOT budgets. Pure.

Many steps count as one event when each takes a little longer than the previous one.
"""

import heapq
import math
import random
from dataclasses import dataclass, field

from pdmesh.planning.latency_model import NO_DRAFTS, Drafts, LatencyModel, prefill_context
from pdmesh.simulator.workers.kv_room import Sequence
from pdmesh.step_sharing import DRAFTING, FORGIVEN, PACE_TARGET, Pace, SavedTokens, num_fitting

SHORT = 1e-3
"""Below that, the formula loses its digits, and its value is 1."""


@dataclass(slots=True)
class StepsUnderWay:
    """Hold steps that began at `began_s`: one step with `pieces` of prompts (sequence, tokens), or `num_steps` of rows alone. The
    first takes `first_s`, each next one `more_s` more.

    A step is that of one token of each row. With speculation the engine's steps have `tokens_per_step` of them, and one with
    pieces, which nothing cuts short, has `num_steps`."""

    began_s: float
    num_steps: int
    first_s: float
    more_s: float = 0.0
    pieces: list[tuple[Sequence, int]] = field(default_factory=list)
    tokens_per_step: float = 1.0

    def lasts_s(self, num_steps: int) -> float:
        """Return the time of the first `num_steps`."""
        return num_steps * self.first_s + self.more_s * (num_steps * (num_steps - 1) // 2)

    def steps_by(self, now: float) -> int:
        """Return how many have ended by `now`: the root of a quadratic equation, corrected for rounding."""
        gone_s, half = max(0.0, now - self.began_s), self.first_s - self.more_s / 2
        guess = 2 * gone_s / (half + math.sqrt(half * half + 2 * self.more_s * gone_s))
        num_steps = min(self.num_steps, int(guess))
        while num_steps < self.num_steps and self.lasts_s(num_steps + 1) <= gone_s:
            num_steps += 1
        while num_steps and self.lasts_s(num_steps) > gone_s:
            num_steps -= 1
        return num_steps


class StepTimes:
    """Model what steps take beyond their work: `between_s` until the next one begins, and disturbances of the machine, which make
    steps longer or shorter and last for a while.

    Factors are log-normal around a mean of 1; `noise` is the standard deviation of one step's logarithm. Disturbances of
    `lasts_s` (the time constant of an Ornstein-Uhlenbeck process) outlast a step and not a thousand, so the time of many steps
    together varies less: 2/x · (1 - (1 - e^-x)/x) of the variance is left, x = time / lasts_s."""

    def __init__(self, between_s: float, noise: float, lasts_s: float, seed: str) -> None:
        self._between_s, self._noise, self._lasts_s = between_s, noise, lasts_s
        self._rng = random.Random(seed)

    def apply(self, course: StepsUnderWay) -> None:
        """Apply the same factor to all of its steps."""
        if self._noise:
            factor = self._factor(course.lasts_s(course.num_steps) / self._lasts_s)
            course.first_s *= factor
            course.more_s *= factor
        course.first_s += self._between_s / course.tokens_per_step

    def _factor(self, x: float) -> float:
        left = 2 / x * (1 - (1 - math.exp(-x)) / x) if x > SHORT else 1.0
        spread = self._noise * math.sqrt(left)
        return math.exp(self._rng.gauss(-spread * spread / 2, spread))


def prompts_s(speed: LatencyModel, pieces: list[tuple[Sequence, int]]) -> float:
    """Return what chunks of prompts add to a step, before they are counted as computed."""
    num_tokens = sum([piece[1] for piece in pieces])
    context = sum([prefill_context(s.num_computed, s.num_computed + num) for s, num in pieces])
    return speed.per_prefill_token_s * num_tokens + speed.per_prefill_context_s * context


# The decoding sequences of a worker, as sums: each gets a token in every step, so many steps count as fast as one.
#
#     context at step s      = context now + number of rows · (s - now)
#     a row ends             at a step that is known when it enters: a heap
#     a row takes a block    in every `block_size`-th step: rows are counted by the remainder at which it does


class Rows:
    """Hold the rows. `step` counts the steps with any decoding row. `context`: tokens that all of them attend to in the next
    one."""

    def __init__(self, block_size: int) -> None:
        self.step = 0
        self.context = 0
        self.members: dict[Sequence, None] = {}
        self._endings: list[tuple[int, int, Sequence]] = []
        self._growing = [0] * block_size
        self._block_size = block_size
        self._num_entered = 0  # breaks ties of equal steps, so that sequences are not compared

    def __len__(self) -> int:
        return len(self.members)

    def enter(self, sequence: Sequence) -> None:
        """Add a sequence: all its tokens are computed except the one drawn last; `num_left` more are to be drawn, at least
        one."""
        sequence.entry_step, sequence.end_step = self.step, self.step + sequence.num_left
        self.members[sequence] = None
        self.context += sequence.num_tokens
        self._growing[self._remainder(sequence)] += 1
        heapq.heappush(self._endings, (sequence.end_step, self._num_entered, sequence))
        self._num_entered += 1

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence and record in it how far it came."""
        del self.members[sequence]
        self._growing[self._remainder(sequence)] -= 1
        num_drawn = self.step - sequence.entry_step
        sequence.num_tokens += num_drawn
        sequence.num_left -= num_drawn
        self.context -= sequence.num_tokens
        sequence.end_step = None

    def advance(self, num_steps: int) -> list[Sequence]:
        """Advance by at most `steps_to_end` steps; return the sequences that have drawn their last token, which are removed."""
        self.step += num_steps
        self.context += num_steps * len(self.members)
        done, endings = [], self._endings
        while endings and (endings[0][0] <= self.step or endings[0][2].end_step is None):
            end_step, _, sequence = heapq.heappop(endings)
            if sequence.end_step == end_step:
                self.leave(sequence)
                done.append(sequence)
        return done

    def steps_to_end(self) -> int:
        """Return the steps until the next row ends; there must be one."""
        endings = self._endings
        while endings[0][2].end_step != endings[0][0]:
            heapq.heappop(endings)  # it was preempted
        return endings[0][0] - self.step

    @property
    def next_growth(self) -> int:
        """Return the blocks that the next step takes."""
        return self._growing[-self.step % self._block_size]

    def growth(self, num_steps: int) -> int:
        """Return the blocks that the next `num_steps` steps take."""
        size, growing = self._block_size, self._growing
        cycles, rest = divmod(num_steps, size)
        end = -self.step % size + 1  # remainders follow downwards from the previous one, cyclically
        if rest <= end:
            return cycles * len(self.members) + sum(growing[end - rest : end])
        return cycles * len(self.members) + sum(growing[:end]) + sum(growing[end - rest :])

    def steps_within(self, num_free: int, num_steps: int) -> int:
        """Return how many of the next `num_steps` the free blocks suffice for."""
        if self.growth(num_steps) <= num_free:
            return num_steps
        done = num_free // len(self.members) * self._block_size
        while self.growth(done + 1) <= num_free:
            done += 1
        return done

    def latest(self) -> Sequence | None:
        """Return the sequence that arrived last; None without any. Scans all."""
        return max(self.members, key=lambda sequence: sequence.turn, default=None)

    def _remainder(self, sequence: Sequence) -> int:
        return (sequence.num_tokens - 1 - sequence.entry_step) % self._block_size


class Drafting:
    """Model the speculation of a worker whose rows may have the drafts `offered`. `latest`: those of its latest step."""

    def __init__(self, offered: Drafts) -> None:
        self.latest, self.has_decoded = NO_DRAFTS, False
        self._offered = offered
        self._num_owed = 0.0  # accepted tokens that steps with prompts have not given yet

    def step_s(self, speed: LatencyModel, num_rows: int, decode_s: float, budget: int) -> float:
        """Return the time of the next step; `decode_s`: without drafts, which it has if they pay; `budget`: its most tokens."""
        self.latest = self._offered if self._offered.pay(speed, num_rows, decode_s, budget) else NO_DRAFTS
        self.has_decoded = True
        return decode_s + self.latest.added_s(speed, num_rows)

    def unused_s(self, speed: LatencyModel, num_rows: int, num_tokens: int) -> float:
        """Return the part of that time which a step with `num_tokens` of each row does not take: here drafts cost by what they
        bring. All rows get equally many tokens, so one that ends cuts those of the others, too, which in an engine go on."""
        per_row = self.latest.tokens_per_row
        return self.latest.added_s(speed, num_rows) * (1 - (num_tokens - 1) / (per_row - 1)) if per_row > 1 else 0.0

    def num_tokens(self, rows: Rows, num_free: int) -> int:
        """Return the tokens that a step with prompts gives each row: whole ones, as many in the mean as drafts bring. At most as
        many as no row ends before, and `num_free` blocks hold."""
        per_row = self.latest.tokens_per_row
        if per_row == 1 or not rows.members:
            return 1
        self._num_owed += per_row - 1
        found = rows.steps_within(num_free, min(rows.steps_to_end(), 1 + int(self._num_owed)))
        self._num_owed = min(self._num_owed - (found - 1), per_row)
        return found


# The TPOT budgets of a modelled worker's rows, and how much of prompts a step may hold beside them: the rules of
# `pdmesh/step_sharing.py`, for many rows at once. All rows have the same tokens of a step, from their first one.
#
# A row that began at `t` in step `s` is ahead by   pace · (step - s) - (now - t)  =  pace · step - now + key,   key = t - pace ·
# s: of all rows with one objective, the one with the least key leaves the least room, whatever the time. So there is a heap of
# keys for each objective, of which a mesh has few.


ROUNDING_S = 1e-9


class Paces:
    """Hold rows by objective; those without one are not kept. A step gives each row `tokens_per_step` lately."""

    def __init__(self) -> None:
        self.tokens_per_step = 1.0
        self._keys: dict[float, list[tuple[float, int, Sequence]]] = {}
        self._num_live: dict[float, int] = {}
        self._num_pushed = 0  # breaks ties of equal keys, so that sequences are not compared
        self._saved = SavedTokens()

    def enter(self, sequence: Sequence, step: int, now: float) -> None:
        """Add a sequence that begins to decode at `now`, in the step after `step`."""
        goal_s = sequence.goal_s
        if goal_s:
            self._num_live[goal_s] = self._num_live.get(goal_s, 0) + 1
            sequence.pace_step = step
            self._push(goal_s, now - PACE_TARGET * goal_s * step, sequence)

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence."""
        if sequence.pace_key is None:
            return
        goal_s, sequence.pace_key = sequence.goal_s, None
        self._num_live[goal_s] -= 1
        keys, num_live = self._keys[goal_s], self._num_live[goal_s]
        if not num_live:
            del self._keys[goal_s], self._num_live[goal_s]
        elif len(keys) > 2 * num_live + 64:
            self._keys[goal_s] = [entry for entry in keys if entry[2].pace_key == entry[0]]
            heapq.heapify(self._keys[goal_s])

    def tightest(self, decode_s: float, step: int, now: float, drafts_s: float = 0.0) -> Pace | None:
        """Return the tightest budget; None: no row has an objective that can be kept. `decode_s`: a step of the rows alone;
        `drafts_s`: what drafts add to it. Forgives rows too far behind."""
        paces = [self._pace(goal_s, step, now) for goal_s in self._keys]
        least_s = PACE_TARGET * (decode_s + drafts_s) / self.tokens_per_step
        return min([pace for pace in paces if pace.pace_s > least_s], key=lambda pace: pace.step_s, default=None)

    def prompt_tokens(
        self, prompt: Sequence, speed: LatencyModel, decode_s: float, step: int, now: float, drafts_s: float = 0.0
    ) -> int | None:
        """Return how many prompt tokens, the next of `prompt`, the next step may hold; None: as many as fit. `drafts_s`: what
        drafts add to it."""
        pace = self.tightest(decode_s, step, now, drafts_s)
        if pace is None:
            return None
        token_s, context_s, room_s = speed.per_prefill_token_s, speed.per_prefill_context_s, pace.prompts_s(decode_s + drafts_s)
        fitting = num_fitting(token_s, context_s, prompt.num_computed, prompt.num_remaining, room_s)
        return self._saved.take(fitting, prompt.num_remaining, drafting=self.tokens_per_step > DRAFTING)

    def _pace(self, goal_s: float, step: int, now: float) -> Pace:
        """Return the budget of the row with this objective that is ahead by least."""
        pace_s, slack_s = PACE_TARGET * goal_s, self._slack_s(goal_s, step, now)
        num_tokens = step - self._keys[goal_s][0][2].pace_step
        return Pace(pace_s, slack_s, self.tokens_per_step, pace_s * num_tokens)

    def _slack_s(self, goal_s: float, step: int, now: float) -> float:
        """Return the least slack of this objective, whose row is the first of its heap then."""
        keys, pace_s = self._keys[goal_s], PACE_TARGET * goal_s
        since_s = pace_s * step - now
        while True:
            key, _, sequence = keys[0]
            if sequence.pace_key != key:
                heapq.heappop(keys)  # it has left
            elif key + since_s < -FORGIVEN * pace_s - ROUNDING_S:
                heapq.heappop(keys)
                self._push(goal_s, -FORGIVEN * pace_s - since_s, sequence)
            else:
                return key + since_s

    def _push(self, goal_s: float, key: float, sequence: Sequence) -> None:
        sequence.pace_key = key
        self._num_pushed += 1
        heapq.heappush(self._keys.setdefault(goal_s, []), (key, self._num_pushed, sequence))
