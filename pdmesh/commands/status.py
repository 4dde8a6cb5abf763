"""`pdmesh status`: shows a router's view of the mesh as tables of at most 100 columns, or as JSON."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.json_format import MessageToDict
from rich.console import RenderableType
from rich.text import Text

from pdmesh.client.client import Client
from pdmesh.commands.options import Connection, flat
from pdmesh.commands.rollout import in_words
from pdmesh.errors import MeshError
from pdmesh.launcher import local_state
from pdmesh.runtime.addresses import canonical
from pdmesh.terminal import MAX_WIDTH, console, show, table
from pdmesh.v1 import common_pb2, mesh_pb2, worker_pb2

REDRAWS = "≈"
"""Marks an engine whose tokens are not reproducible."""


@dataclass(frozen=True)
class Options:
    """Show workers, their roles, epochs and load, and the objectives in force: pdmesh status --watch."""

    watch: bool = field(default=False, metadata={"help": "show it again and again, until Ctrl-C"})
    period_s: float = field(default=1.0, metadata={"help": "seconds between two looks with --watch"})
    json: bool = field(default=False, metadata={"help": "write JSON, one object per look"})
    connection: Connection = field(default_factory=Connection, metadata=flat())

    def validate(self) -> None:
        """Raise ValueError that names the field."""
        if self.period_s < 0.1:
            raise ValueError("period_s: must be at least 0.1 seconds")


def run(options: Options) -> int:
    """Run the command; return 0 when the status was shown; with --watch it never ends by itself."""
    with options.connection.client() as client:
        if not options.watch:
            _look(client, options)
            return 0
        while True:
            try:
                _look(client, options)
            except MeshError as error:
                _show(options, f"{options.connection.router}: {error.message}")
            time.sleep(options.period_s)


def _look(client: Client, options: Options) -> None:
    """Show the mesh as it is now. Raises MeshError."""
    status = client.status(timeout=options.connection.timeout)
    addresses = [worker.info.address for worker in status.workers if worker.alive]
    members = [*addresses, canonical(options.connection.router)]
    decided, metrics = local_state.latest(members), local_state.shown(members)
    if options.json:
        shown = MessageToDict(status, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        more = {"autoscaler": decided, "metrics": metrics}
        print(json.dumps(shown | {name: value for name, value in more.items() if value is not None}), flush=True)
        return
    _show(options, *status_lines(status), *decision_lines(decided, time.time()), *metrics_lines(metrics))


def _show(options: Options, *parts: RenderableType) -> None:
    if options.watch and not options.json:
        console(sys.stdout).clear()
    show(*parts)


def status_lines(status: mesh_pb2.GetStatusResponse) -> list[RenderableType]:
    """Return the status as lines for the terminal."""
    workers = sorted(status.workers, key=lambda worker: worker.info.worker_id)
    return [
        *_router_lines(status),
        "",
        *(_worker_tables(workers) if workers else [Text("no worker is known", "warning")]),
        *_split_lines(status.splits),
        *_reuse_lines(workers),
        *_speculation_lines(workers),
        *_breaker_lines(workers),
        *_objective_lines(status.objectives),
        *_admission_lines(status.admission),
    ]


def decision_lines(decided: Mapping[str, Any] | None, wall_s: float) -> list[RenderableType]:
    """Return the latest decision of the autoscaler on this machine for each pool, with its reason; nothing without one."""
    if decided is None:
        return []
    head = f"AUTOSCALER (pdmesh up --autoscale on this machine; decided {max(0.0, wall_s - decided['at_s']):.0f} s ago)"
    texts = (textwrap.wrap(pool["text"], MAX_WIDTH, subsequent_indent="  ") for pool in decided["pools"])
    return ["", Text(head, "bold"), *(line for lines in texts for line in lines)]


def metrics_lines(metrics: Mapping[str, Any] | None) -> list[RenderableType]:
    """Return where the processes of a mesh on this machine serve their metrics; nothing where they do not."""
    if metrics is None:
        return []
    rows = [(each["labels"]["instance"], f"http://{each['targets'][0]}/metrics") for each in metrics["targets"]]
    return ["", table(("PROCESS", "METRICS"), rows), f"for Prometheus: {metrics['file']}"]


def _split_lines(splits: Iterable[mesh_pb2.TrafficSplit]) -> list[RenderableType]:
    """Return how new requests are shared between revisions of workers; nothing where no worker names one."""
    return [line for split in splits for line in ("", *in_words(split).splitlines())]


def _error(error: float, bias: float) -> str:
    return f"{100 * error:.0f} % (bias {100 * bias:+.0f} %)"


def _router_lines(status: mesh_pb2.GetStatusResponse) -> list[RenderableType]:
    registry = ("connected", "good") if status.registry_connected else ("not connected", "bad")
    load = f"{status.num_inflight} of {status.max_inflight} requests in flight, {status.num_queued} of {status.max_queued} queued"
    lines: list[RenderableType] = [Text.assemble("router ", (status.router_id, "bold"), f" · {load} · registry ", registry)]
    if status.prediction.num_requests:
        seen = status.prediction
        lines.append(
            f"prediction error, median of {seen.num_requests} requests (the latest 512 count):"
            f" TTFT {_error(seen.ttft_error, seen.ttft_bias)}, TPOT {_error(seen.tpot_error, seen.tpot_bias)}"
        )
    if status.num_redrawn_tokens:
        lines.append(f"{status.num_redrawn_tokens} repeated indexes had another token where the engine may redraw: no fault")
    if status.num_token_mismatches:
        lines.append(
            Text(f"{status.num_token_mismatches} repeated indexes had another token: this is a bug, please report it", "bad")
        )
    return lines


def _worker_tables(workers: Sequence[mesh_pb2.WorkerStatus]) -> list[RenderableType]:
    """Return tables of identities and of load: one table would not fit 100 columns."""
    identity = ("WORKER", "ROLES", "STATE", "EPOCH", "ADDRESS", "MODEL", "ENGINE", "AGE")
    load = ("WORKER", "RUN", "WAIT", "RESERVED", "BLOCKS", "CACHED", "PREFILLED", "HITS", "GENERATED", "PREEMPTED", "FAILED")
    styles = ["" if worker.alive else "bad" for worker in workers]
    first = table(identity, [_identity_row(worker) for worker in workers], styles)
    legend = [f"{REDRAWS}: a request that is computed again there may draw other tokens"] if any(map(may_redraw, workers)) else []
    return [first, *legend, "", table(load, [_load_row(worker) for worker in workers], styles)]


def may_redraw(worker: mesh_pb2.WorkerStatus) -> bool:
    """Return True if a request that the worker computes again may draw other tokens."""
    return worker_pb2.ENGINE_LACK_REPRODUCIBLE in worker.info.lacks


def engine_name(worker: mesh_pb2.WorkerStatus) -> str:
    """Return the engine for people, with a sign where its tokens are not reproducible: "vllm ≈"."""
    return f"{worker.info.engine} {REDRAWS}".strip() if may_redraw(worker) else worker.info.engine


def _identity_row(worker: mesh_pb2.WorkerStatus) -> tuple[str, ...]:
    info = worker.info
    return (
        info.worker_id,
        role_names(worker.load.roles or info.roles),
        _state(worker),
        f"{info.epoch:016x}"[:8],
        info.address,
        info.identity.model,
        engine_name(worker),
        f"{worker.report_age_ms / 1000:.1f}s",
    )


def _load_row(worker: mesh_pb2.WorkerStatus) -> tuple[str, ...]:
    load = worker.load
    return (
        worker.info.worker_id,
        str(load.num_running),
        str(load.num_waiting),
        str(load.num_reserved),
        f"{load.num_total_blocks - load.num_free_blocks}/{load.num_total_blocks}",
        f"{load.num_cached_blocks} ({load.num_retained_blocks} kept)"
        if load.num_retained_blocks
        else str(load.num_cached_blocks),
        str(load.num_prefilled_tokens),
        str(load.num_prefix_hit_tokens),
        str(load.num_generated_tokens),
        str(load.num_preemptions),
        str(load.num_handoff_failures),
    )


def _reuse_lines(workers: Sequence[mesh_pb2.WorkerStatus]) -> list[RenderableType]:
    """Return a table of workers that have fetched or restored KV for this router's requests; nothing without one."""
    reusing = [worker for worker in workers if worker.fetched_tokens or worker.restored_tokens]
    if not reusing:
        return []
    columns = ("WORKER", "FETCHED", "RESTORED", "SAVED")
    rows = [
        (worker.info.worker_id, str(worker.fetched_tokens), str(worker.restored_tokens), f"{worker.saved_s:.1f}s")
        for worker in reusing
    ]
    return [
        "",
        table(columns, rows),
        "prompt tokens whose KV came from another worker or from tiers, and the computing time saved",
    ]


def _speculation_lines(workers: Sequence[mesh_pb2.WorkerStatus]) -> list[RenderableType]:
    """Return lines for workers that have drafted tokens since their start, or have failed to."""
    guessing = [worker for worker in workers if _has_guessed(worker.load.speculation)]
    if not guessing:
        return []
    columns = ("WORKER", "TOKENS/STEP", "COMPUTED", "GUESSED", "KEPT", "TOOK", "KEPT BY PROPOSER")
    failed = [
        Text(f"{worker.info.worker_id}: {name} has failed and drafts no more; the worker's log says why", "bad")
        for worker in guessing
        for name in worker.load.speculation.failed_proposers
    ]
    return ["", table(columns, [_speculation_row(worker) for worker in guessing]), *failed]


def _has_guessed(report: worker_pb2.SpeculationReport) -> bool:
    return bool(report.proposers or report.failed_proposers)


def _speculation_row(worker: mesh_pb2.WorkerStatus) -> tuple[str, ...]:
    """Return a row: tokens of a sequence in a step are current, all else counts from the worker's start."""
    report = worker.load.speculation
    verified = sum(sum(proposer.verified) for proposer in report.proposers)
    return (
        worker.info.worker_id,
        f"{report.tokens_per_row:.2f}",
        f"{report.computed_per_row:.2f}",
        str(verified),
        str(sum(sum(proposer.kept) for proposer in report.proposers)),
        f"{report.drafting_s:.1f}s",
        ", ".join(_kept_share(proposer) for proposer in report.proposers),
    )


def _kept_share(proposer: worker_pb2.ProposerReport) -> str:
    verified = sum(proposer.verified)
    return f"{proposer.name} {100 * sum(proposer.kept) / max(1, verified):.0f} % of {verified}"


def _state(worker: mesh_pb2.WorkerStatus) -> str:
    return "lost" if not worker.alive else state_of(worker.load)


def state_of(load: worker_pb2.LoadReport) -> str:
    """Return the state of a live worker in a word."""
    if load.draining:
        return "draining"
    stopped = {worker_pb2.SERVING_STATE_PAUSED: "paused", worker_pb2.SERVING_STATE_ASLEEP: "asleep"}
    return stopped.get(load.serving_state, "alive")


def role_names(roles: Sequence[worker_pb2.Role.ValueType]) -> str:
    """Return the roles for people: "prefill,decode"."""
    return ",".join(worker_pb2.Role.Name(role).removeprefix("ROLE_").lower() for role in roles)


def _breaker_lines(workers: Sequence[mesh_pb2.WorkerStatus]) -> list[RenderableType]:
    """Return the open circuit breakers; nothing while there is none."""
    judged = [(worker, breaker) for worker in workers for breaker in worker.breakers]
    if not judged:
        return []
    head = ("WORKER", "AS", "BREAKER", "LEFT OUT", "TIMES", "WHY")
    rows = [_breaker_row(worker, breaker) for worker, breaker in judged]
    return ["", table(head, rows, ["bad" if breaker.left_out else "" for _, breaker in judged])]


def _breaker_row(worker: mesh_pb2.WorkerStatus, breaker: mesh_pb2.BreakerStatus) -> tuple[str, ...]:
    return (
        worker.info.worker_id,
        role_names([breaker.role]),
        mesh_pb2.BreakerState.Name(breaker.state).removeprefix("BREAKER_STATE_").lower().replace("_", "-"),
        f"{breaker.left_ms / 1000:.1f}s" if breaker.left_out else "no",
        str(breaker.num_ejections),
        breaker.reason,
    )


def _admission_lines(tallies: Sequence[mesh_pb2.AdmissionStatus]) -> list[RenderableType]:
    """Return the admission counts; nothing while there is one tenant with one priority and no rejection."""
    if len(tallies) < 2 and not any(tally.refused for tally in tallies):
        return []
    rows = [
        (
            (tally.tenant or "(default)")[:24],
            common_pb2.Priority.Name(tally.priority).removeprefix("PRIORITY_").lower(),
            str(tally.num_inflight),
            str(tally.num_queued),
            str(tally.num_admitted),
            _refusals(tally.refused),
        )
        for tally in tallies
    ]
    return ["", table(("TENANT", "PRIORITY", "RUN", "WAIT", "ADMITTED", "REFUSED"), rows)]


def _refusals(refused: Sequence[mesh_pb2.RefusalCount]) -> str:
    """Return the count and the most frequent reasons: "42: 30 rate, 12 queue_full"."""
    by_count = sorted(refused, key=lambda each: -each.count)
    total, reasons = sum(each.count for each in refused), ", ".join(f"{each.count} {each.reason}" for each in by_count)
    return f"{total}: {reasons}" if total else "0"


def _objective_lines(objectives: Sequence[mesh_pb2.Objective]) -> list[RenderableType]:
    if not objectives:
        return []
    rows = [(o.model, f"{o.ttft_ms} ms", f"{o.tpot_ms} ms", f"{100 * o.quantile:g} %") for o in objectives]
    return ["", table(("MODEL", "TTFT", "TPOT", "OF REQUESTS"), rows)]
