"""How busy this worker is, as it tells routers."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from pdmesh.engine.engine import Engine
from pdmesh.engine.loop import EngineLoop
from pdmesh.engine.outputs import EngineStats, StepResult
from pdmesh.v1 import worker_pb2
from pdmesh.worker.latency import StepWatch, latency_message
from pdmesh.worker.roles import RoleGate
from pdmesh.worker.speculation import RecentDrafts, speculation_message

REFRESH_S = 0.1


class LoadReporter:
    """Keeps the engine's counts fresh; reading a report never waits for the engine.

    While it steps they come with the steps. Asked for are only those that have grown old without any.
    """

    def __init__(
        self,
        engine: EngineLoop,
        gate: RoleGate,
        first: EngineStats,
        watch: StepWatch,
        *,
        worker_id: str,
        epoch: int,
        max_num_seqs: int,
        num_handoff_failures: Callable[[], int],
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._engine = engine
        self._gate = gate
        self._stats = first
        self._drafts = RecentDrafts()
        self._watch = watch
        self._worker_id = worker_id
        self._epoch = epoch
        self._max_num_seqs = max_num_seqs
        self._num_handoff_failures = num_handoff_failures
        self._clock_ns = clock_ns

    async def run(self) -> None:
        """Refreshes until cancelled."""
        while True:
            if self._age_s() >= REFRESH_S / 2:
                self._take(await self._engine.call(Engine.stats))
            await asyncio.sleep(REFRESH_S)

    @property
    def stats(self) -> EngineStats:
        """As of the last step, or of the last refresh."""
        return self._stats

    def on_step(self, result: StepResult) -> None:
        """Called on the event loop, step by step."""
        if result.stats is not None:
            self._take(result.stats)

    def _take(self, stats: EngineStats) -> None:
        if stats.taken_ns >= self._stats.taken_ns:
            self._stats = stats
            if stats.speculation is not None:
                self._drafts.take(stats.speculation)

    def _age_s(self) -> float:
        return max(0, self._clock_ns() - self._stats.taken_ns) / 1e9

    def report(self) -> worker_pb2.LoadReport:
        """As of the last step, or of the last refresh without any; roles and draining as of now."""
        stats, model = self._stats, self._watch.model
        return worker_pb2.LoadReport(
            worker_id=self._worker_id,
            epoch=self._epoch,
            roles=self._gate.roles,
            draining=self._gate.draining,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_reserved=stats.num_reserved,
            num_held=stats.num_held,
            num_free_blocks=stats.num_free_blocks,
            num_total_blocks=stats.num_total_blocks,
            num_cached_blocks=stats.num_cached_blocks,
            num_waiting_tokens=stats.num_waiting_tokens,
            num_steps=stats.num_steps,
            num_generated_tokens=stats.num_generated_tokens,
            num_prefilled_tokens=stats.num_prefilled_tokens,
            num_prefix_hit_tokens=stats.num_prefix_hit_tokens,
            num_preemptions=stats.num_preemptions,
            num_handoff_failures=self._num_handoff_failures(),
            max_num_seqs=self._max_num_seqs,
            latency_model=None if model is None else latency_message(model),
            num_decoding=stats.num_decoding,
            decode_context=stats.decode_context,
            num_prefilling=stats.num_prefilling,
            pace_s=stats.pace_s,
            slack_s=stats.slack_s,
            speculation=None if stats.speculation is None else speculation_message(self._drafts),
            age_ms=math.ceil(1000 * self._age_s()),
        )
