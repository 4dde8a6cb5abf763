"""A worker's metrics: a few counts per step and per hand-off; the rest is read from what it knows anyway, at each scrape.

Utilization is made of two counters and two measured limits, so that it can be asked about any window and any set of workers:

    MFU                    = rate(pdmesh_engine_operations_total) / pdmesh_engine_peak_operations
    bandwidth utilization  = rate(pdmesh_engine_moved_bytes_total) / pdmesh_engine_peak_bandwidth
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from kvtransfer.sender.push_part import PushResult
from pdmesh.engine.hardware import MachineLimits, ModelCost
from pdmesh.engine.outputs import EngineStats, StepResult, StepWork
from pdmesh.engine.speculation.stats import SpeculationStats
from pdmesh.runtime.telemetry.metrics import Metrics, Reader, Readings, open_metrics
from pdmesh.runtime.telemetry.resource import resource_of
from pdmesh.v1 import worker_pb2
from pdmesh.worker import instruments
from pdmesh.worker.config import WorkerConfig

_ROLES = {worker_pb2.ROLE_PREFILL: "prefill", worker_pb2.ROLE_DECODE: "decode"}


@dataclass(frozen=True)
class StepCounts:
    """What steps cost, by the model's shape. A step reads all weights once; a token that decodes reads the keys and values that
    it attends to, the tokens of a chunk share what they read."""

    operations: int
    num_bytes: int

    @classmethod
    def of(cls, work: StepWork, cost: ModelCost) -> StepCounts:
        """Of one step."""
        num_tokens = work.prefill_tokens + work.num_decoding
        attended = work.prefill_context + work.decode_context
        products = 2 * (num_tokens * cost.num_weights + work.num_decoding * cost.num_head_weights)
        chunk_context = 2 * work.prefill_context // (work.prefill_tokens + 1) if work.prefill_tokens else 0
        kv_tokens = num_tokens + work.decode_context + chunk_context  # written; read
        return cls(products + attended * cost.attention_operations, cost.weight_bytes + kv_tokens * cost.kv_bytes_per_token)


@dataclass(frozen=True)
class Seen:
    """What a reader looks at: all as of now."""

    stats: EngineStats
    report: worker_pb2.LoadReport
    limits: MachineLimits | None
    num_corrupt: dict[str, int]
    num_leases_expired: int


class WorkerMetrics:
    """Of one worker, on its event loop."""

    def __init__(self, metrics: Metrics, cost: ModelCost) -> None:
        self.metrics = metrics
        self.url = ""  # where they are shown, from `start` on; "" where they are not
        self._cost = cost

    @classmethod
    def open(cls, config: WorkerConfig, worker_id: str, epoch: int, cost: ModelCost, reader: Reader) -> WorkerMetrics:
        """As the configuration says; `reader` is asked at each scrape. Raises ConfigError."""
        resource = resource_of(worker_id, config.mesh, config.roles, epoch)
        metrics = open_metrics(config.telemetry, "pdmesh-worker", resource, os.environ, host=config.host)
        metrics.read_by(reader)
        return cls(metrics, cost)

    async def start(self) -> None:
        """Shows and sends them. Raises ConfigError."""
        self.url = await self.metrics.start()

    async def stop(self) -> None:
        """Idempotent."""
        await self.metrics.stop()

    def on_step(self, result: StepResult) -> None:
        """A step has ended (some 10 µs)."""
        metrics, work = self.metrics, result.work
        if not metrics.is_on:
            return
        took_s = (result.ended_ns - result.started_ns) / 1e9
        metrics.observe(instruments.STEP_TIME, took_s, _kind(work))
        metrics.observe(instruments.BATCH_TOKENS, work.prefill_tokens + work.num_decoding)
        if work.num_decoding:
            metrics.observe(instruments.BATCH_SEQUENCES, work.num_decoding)
        counts = StepCounts.of(work, self._cost)
        metrics.add(instruments.OPERATIONS, counts.operations)
        metrics.add(instruments.BYTES_MOVED, counts.num_bytes)
        metrics.add(instruments.BUSY, took_s)

    def pushed(self, result: PushResult, exposed_ns: int) -> None:
        """A hand-off was committed, `exposed_ns` after the first token's draw."""
        metrics, transport = self.metrics, result.transport
        metrics.observe(instruments.HANDOFF_TIME, result.elapsed_ns / 1e9, transport)
        metrics.observe(instruments.HANDOFF_EXPOSED, exposed_ns / 1e9, transport)
        metrics.add(instruments.HANDOFF_BYTES, result.num_bytes, transport)
        metrics.add(instruments.HANDOFF_EXPOSED_BYTES, result.num_exposed_bytes, transport)
        metrics.add(instruments.HANDOFFS, 1, transport)


def read(readings: Readings, seen: Seen) -> None:
    """All that is known at a scrape."""
    _read_engine(readings, seen.stats)
    _read_report(readings, seen.report)
    if seen.stats.speculation is not None:
        _read_speculation(readings, seen.stats.speculation)
    for transport, count in seen.num_corrupt.items():
        readings.put(instruments.CORRUPT, count, transport)
    readings.put(instruments.LEASES_EXPIRED, seen.num_leases_expired)
    if seen.limits is not None:
        readings.put(instruments.PEAK_OPERATIONS, seen.limits.operations_per_s)
        readings.put(instruments.PEAK_BANDWIDTH, seen.limits.bytes_per_s)


def _read_engine(readings: Readings, stats: EngineStats) -> None:
    for state in ("running", "waiting", "reserved", "held"):
        readings.put(instruments.SEQUENCES, getattr(stats, f"num_{state}"), state)
    used = stats.num_total_blocks - stats.num_free_blocks
    for state, count in (("free", stats.num_free_blocks), ("cached", stats.num_cached_blocks), ("used", used)):
        readings.put(instruments.BLOCKS, count, state)
    readings.put(instruments.BLOCKS_TOTAL, stats.num_total_blocks)
    readings.put(instruments.WAITING_TOKENS, stats.num_waiting_tokens)
    readings.put(instruments.STEPS, stats.num_steps)
    for kind, count in (
        ("prefilled", stats.num_prefilled_tokens),
        ("cached", stats.num_prefix_hit_tokens),
        ("generated", stats.num_generated_tokens),
    ):
        readings.put(instruments.TOKENS, count, kind)
    readings.put(instruments.PREEMPTIONS, stats.num_preemptions)


def _read_report(readings: Readings, report: worker_pb2.LoadReport) -> None:
    for role, name in _ROLES.items():
        readings.put(instruments.ROLES, role in report.roles, name)
    readings.put(instruments.DRAINING, report.draining)
    readings.put(instruments.MAX_SEQUENCES, report.max_num_seqs)
    readings.put(instruments.HANDOFF_FAILURES, report.num_handoff_failures)
    if report.HasField("latency_model"):
        readings.put(instruments.MODEL_ERROR, report.latency_model.prefill_error, "prefill")
        readings.put(instruments.MODEL_ERROR, report.latency_model.decode_error, "decode")


def _read_speculation(readings: Readings, stats: SpeculationStats) -> None:
    for proposer, counts in stats.by_proposer.items():
        for instrument, numbers in ((instruments.DRAFTED, counts.verified), (instruments.ACCEPTED, counts.kept)):
            for position, count in enumerate(numbers, start=1):
                if counts.verified[position - 1]:
                    readings.put(instrument, count, proposer, str(position))
    readings.put(instruments.SPECULATION_ROWS, stats.num_rows)
    readings.put(instruments.SPECULATION_TOKENS, stats.num_tokens)
    readings.put(instruments.DRAFTING, stats.drafting_s)
    readings.put(instruments.VERIFYING, stats.verifying_s)
    for proposer in stats.failed:
        readings.put(instruments.FAILED_PROPOSER, 1, proposer)


def _kind(work: StepWork) -> str:
    if not work.num_decoding:
        return "prefill"
    return "mixed" if work.prefill_tokens else "decode"
