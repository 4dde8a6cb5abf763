"""Statistics of the engine: how many requests are in which state, on demand and with steps."""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.engine.kv_cache.block_manager import BlockAllocator
from pdmesh.engine.outputs import EngineStats
from pdmesh.engine.scheduler.requests import RequestTable
from pdmesh.engine.scheduler.scheduler import Scheduler, TpotLimiter
from pdmesh.engine.scheduler.sequence import Phase, Sequence, SequenceGroup
from pdmesh.engine.speculation.stats import Tally

# While no request comes or goes, short steps do not need new statistics each: they only lengthen contexts by a token.
PERIOD_NS = 10_000_000


@dataclass
class Counters:
    """Count since start."""

    num_steps: int = 0
    num_generated_tokens: int = 0
    num_prefilled_tokens: int = 0


class EngineStatsCollector:
    """Collect statistics of everything that the engine holds; a microsecond for each sequence."""

    def __init__(
        self,
        counters: Counters,
        table: RequestTable,
        scheduler: Scheduler,
        allocator: BlockAllocator,
        pacer: TpotLimiter,
        tally: Tally | None = None,
    ) -> None:
        self._counters = counters
        self._tally = tally
        self._table = table
        self._scheduler = scheduler
        self._allocator = allocator
        self._pacer = pacer
        self._taken_ns = 0
        self._population = (0, 0, 0)

    def take_if_due(self, now_ns: int) -> EngineStats | None:
        """Return statistics if a request came or went since the last ones, or those are `PERIOD_NS` old; else None."""
        if self._population == self._count() and now_ns - self._taken_ns < PERIOD_NS:
            return None
        return self.take(now_ns)

    def take(self, now_ns: int) -> EngineStats:
        """Return the statistics of now, which is `now_ns`."""
        self._taken_ns, self._population = now_ns, self._count()
        running, waiting, pool = self._scheduler.running, self._scheduler.waiting, self._allocator.pool
        decoding, decode_context = [], 0
        for sequence in running:
            if sequence.output and sequence.num_computed + 1 == (num_tokens := sequence.num_tokens):  # is_decoding
                decoding.append(sequence)
                decode_context += num_tokens
        num_decoding, pace = len(decoding), self._pacer.tightest(decoding, now_ns)
        groups = list(self._table)  # copied at once: the engine's thread may add to it meanwhile
        idle = [group for group in groups if group.phase is not Phase.ACTIVE]
        return EngineStats(
            taken_ns=now_ns,
            num_running=_num_choices(running),
            num_waiting=_num_choices(waiting),
            num_reserved=sum(group.num_seats for group in idle if group.phase is Phase.RESERVED),
            num_held=sum(group.phase is Phase.HELD for group in idle),
            num_free_blocks=pool.num_free,
            num_total_blocks=pool.num_total,
            num_cached_blocks=pool.num_cached,
            num_waiting_tokens=_num_to_prefill(running) + _num_to_prefill(waiting),
            num_decoding=num_decoding,
            decode_context=decode_context,
            pace_s=self._promised_s(groups, decoding) if pace is None else pace.pace_s,
            slack_s=0.0 if pace is None else pace.slack_s,
            num_prefilling=len(running) - num_decoding + len(waiting),
            num_steps=self._counters.num_steps,
            num_generated_tokens=self._counters.num_generated_tokens,
            num_prefilled_tokens=self._counters.num_prefilled_tokens,
            num_prefix_hit_tokens=self._allocator.num_prefix_hit_tokens,
            num_preemptions=self._scheduler.num_preemptions,
            speculation=None if self._tally is None else self._tally.stats(),
        )

    def _promised_s(self, groups: list[SequenceGroup], decoding: list[Sequence]) -> float:
        return self._pacer.promised_s((sequence for group in groups for sequence in group.sequences), decoding)

    def _count(self) -> tuple[int, int, int]:
        return len(self._scheduler.running), len(self._scheduler.waiting), len(self._table)


def _num_choices(sequences: list[Sequence]) -> int:
    return sum([len(sequence.choices) for sequence in sequences])


def _num_to_prefill(sequences: list[Sequence]) -> int:
    # The property's arithmetic, without calling it for each sequence.
    return sum([max(0, sequence.num_to_restore - sequence.num_computed) for sequence in sequences])
