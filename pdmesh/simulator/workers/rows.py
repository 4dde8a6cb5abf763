"""The sequences of a worker that decode, as sums: each gets a token in every step, so many steps count as fast as one. Pure.

context at step s      = context now + number of rows · (s - now)
a row ends             at a step that is known when it enters: a heap
a row takes a block    in every `block_size`-th step: rows are counted by the remainder at which it does
"""

import heapq

from pdmesh.simulator.workers.sequence import Sequence


class Rows:
    """`step` counts the steps in which anybody decoded. `context`: tokens that all of them attend to in the next one."""

    def __init__(self, block_size: int) -> None:
        self.step = 0
        self.context = 0
        self.members: dict[Sequence, None] = {}
        self._endings: list[tuple[int, int, Sequence]] = []
        self._growing = [0] * block_size
        self._block_size = block_size
        self._num_entered = 0  # of equal steps, so that sequences are not compared

    def __len__(self) -> int:
        return len(self.members)

    def enter(self, sequence: Sequence) -> None:
        """All its tokens are computed but the one that was drawn last; `num_left` more are to be drawn, at least one."""
        sequence.entry_step, sequence.end_step = self.step, self.step + sequence.num_left
        self.members[sequence] = None
        self.context += sequence.num_tokens
        self._growing[self._remainder(sequence)] += 1
        heapq.heappush(self._endings, (sequence.end_step, self._num_entered, sequence))
        self._num_entered += 1

    def leave(self, sequence: Sequence) -> None:
        """It decodes no longer; says in the sequence how far it came."""
        del self.members[sequence]
        self._growing[self._remainder(sequence)] -= 1
        num_drawn = self.step - sequence.entry_step
        sequence.num_tokens += num_drawn
        sequence.num_left -= num_drawn
        self.context -= sequence.num_tokens
        sequence.end_step = None

    def advance(self, num_steps: int) -> list[Sequence]:
        """So many steps are done, at most `steps_to_end`; returns those that have drawn their last token, who have left."""
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
        """Until the next row ends; there is one."""
        endings = self._endings
        while endings[0][2].end_step != endings[0][0]:
            heapq.heappop(endings)  # it was preempted
        return endings[0][0] - self.step

    @property
    def next_growth(self) -> int:
        """Blocks that the next step takes."""
        return self._growing[-self.step % self._block_size]

    def growth(self, num_steps: int) -> int:
        """Blocks that the next so many steps take."""
        size, growing = self._block_size, self._growing
        cycles, rest = divmod(num_steps, size)
        end = -self.step % size + 1  # remainders take their turn downwards from the one before it, round
        if rest <= end:
            return cycles * len(self.members) + sum(growing[end - rest : end])
        return cycles * len(self.members) + sum(growing[:end]) + sum(growing[end - rest :])

    def steps_within(self, num_free: int, num_steps: int) -> int:
        """How many of the next `num_steps` there are blocks for."""
        if self.growth(num_steps) <= num_free:
            return num_steps
        done = num_free // len(self.members) * self._block_size
        while self.growth(done + 1) <= num_free:
            done += 1
        return done

    def latest(self) -> Sequence | None:
        """The one that arrived last; None without any. Looks at all."""
        return max(self.members, key=lambda sequence: sequence.turn, default=None)

    def _remainder(self, sequence: Sequence) -> int:
        return (sequence.num_tokens - 1 - sequence.entry_step) % self._block_size
