"""A worker's metrics: a few counts per step and per hand-off; other values are read from its state at each scrape.

Utilization is a quotient of a counter's rate and a measured limit, so it can be computed for any window and any set of workers:

    MFU                    = rate(pdmesh_engine_operations_total) / pdmesh_engine_peak_operations
    bandwidth utilization  = rate(pdmesh_engine_moved_bytes_total) / pdmesh_engine_peak_bandwidth
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from kvtransfer.sender.push import PushResult
from kvtransfer.tiers.tiers import KVTiers
from pdmesh.engine.hardware import MachineLimits, ModelCost
from pdmesh.engine.outputs import CoreSeconds, EngineStats, StepResult, StepWork
from pdmesh.engine.speculation.stats import SpeculationStats
from pdmesh.planning.latency_model import attended_share, distinct_experts
from pdmesh.runtime.telemetry.config import resource_of
from pdmesh.runtime.telemetry.metrics import Metrics, Reader, Readings, counter, gauge, histogram
from pdmesh.runtime.telemetry.open_metrics import open_metrics
from pdmesh.v1 import worker_pb2
from pdmesh.worker.config import WorkerConfig
from pdmesh.worker.load import ExpertLoad
from prefill_service.kv_pull import PullCounts

# The list of metrics.

_STEP_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
_BATCH = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
_TRANSFER_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

STEP_TIME = histogram(
    "pdmesh.engine.step", "Duration of a step, by what it computed: prefill, decode, mixed", _STEP_S, ("kind",), unit="s"
)
BATCH_SEQUENCES = histogram("pdmesh.engine.batch.sequences", "Decoding sequences of a step, where there are any", _BATCH)
BATCH_TOKENS = histogram("pdmesh.engine.batch.tokens", "Tokens that a step computes", _BATCH)
OPERATIONS = counter("pdmesh.engine.operations", "Operations of the model; a multiplication and an addition are two")
BYTES_MOVED = counter("pdmesh.engine.moved", "Weights and KV that steps read and wrote, by the model's shape", unit="By")
BUSY = counter("pdmesh.engine.busy", "Time in steps", unit="s")
CORES = counter(
    "pdmesh.engine.shared.core",
    "Core time that workers of a host shared: lent, others held this one's cores; borrowed, the reverse",
    ("direction",),
    unit="s",
)
PEAK_OPERATIONS = gauge("pdmesh.engine.peak.operations", "Measured limit of operations per second")
PEAK_BANDWIDTH = gauge("pdmesh.engine.peak.bandwidth", "Measured limit of bytes read per second")

HANDOFF_TIME = histogram("pdmesh.kv.push", "From the beginning of a push to its commit", _TRANSFER_S, ("transport",), unit="s")
HANDOFF_EXPOSED = histogram(
    "pdmesh.kv.exposed", "From the first token's draw to the commit", _TRANSFER_S, ("transport",), unit="s"
)
HANDOFF_BYTES = counter("pdmesh.kv.sent", "KV that was pushed and committed", ("transport",), unit="By")
HANDOFF_EXPOSED_BYTES = counter("pdmesh.kv.sent.exposed", "KV that was sent after prefill had ended", ("transport",), "By")
HANDOFFS = counter("pdmesh.kv.handoffs", "Hand-offs that were committed, at the sender", ("transport",))
HANDOFF_FAILURES = counter("pdmesh.kv.handoff.failures", "Hand-offs that failed, at this end")
CORRUPT = counter("pdmesh.kv.corrupt.parts", "Parts whose checksum was wrong, at the receiver", ("transport",))
PULLS = counter("pdmesh.kv.pulls", "Times that KV was asked for at another worker, by how it ended", ("result",))
PULLED_TOKENS = counter("pdmesh.kv.pulled.tokens", "Prompt tokens whose KV came from another worker and was not computed")
PULLED_BYTES = counter("pdmesh.kv.pulled", "KV that came from another worker's prefix cache", unit="By")
WARMED_TOKENS = counter("pdmesh.kv.warmed.tokens", "Tokens whose KV came from other workers before a request asked for it")
WARMED_BYTES = counter("pdmesh.kv.warmed", "KV that came so", unit="By")
TIER_BYTES = gauge("pdmesh.kv.tier.size", "KV in a tier beneath the pool", ("tier",), unit="By")
TIER_CAPACITY = gauge("pdmesh.kv.tier.capacity", "KV that a tier may hold", ("tier",), unit="By")
TIER_BLOCKS = counter(
    "pdmesh.kv.tier.blocks",
    "Blocks of a tier: written, read; corrupt: removed and not used; failed: refused by the system",
    ("tier", "event"),
)
RESTORES = counter("pdmesh.kv.restores", "Times that KV came from the tiers for a prompt; late: it was given up", ("result",))
RESTORED_TOKENS = counter("pdmesh.kv.restored.tokens", "Prompt tokens whose KV came from the tiers and was not computed")
ROUNDED_TOKENS = counter("pdmesh.kv.rounded.tokens", "Those of the restored tokens whose KV the tiers have rounded")
LEASES_EXPIRED = counter("pdmesh.leases.expired", "Reservations that ended without progress")

SEQUENCES = gauge("pdmesh.engine.sequences", "Sequences by state: running, waiting, reserved, held", ("state",))
MAX_SEQUENCES = gauge("pdmesh.engine.max_sequences", "Most sequences at a time")
WAITING_TOKENS = gauge("pdmesh.engine.waiting.tokens", "Prompt tokens that are still to be computed")
BLOCKS = gauge("pdmesh.kv.blocks", "Blocks by state: free or used; cached, of which some are retained", ("state",))
BLOCKS_TOTAL = gauge("pdmesh.kv.blocks.capacity", "Blocks of the pool")
RETAINED_EVICTED = counter("pdmesh.kv.retained.evicted", "Retained blocks that were evicted before their time, for room")
STEPS = counter("pdmesh.engine.steps", "Steps")
TOKENS = counter(
    "pdmesh.engine.tokens", "Tokens: prefilled, cached (of prompts, found in the prefix cache), generated", ("kind",)
)
PREEMPTIONS = counter("pdmesh.engine.preemptions", "Sequences that gave their blocks up")
DRAFTED = counter("pdmesh.speculation.drafted", "Drafted tokens that were verified, by depth", ("proposer", "position"))
ACCEPTED = counter("pdmesh.speculation.accepted", "Drafted tokens that were accepted, by depth", ("proposer", "position"))
SPECULATION_ROWS = counter("pdmesh.speculation.rows", "Sequences' parts of steps while a proposer could draft")
SPECULATION_TOKENS = counter("pdmesh.speculation.tokens", "Tokens that these parts of steps produced")
DRAFTING = counter("pdmesh.speculation.drafting", "Time spent on drafting", unit="s")
VERIFYING = counter("pdmesh.speculation.verifying", "Time of steps that was spent on verifying drafted tokens", unit="s")
FAILED_PROPOSER = gauge("pdmesh.speculation.failed", "1: this proposer failed and is switched off", ("proposer",))
MODEL_ERROR = gauge("pdmesh.engine.latency.error", "Median error of the latency model, by kind of step", ("kind",), unit="1")
EXPERT_TOKENS = counter(
    "pdmesh.experts.tokens", "Tokens of experts: each token once for every expert that it took, in each layer"
)
EXPERT_LOAD = gauge(
    "pdmesh.experts.load", "Tokens of an expert over its layer's mean within a minute, over all experts", ("quantile",), unit="1"
)
EXPERT_IMBALANCE = gauge(
    "pdmesh.experts.imbalance", "Tokens of a layer's busiest expert over its mean within a minute", ("layers",), unit="1"
)
EXPERTS_IDLE = gauge("pdmesh.experts.idle", "Share of experts without a token within a minute", unit="1")
ROLES = gauge("pdmesh.worker.role", "1: the worker takes requests of this role", ("role",))
DRAINING = gauge("pdmesh.worker.draining", "1: the worker takes no new requests")

PER_STEP = (STEP_TIME, BATCH_SEQUENCES, BATCH_TOKENS, OPERATIONS, BYTES_MOVED, BUSY)
PER_HANDOFF = (HANDOFF_TIME, HANDOFF_EXPOSED, HANDOFF_BYTES, HANDOFF_EXPOSED_BYTES, HANDOFFS)
AT_SCRAPE = (
    PEAK_OPERATIONS, PEAK_BANDWIDTH, HANDOFF_FAILURES, CORRUPT, LEASES_EXPIRED, SEQUENCES, MAX_SEQUENCES, WAITING_TOKENS, BLOCKS,
    BLOCKS_TOTAL, RETAINED_EVICTED, STEPS, TOKENS, PREEMPTIONS, MODEL_ERROR, ROLES, DRAINING,
)  # fmt: skip
SPECULATION = (DRAFTED, ACCEPTED, SPECULATION_ROWS, SPECULATION_TOKENS, DRAFTING, VERIFYING, FAILED_PROPOSER)
EXPERTS = (EXPERT_TOKENS, EXPERT_LOAD, EXPERT_IMBALANCE, EXPERTS_IDLE)
KV_REUSE = (
    PULLS, PULLED_TOKENS, PULLED_BYTES, WARMED_TOKENS, WARMED_BYTES, TIER_BYTES, TIER_CAPACITY, TIER_BLOCKS, RESTORES,
    RESTORED_TOKENS, ROUNDED_TOKENS,
)  # fmt: skip
ALL = (*PER_STEP, *PER_HANDOFF, *AT_SCRAPE, CORES, *KV_REUSE, *SPECULATION, *EXPERTS)


_ROLES = {worker_pb2.ROLE_PREFILL: "prefill", worker_pb2.ROLE_DECODE: "decode"}


@dataclass(frozen=True)
class StepCounts:
    """Hold what steps cost, by the model's shape. A step reads all weights once, of experts those that its tokens are expected to
    choose; a token that decodes reads the keys and values that it attends to, and the tokens of a prefill chunk share what they
    read. What sliding windows hide is not counted, as of tokens that all have the mean context."""

    operations: int
    num_bytes: int

    @classmethod
    def of(cls, work: StepWork, cost: ModelCost) -> StepCounts:
        """Return the cost of one step."""
        num_tokens = work.prefill_tokens + work.num_decoding
        chunk_context = 2 * work.prefill_context // (work.prefill_tokens + 1) if work.prefill_tokens else 0
        prompts = _attended(cost, work.prefill_tokens, work.prefill_context)
        rows, chunk = _attended(cost, work.num_decoding, work.decode_context), _attended(cost, 1, chunk_context)
        products = 2 * (num_tokens * cost.num_weights + work.num_decoding * cost.num_head_weights)
        kv_tokens = num_tokens + rows + chunk  # written; read
        experts = round(cost.expert_bytes * distinct_experts(cost.num_experts, cost.top_k, num_tokens))
        moved = cost.weight_bytes + experts + kv_tokens * cost.kv_bytes_per_token
        return cls(products + (prompts + rows) * cost.attention_operations, moved)


def _attended(cost: ModelCost, num_tokens: int, context: int) -> int:
    """Return what so many tokens attend to of contexts that sum up to `context`, the mean over layers."""
    return round(context * attended_share(cost.reaches, cost.num_layers, context / max(1, num_tokens)))


@dataclass(frozen=True)
class Seen:
    """Hold the state that is read at a scrape."""

    stats: EngineStats
    report: worker_pb2.LoadReport
    limits: MachineLimits | None
    num_corrupt: dict[str, int]
    num_leases_expired: int
    experts: ExpertLoad | None = None  # of a model that has some
    pulls: PullCounts | None = None  # of a worker that fetches KV
    tiers: KVTiers | None = None  # beneath its pool
    cores: CoreSeconds | None = None  # where workers share cores


class WorkerMetrics:
    """Hold the metrics of one worker, on its event loop."""

    def __init__(self, metrics: Metrics, cost: ModelCost) -> None:
        self.metrics = metrics
        self.url = ""  # the address of the metrics from `start` on; "" if they are not served
        self._cost = cost

    @classmethod
    def open(cls, config: WorkerConfig, worker_id: str, epoch: int, cost: ModelCost, reader: Reader) -> WorkerMetrics:
        """Open the metrics that the configuration asks for; `reader` is called at each scrape. Raises ConfigError."""
        resource = resource_of(worker_id, config.mesh, config.roles, epoch)
        metrics = open_metrics(config.telemetry, "pdmesh-worker", resource, os.environ, host=config.host)
        metrics.read_by(reader)
        return cls(metrics, cost)

    async def start(self) -> None:
        """Start to serve and to export metrics. Raises ConfigError."""
        self.url = await self.metrics.start()

    async def stop(self) -> None:
        """Stop; idempotent."""
        await self.metrics.stop()

    def on_step(self, result: StepResult) -> None:
        """Count a step that has ended (takes some 10 µs)."""
        metrics, work = self.metrics, result.work
        if not metrics.is_on:
            return
        took_s = (result.ended_ns - result.started_ns) / 1e9
        metrics.observe(STEP_TIME, took_s, _kind(work))
        metrics.observe(BATCH_TOKENS, work.prefill_tokens + work.num_decoding)
        if work.num_decoding:
            metrics.observe(BATCH_SEQUENCES, work.num_decoding)
        counts = StepCounts.of(work, self._cost)
        metrics.add(OPERATIONS, counts.operations)
        metrics.add(BYTES_MOVED, counts.num_bytes)
        metrics.add(BUSY, took_s)

    def pushed(self, result: PushResult, exposed_ns: int) -> None:
        """Count a committed hand-off; its commit came `exposed_ns` after the first token."""
        metrics, transport = self.metrics, result.transport
        metrics.observe(HANDOFF_TIME, result.elapsed_ns / 1e9, transport)
        metrics.observe(HANDOFF_EXPOSED, exposed_ns / 1e9, transport)
        metrics.add(HANDOFF_BYTES, result.num_bytes, transport)
        metrics.add(HANDOFF_EXPOSED_BYTES, result.num_exposed_bytes, transport)
        metrics.add(HANDOFFS, 1, transport)


def read(readings: Readings, seen: Seen) -> None:
    """Write all values of a scrape into `readings`."""
    _read_engine(readings, seen.stats)
    _read_report(readings, seen.report)
    if seen.stats.speculation is not None:
        _read_speculation(readings, seen.stats.speculation)
    if seen.experts is not None:
        _read_experts(readings, seen.experts)
    for transport, count in seen.num_corrupt.items():
        readings.put(CORRUPT, count, transport)
    readings.put(LEASES_EXPIRED, seen.num_leases_expired)
    if seen.pulls is not None:
        readings.put(PULLS, seen.pulls.num_pulls, "taken")
        readings.put(PULLS, seen.pulls.num_failed, "failed")
        readings.put(PULLED_TOKENS, seen.pulls.num_tokens)
        readings.put(PULLED_BYTES, seen.pulls.num_bytes)
        readings.put(WARMED_TOKENS, seen.pulls.num_warmed_tokens)
        readings.put(WARMED_BYTES, seen.pulls.num_warmed_bytes)
    if seen.tiers is not None:
        _read_tiers(readings, seen.tiers)
    if seen.cores is not None:
        readings.put(CORES, seen.cores.lent, "lent")
        readings.put(CORES, seen.cores.borrowed, "borrowed")
    if seen.limits is not None:
        readings.put(PEAK_OPERATIONS, seen.limits.operations_per_s)
        readings.put(PEAK_BANDWIDTH, seen.limits.bytes_per_s)


def _read_tiers(readings: Readings, tiers: KVTiers) -> None:
    for tier in tiers.tiers:
        readings.put(TIER_BYTES, tier.num_bytes, tier.name)
        readings.put(TIER_CAPACITY, tier.max_bytes, tier.name)
        for event in ("written", "read", "corrupt", "failed"):
            readings.put(TIER_BLOCKS, getattr(tier.counts, f"num_{event}"), tier.name, event)
    readings.put(RESTORES, tiers.counts.num_restores, "taken")
    readings.put(RESTORES, tiers.counts.num_late, "late")
    readings.put(RESTORED_TOKENS, tiers.counts.num_tokens)
    readings.put(ROUNDED_TOKENS, tiers.counts.num_rounded_tokens)


def _read_engine(readings: Readings, stats: EngineStats) -> None:
    for state in ("running", "waiting", "reserved", "held"):
        readings.put(SEQUENCES, getattr(stats, f"num_{state}"), state)
    used = stats.num_total_blocks - stats.num_free_blocks
    for state, count in (
        ("free", stats.num_free_blocks),
        ("cached", stats.num_cached_blocks),
        ("used", used),
        ("retained", stats.num_retained_blocks),
    ):
        readings.put(BLOCKS, count, state)
    readings.put(BLOCKS_TOTAL, stats.num_total_blocks)
    readings.put(RETAINED_EVICTED, stats.num_retained_evicted)
    readings.put(WAITING_TOKENS, stats.num_waiting_tokens)
    readings.put(STEPS, stats.num_steps)
    for kind, count in (
        ("prefilled", stats.num_prefilled_tokens),
        ("cached", stats.num_prefix_hit_tokens),
        ("generated", stats.num_generated_tokens),
    ):
        readings.put(TOKENS, count, kind)
    readings.put(PREEMPTIONS, stats.num_preemptions)


def _read_report(readings: Readings, report: worker_pb2.LoadReport) -> None:
    for role, name in _ROLES.items():
        readings.put(ROLES, role in report.roles, name)
    readings.put(DRAINING, report.draining)
    readings.put(MAX_SEQUENCES, report.max_num_seqs)
    readings.put(HANDOFF_FAILURES, report.num_handoff_failures)
    if report.HasField("latency_model"):
        readings.put(MODEL_ERROR, report.latency_model.prefill_error, "prefill")
        readings.put(MODEL_ERROR, report.latency_model.decode_error, "decode")


def _read_speculation(readings: Readings, stats: SpeculationStats) -> None:
    for proposer, counts in stats.by_proposer.items():
        for instrument, numbers in ((DRAFTED, counts.verified), (ACCEPTED, counts.kept)):
            for position, count in enumerate(numbers, start=1):
                if counts.verified[position - 1]:
                    readings.put(instrument, count, proposer, str(position))
    readings.put(SPECULATION_ROWS, stats.num_rows)
    readings.put(SPECULATION_TOKENS, stats.num_tokens)
    readings.put(DRAFTING, stats.drafting_s)
    readings.put(VERIFYING, stats.verifying_s)
    for proposer in stats.failed:
        readings.put(FAILED_PROPOSER, 1, proposer)


def _read_experts(readings: Readings, load: ExpertLoad) -> None:
    readings.put(EXPERT_TOKENS, load.num_tokens)
    for quantile, share in load.loads.items():
        readings.put(EXPERT_LOAD, share, str(quantile))
    for over, imbalance in load.imbalances.items():
        readings.put(EXPERT_IMBALANCE, imbalance, over)
    if load.loads:
        readings.put(EXPERTS_IDLE, load.idle_share)


def _kind(work: StepWork) -> str:
    if not work.num_decoding:
        return "prefill"
    return "mixed" if work.prefill_tokens else "decode"
