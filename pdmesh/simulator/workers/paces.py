"""The pace that a modelled worker's rows were promised, and how much of prompts a step may hold beside them: the rules of
`engine/pacing.py`, for many rows at once. Pure.

A row that began at `t` in step `s` is ahead by   pace · (step - s) - (now - t)  =  pace · step - now + key,   key = t - pace · s:
of all rows with one objective, the one with the least key leaves the least room, whatever the time. So there is a heap of keys
for each objective, of which a mesh has few.
"""

import heapq
from typing import NamedTuple

from pdmesh.planning.latency_model import LatencyModel
from pdmesh.planning.pace_rules import FORGIVEN, LEAST_TOKENS, MAX_SHARE, PACE_TARGET, SPREAD
from pdmesh.simulator.workers.sequence import Sequence

ROUNDING_S = 1e-9


class Pace(NamedTuple):
    """Of the row that leaves least room: a token every `pace_s`, ahead of that by `slack_s` (behind: below zero)."""

    pace_s: float
    slack_s: float

    @property
    def step_s(self) -> float:
        """How long the next step may take."""
        return self.pace_s + self.slack_s / SPREAD


class Paces:
    """Rows by objective. Those without one are not kept."""

    def __init__(self) -> None:
        self._keys: dict[float, list[tuple[float, int, Sequence]]] = {}
        self._num_live: dict[float, int] = {}
        self._num_pushed = 0  # of equal keys, so that sequences are not compared

    def enter(self, sequence: Sequence, step: int, now: float) -> None:
        """It begins to decode at `now`, in the step after `step`."""
        goal_s = sequence.goal_s
        if goal_s:
            self._num_live[goal_s] = self._num_live.get(goal_s, 0) + 1
            self._push(goal_s, now - PACE_TARGET * goal_s * step, sequence)

    def leave(self, sequence: Sequence) -> None:
        """It decodes no longer."""
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

    def tightest(self, decode_s: float, step: int, now: float) -> Pace | None:
        """None: nobody was promised anything that can be kept. `decode_s`: a step of the rows alone. Forgives those too far
        behind."""
        paces = [Pace(PACE_TARGET * goal_s, self._slack_s(goal_s, step, now)) for goal_s in self._keys]
        return min([pace for pace in paces if pace.pace_s > PACE_TARGET * decode_s], key=lambda pace: pace.step_s, default=None)

    def prompt_tokens(self, prompt: Sequence, speed: LatencyModel, decode_s: float, step: int, now: float) -> int | None:
        """Of prompts, the next of which is `prompt`, the next step may hold so many; None: as many as fit."""
        pace = self.tightest(decode_s, step, now)
        if pace is None:
            return None
        least_s = min(decode_s * (1 - MAX_SHARE) / MAX_SHARE, pace.pace_s / PACE_TARGET - decode_s)
        return max(LEAST_TOKENS, _fitting(speed, prompt, max(least_s, pace.step_s - decode_s)))

    def _slack_s(self, goal_s: float, step: int, now: float) -> float:
        """The least of this objective."""
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


def _fitting(speed: LatencyModel, prompt: Sequence, room_s: float) -> int:
    """Tokens of `prompt`, and of those behind it, that take so long."""
    num_tokens = num_behind = 0.0
    for _ in range(2):
        token_s = speed.per_prefill_token_s + speed.per_prefill_context_s * (prompt.num_computed + num_behind)
        if token_s <= 0:
            return prompt.num_remaining
        num_tokens = room_s / token_s
        num_behind = min(num_tokens, prompt.num_remaining) / 2
    return int(num_tokens)
