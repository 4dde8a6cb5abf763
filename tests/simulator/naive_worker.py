"""The oracle of the modelled worker: every step by itself, every row by itself, nothing summed and nothing skipped."""

from dataclasses import dataclass, field

from pdmesh.planning.latency_model import Work, prefill_context
from pdmesh.simulator.workers.spec import WorkerSpec
from pdmesh.simulator.workers.worker import BLOCKS_PER_SPARE
from pdmesh.step_sharing import BEHIND_TARGET, FORGIVEN, LEAST_TOKENS, MAX_SHARE, PACE_TARGET, SPREAD


@dataclass(frozen=True)
class Job:
    """Comes at `at_s`. `is_prefill`: for somebody else, who lets go of it at once."""

    at_s: float
    num_input: int
    num_output: int
    goal_s: float = 0.0
    is_prefill: bool = False


@dataclass(eq=False)
class Row:
    """A job on the worker."""

    job: Job
    turn: int
    num_tokens: int
    num_left: int
    num_computed: int = 0
    num_blocks: int = 0
    has_drawn: bool = False
    paced_from: float | None = None
    num_paced: int = 0
    was_preempted: bool = False
    first_at: float | None = None
    last_at: float | None = None


@dataclass
class NaiveWorker:
    """`run` answers for each job when its first and its last token were drawn; None for both: it was refused."""

    spec: WorkerSpec
    decoding: list[Row] = field(default_factory=list)
    prompts: list[Row] = field(default_factory=list)
    waiting: list[Row] = field(default_factory=list)
    num_free: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_saved: int = 0
    num_without: int = 0

    def run(self, jobs: list[Job]) -> list[tuple[float | None, float | None]]:
        """In the order of `jobs`, which come by time."""
        self.num_free = self.spec.num_blocks
        rows = [Row(job, turn, job.num_input, job.num_output) for turn, job in enumerate(jobs)]
        coming, now = list(rows), 0.0
        while coming or self.decoding or self.prompts or self.waiting:
            while coming and coming[0].job.at_s <= now:
                self._take(coming.pop(0))
            lasts_s = self._step(now)
            if lasts_s is None:
                assert coming, "it stands still"
                now = max(now, coming[0].job.at_s)
            else:
                now += lasts_s + self.spec.between_s
                self._finish(now)
        return [(row.first_at, row.last_at) for row in rows]

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.spec.block_size)

    def _spare(self) -> int:
        return min(len(self.decoding) + len(self.prompts), max(1, self.spec.num_blocks // BLOCKS_PER_SPARE))

    def _take(self, row: Row) -> None:
        if len(self.decoding) + len(self.prompts) + len(self.waiting) >= self.spec.max_num_seqs:
            return
        if row.job.is_prefill:
            self.waiting.append(row)
            return
        owed = sum(self._blocks(other.num_tokens) for other in self.waiting if other.was_preempted)
        if self._blocks(row.num_tokens) + self._spare() + owed <= self.num_free:
            row.num_blocks = self._blocks(row.num_tokens)
            self.num_free -= row.num_blocks
            self.prompts.append(row)
            self.prompts.sort(key=lambda row: row.turn)

    def _step(self, now: float) -> float | None:
        """Plans one; how long it takes. None: there is nothing to do."""
        self.pieces: list[tuple[Row, int]] = []
        has_preempted = self._grow()
        decode_s = self.spec.speed.decode_s(len(self.decoding), sum(row.num_tokens for row in self.decoding))
        self._start_paces(now)
        budget = self.spec.max_num_batched_tokens - len(self.decoding)
        first = next(iter(self.prompts or self.waiting), None)
        if first is not None:
            budget = min(budget, self._paced(first, decode_s, now, budget))
        if not has_preempted:
            budget -= self._short(budget)
        planned = [row for row, _ in self.pieces]
        for row in [row for row in self.prompts if row not in planned]:
            budget = self._piece(row, budget)
        if not (has_preempted and (self.decoding or self.prompts)):
            while budget > 0 and self.waiting and self._blocks(self.waiting[0].num_tokens) + self._spare() <= self.num_free:
                row = self.waiting.pop(0)
                row.num_blocks = self._blocks(row.num_tokens)
                self.num_free -= row.num_blocks
                self.prompts.append(row)
                self.prompts.sort(key=lambda row: row.turn)
                budget = self._piece(row, budget)
        if not self.pieces and not self.decoding:
            return None
        tokens = sum(num for _, num in self.pieces)
        context = sum(prefill_context(row.num_computed, row.num_computed + num) for row, num in self.pieces)
        return self.spec.speed.step_s(Work(tokens, context, len(self.decoding), sum(row.num_tokens for row in self.decoding)))

    def _short(self, budget: int) -> int:
        """Plans prompts that need at most half of the oldest one's tokens, in what it leaves of the step; it has half of it."""
        prompts = sorted([*self.prompts, *self.waiting], key=lambda row: row.turn)
        if not prompts:
            return 0
        lacks = {row.turn: row.num_tokens - row.num_computed for row in prompts}
        left = share = budget - min(lacks[prompts[0].turn], -(-budget // 2))
        for row in sorted(prompts, key=lambda row: (lacks[row.turn], row.turn)):
            if left == 0 or lacks[row.turn] > lacks[prompts[0].turn] / 2:
                break
            if row in self.waiting:
                kept = 0 if row is self.waiting[0] else self._blocks(self.waiting[0].num_tokens)
                if self._blocks(row.num_tokens) + self._spare() + kept > self.num_free:
                    break
                self.waiting.remove(row)
                row.num_blocks = self._blocks(row.num_tokens)
                self.num_free -= row.num_blocks
                self.prompts.append(row)
                self.prompts.sort(key=lambda row: row.turn)
            left = self._piece(row, left)
        return share - left

    def _piece(self, row: Row, budget: int) -> int:
        num = min(budget, row.num_tokens - row.num_computed)
        if num > 0:
            self.pieces.append((row, num))
        return budget - max(0, num)

    def _grow(self) -> bool:
        """A block for whoever needs one; the latest makes way."""
        before = self.num_preemptions
        while sum(self._blocks(row.num_tokens) > row.num_blocks for row in self.decoding) > self.num_free:
            self._preempt(
                max([*self.decoding, *(row for row in self.prompts if not row.job.is_prefill)], key=lambda row: row.turn)
            )
        for row in self.decoding:
            self.num_free -= self._blocks(row.num_tokens) - row.num_blocks
            row.num_blocks = self._blocks(row.num_tokens)
        return self.num_preemptions > before

    def _preempt(self, row: Row) -> None:
        self.num_preemptions += 1
        (self.decoding if row in self.decoding else self.prompts).remove(row)
        self._free(row)
        row.num_computed, row.was_preempted, row.paced_from = 0, True, None
        self.waiting.append(row)
        self.waiting.sort(key=lambda row: row.turn)

    def _free(self, row: Row) -> None:
        self.num_free += row.num_blocks
        row.num_blocks = 0

    def _slack_s(self, row: Row, now: float) -> float:
        assert row.paced_from is not None
        return PACE_TARGET * row.job.goal_s * row.num_paced - (now - row.paced_from)

    def _start_paces(self, now: float) -> None:
        for row in self.decoding:
            if row.job.goal_s and row.paced_from is None:
                row.paced_from, row.num_paced = now, 0
            if row.job.goal_s and row.paced_from is not None:
                row.paced_from += max(0.0, -FORGIVEN * PACE_TARGET * row.job.goal_s - self._slack_s(row, now))

    def _paced(self, first: Row, decode_s: float, now: float, budget: int) -> int:
        goals = [row for row in self.decoding if row.job.goal_s > decode_s]
        if not goals or not self.spec.keeps_pace:
            return budget
        row = min(goals, key=lambda row: PACE_TARGET * row.job.goal_s + self._slack_s(row, now) / SPREAD)
        step_s = PACE_TARGET * row.job.goal_s + self._slack_s(row, now) / SPREAD
        kept = max(BEHIND_TARGET, (1 + decode_s / row.job.goal_s) / 2)
        reserve_s = self._slack_s(row, now) + (kept - PACE_TARGET) * row.job.goal_s * row.num_paced
        spare_s = kept * row.job.goal_s + min(0.0, reserve_s) / SPREAD - decode_s
        room_s = max(min(decode_s * (1 - MAX_SHARE) / MAX_SHARE, spare_s), step_s - decode_s)
        speed, num_tokens, behind = self.spec.speed, 0.0, 0.0
        for _ in range(2):
            num_tokens = room_s / (speed.per_prefill_token_s + speed.per_prefill_context_s * (first.num_computed + behind))
            behind = min(num_tokens, first.num_tokens - first.num_computed) / 2
        self.num_saved, self.num_without = self.num_saved + max(0, int(num_tokens)), self.num_without + 1
        lacks = first.num_tokens - first.num_computed
        if self.num_without < SPREAD and self.num_saved < LEAST_TOKENS - 1 and self.num_saved < lacks:
            return 0
        self.num_saved = self.num_without = 0
        return max(LEAST_TOKENS, int(num_tokens))

    def _finish(self, now: float) -> None:
        self.num_steps += 1
        for row in list(self.decoding):
            row.num_paced += 1
            self._draw(row, now)
        for row, num in self.pieces:
            row.num_computed += num
            if row.num_computed == row.num_tokens:
                self.prompts.remove(row)
                self._draw(row, now)

    def _draw(self, row: Row, now: float) -> None:
        row.num_tokens += 1
        row.num_left -= 1
        row.first_at = now if row.first_at is None else row.first_at
        row.last_at = now
        if row.num_left == 0 or row.job.is_prefill:
            self._free(row)
            if row in self.decoding:
                self.decoding.remove(row)
        elif row not in self.decoding:
            self.decoding.append(row)
