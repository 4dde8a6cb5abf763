"""The load that this worker reports to routers: engine counts, speculation, and a latency model that is fitted to steps."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtransfer.tiers.rate import ToldTime
from pdmesh.engine.interface import ServingEngine
from pdmesh.engine.outputs import EngineStats, StepResult
from pdmesh.engine.speculation.stats import ProposerStats, SpeculationStats
from pdmesh.planning.latency_fit import LatencyFit
from pdmesh.planning.latency_message import latency_message
from pdmesh.planning.latency_model import LatencyModel, Work
from pdmesh.v1 import common_pb2, worker_pb2
from pdmesh.worker.engines.base import StepPacer
from pdmesh.worker.roles import RoleGate

# Speculation on this worker, for routers: counts since start, and recent means.

HALF_LIFE_ROWS = 256
"""The number of rows after which a result weighs half."""
FIRST_ROWS = 16
"""The weight, in rows of one token, of the value before the first result."""


class RecentDrafts:
    """Hold two recent means over rows (a sequence's part of a step): the tokens that a row produces, and the tokens computed for
    it. Both are at least 1."""

    def __init__(self) -> None:
        self.stats = SpeculationStats()
        self.tokens_per_row = self.computed_per_row = 1.0

    def take(self, stats: SpeculationStats) -> None:
        """Update the means from the present counts; the difference to the previous counts is the newest sample."""
        num_rows, num_tokens = stats.num_rows - self.stats.num_rows, stats.num_tokens - self.stats.num_tokens
        num_computed = num_rows + _num_verified(stats) - _num_verified(self.stats)
        self.stats = stats
        if num_rows:
            share = max(1 - 0.5 ** (num_rows / HALF_LIFE_ROWS), num_rows / (stats.num_rows + FIRST_ROWS))
            self.tokens_per_row += share * (num_tokens / num_rows - self.tokens_per_row)
            self.computed_per_row += share * (num_computed / num_rows - self.computed_per_row)


def _num_verified(stats: SpeculationStats) -> int:
    return sum(proposer.num_verified for proposer in stats.by_proposer.values())


def speculation_message(recent: RecentDrafts) -> worker_pb2.SpeculationReport:
    """Return the speculation report for routers."""
    stats = recent.stats
    return worker_pb2.SpeculationReport(
        tokens_per_row=recent.tokens_per_row,
        computed_per_row=recent.computed_per_row,
        num_rows=stats.num_rows,
        num_drafts=stats.num_drafts,
        num_tokens=stats.num_tokens,
        drafting_s=stats.drafting_s,
        proposers=[_proposer_report(name, counts) for name, counts in stats.by_proposer.items()],
        failed_proposers=stats.failed,
    )


def _proposer_report(name: str, counts: ProposerStats) -> worker_pb2.ProposerReport:
    """Return a proposer's counts by depth, up to the greatest depth of its drafts so far."""
    deepest = max((depth for depth, count in enumerate(counts.verified, start=1) if count), default=0)
    return worker_pb2.ProposerReport(name=name, verified=counts.verified[:deepest], kept=counts.kept[:deepest])


# This worker's latency model: the machine's limits at start, then fitted to each step.

TELL_STEPS = 32
"""After this number of steps the engine gets the fitted cost."""


class StepWatch:
    """Fit the latency model to steps. Steps and queries come on the event loop; the engine thread waits for neither."""

    def __init__(self, pacer: StepPacer | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Create it. `pacer` gets the fitted cost of steps, by which the engine limits their prompt tokens. `clock`: seconds."""
        self._pacer = pacer
        self._clock = clock
        self._fit: LatencyFit | None = None
        self._num_seen = 0

    def start_from(self, prior: LatencyModel) -> None:
        """Set the latency model that holds before the first step."""
        self._fit = LatencyFit(prior)
        self._set_pacer_cost()

    def on_step(self, result: StepResult) -> None:
        """Fit the model to a step. Time between steps, idle or not, does not count."""
        if self._fit is not None:
            self._fit.observe(Work(*result.work), (result.ended_ns - result.started_ns) / 1e9)
            self._num_seen += 1
            if self._num_seen % TELL_STEPS == 0:
                self._set_pacer_cost()

    @property
    def model(self) -> LatencyModel | None:
        """Return the fitted latency model; None before `start_from`."""
        return None if self._fit is None else self._fit.model(self._clock())

    def prefill_s(self, first: int, last: int, chunk: int) -> float | None:
        """Return how long the computation of a prompt's tokens `first` to `last` should take; None before `start_from`."""
        model = self.model
        return None if model is None else model.prefill_s(first, last, chunk=chunk)

    def longest_step_s(self, chunk: int) -> float:
        """Return how long a step of `chunk` prompt tokens is expected to take: a step under way is not stuck before."""
        model = self.model
        return 0.0 if model is None else model.longest_step_s(chunk)

    def _set_pacer_cost(self) -> None:
        model = self.model
        if self._pacer is None or model is None:
            return
        self._pacer.set_cost(model)


REFRESH_S = 0.1


class LoadReporter:
    """Keep the engine's counts fresh; reading a report never waits for the engine.

    Counts come with each step. Only while there are no steps, the reporter asks the engine for them.
    """

    def __init__(
        self,
        engine: ServingEngine,
        gate: RoleGate,
        first: EngineStats,
        watch: StepWatch,
        *,
        worker_id: str,
        epoch: int,
        max_num_seqs: int,
        num_handoff_failures: Callable[[], int],
        restore_token_s: Callable[[], float] | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`restore_token_s()`: how long a token's KV takes to come from the worker's tiers; None: it has none."""
        self._engine = engine
        self._gate = gate
        self._stats = first
        self._drafts = RecentDrafts()
        self._watch = watch
        self._worker_id = worker_id
        self._epoch = epoch
        self._max_num_seqs = max_num_seqs
        self._num_handoff_failures = num_handoff_failures
        self._restore_token_s, self._told_restore = restore_token_s, ToldTime()
        self.adapters: Sequence[common_pb2.AdapterInfo] = ()  # that requests may ask for now
        self.weights_hash = ""  # that of the identity, until the weights are replaced
        self._clock_ns = clock_ns

    async def run(self) -> None:
        """Refresh until cancelled."""
        while True:
            if self._age_s() >= REFRESH_S / 2:
                self._take(await self._engine.stats())
            await asyncio.sleep(REFRESH_S)

    @property
    def stats(self) -> EngineStats:
        """Return the counts of the last step, or of the last refresh."""
        return self._stats

    def on_step(self, result: StepResult) -> None:
        """Store the counts of a step, on the event loop."""
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
        """Return the report, with counts of the last step or refresh, and the present roles and draining."""
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
            oldest_prompt_tokens=stats.num_oldest_tokens,
            num_retained_blocks=stats.num_retained_blocks,
            pace_s=stats.pace_s,
            slack_s=stats.slack_s,
            speculation=None if stats.speculation is None else speculation_message(self._drafts),
            age_ms=math.ceil(1000 * self._age_s()),
            adapters=self.adapters,
            weights_hash=self.weights_hash,
            serving_state=self._gate.serving,
            abort_id=self._gate.abort_id,
            restore_token_s=None if self._restore_token_s is None else self._told_restore.told(self._restore_token_s()),
        )


# How evenly a model's experts are used: tokens by expert within the last minute, and what is shown of them.
#
# A model has hundreds of experts in dozens of layers, so no metric has a series for each: quantiles over all of them, and the
# imbalance, a layer's busiest expert over its mean, which is how much longer than with even use that layer takes where experts
# are split over devices.


WINDOW_S = 60.0
KEPT = 12  # looks of a window, however many there are
QUANTILES = (0.0, 0.5, 0.9, 1.0)


@dataclass(frozen=True)
class ExpertLoad:
    """Hold what is shown. `num_tokens`: since start, a token counted once for each expert that it took; the others are of the
    window, empty before its first token. `loads`: an expert's tokens over the mean of its layer, by quantile."""

    num_tokens: int
    loads: dict[float, float]
    imbalances: dict[str, float]  # over layers: mean, max
    idle_share: float = 0.0


class ExpertWindow:
    """Keep the counts of earlier looks, to subtract them from the present ones."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, Tensor]] = deque()

    def take(self, counts: Tensor, now_s: float) -> ExpertLoad:
        """Return the load. `counts` [layers, num_experts] int64, since start; it may go on counting."""
        counts = counts.clone()
        while len(self._seen) > 1 and self._seen[1][0] <= now_s - self._window_s:
            self._seen.popleft()
        recent = counts - self._seen[0][1] if self._seen else counts
        if not self._seen or now_s - self._seen[-1][0] >= self._window_s / KEPT:
            self._seen.append((now_s, counts))
        return _load(int(counts.sum()), recent)


def _load(num_tokens: int, recent: Tensor) -> ExpertLoad:
    used = recent[recent.sum(1) > 0].double()
    if not len(used):
        return ExpertLoad(num_tokens, {}, {})
    loads = used / used.mean(1, keepdim=True)
    most = loads.amax(1)
    quantiles = torch.quantile(loads.flatten(), torch.tensor(QUANTILES, dtype=loads.dtype)).tolist()
    return ExpertLoad(
        num_tokens,
        dict(zip(QUANTILES, quantiles, strict=True)),
        {"mean": float(most.mean()), "max": float(most.max())},
        float((used == 0).double().mean()),
    )
