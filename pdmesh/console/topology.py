"""Polls the routers for the state of the mesh, each second while a page is open, seldom otherwise; decisions every few
seconds."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc.aio

from pdmesh.client.channel import open_aio_channel
from pdmesh.commands.status import may_redraw, role_names, state_of
from pdmesh.errors import error_from_rpc
from pdmesh.launcher import local_state
from pdmesh.runtime.addresses import canonical
from pdmesh.runtime.rpc.tls import Tls
from pdmesh.v1 import mesh_pb2, worker_pb2
from pdmesh.v1.mesh_pb2_grpc import MeshStub

if TYPE_CHECKING:
    from pdmesh.v1.mesh_pb2_grpc import MeshAsyncStub


# The routers' statuses as plain values for the page.


MAX_CANDIDATES = 4
_BREAKERS = {
    mesh_pb2.BREAKER_STATE_CLOSED: "closed",
    mesh_pb2.BREAKER_STATE_OPEN: "open",
    mesh_pb2.BREAKER_STATE_HALF_OPEN: "half-open",
}


def router_view(address: str, status: mesh_pb2.GetStatusResponse | None, problem: str) -> dict[str, Any]:
    """Return one router; `problem` says why it does not answer, "" while it does. `status` is its latest."""
    seen = status or mesh_pb2.GetStatusResponse()
    return {
        "address": address,
        "id": seen.router_id,
        "problem": problem,
        "inflight": seen.num_inflight,
        "max_inflight": seen.max_inflight,
        "queued": seen.num_queued,
        "max_queued": seen.max_queued,
        "registry_connected": seen.registry_connected,
        "prediction": _prediction(seen.prediction) if seen.prediction.num_requests else None,
        "refused": sum(refusal.count for tally in seen.admission for refusal in tally.refused),
    }


def _prediction(seen: mesh_pb2.PredictionStatus) -> dict[str, float]:
    return {"num_requests": seen.num_requests, "ttft_error": seen.ttft_error, "tpot_error": seen.tpot_error}


def worker_views(statuses: Iterable[mesh_pb2.GetStatusResponse]) -> list[dict[str, Any]]:
    """Return every worker once, from the router that has heard from it last; by name. What it fetched and restored is the sum of
    what the routers have counted, each for its own requests."""
    found: dict[str, mesh_pb2.WorkerStatus] = {}
    workers = [worker for status in statuses for worker in status.workers]
    for worker in workers:
        known = found.get(worker.info.worker_id)
        if known is None or (not worker.alive, worker.report_age_ms) < (not known.alive, known.report_age_ms):
            found[worker.info.worker_id] = worker
    return [worker_view(found[name]) | _reused(found[name], workers) for name in sorted(found)]


def _reused(worker: mesh_pb2.WorkerStatus, workers: Iterable[mesh_pb2.WorkerStatus]) -> dict[str, Any]:
    key = (worker.info.worker_id, worker.info.epoch)
    same = [other for other in workers if (other.info.worker_id, other.info.epoch) == key]
    return {name: sum(getattr(each, name) for each in same) for name in ("fetched_tokens", "restored_tokens", "saved_s")}


def worker_view(worker: mesh_pb2.WorkerStatus) -> dict[str, Any]:
    """Return load, KV pool, prefix cache and speculation of one."""
    info, load = worker.info, worker.load
    return {
        "id": info.worker_id,
        "address": info.address,
        "model": info.identity.model,
        "engine": info.engine,
        "reproducible": not may_redraw(worker),
        "roles": role_names(load.roles or info.roles).split(","),
        "state": "lost" if not worker.alive else state_of(load),
        "age_ms": worker.report_age_ms,
        "running": load.num_running,
        "waiting": load.num_waiting,
        "reserved": load.num_reserved,
        "decoding": load.num_decoding,
        "prefilling": load.num_prefilling,
        "waiting_tokens": load.num_waiting_tokens,
        "max_seqs": load.max_num_seqs or info.max_num_seqs,
        "blocks": {"total": load.num_total_blocks, "free": load.num_free_blocks, "cached": load.num_cached_blocks},
        "prefilled_tokens": load.num_prefilled_tokens,
        "hit_tokens": load.num_prefix_hit_tokens,
        "generated_tokens": load.num_generated_tokens,
        "preemptions": load.num_preemptions,
        "handoff_failures": load.num_handoff_failures,
        "speculation": _speculation(load.speculation) if load.HasField("speculation") else None,
        "breakers": [_breaker(each) for each in worker.breakers if each.state != mesh_pb2.BREAKER_STATE_CLOSED],
    }


def _speculation(report: worker_pb2.SpeculationReport) -> dict[str, Any]:
    verified = sum(sum(proposer.verified) for proposer in report.proposers)
    return {
        "tokens_per_step": report.tokens_per_row,
        "verified": verified,
        "kept": sum(sum(proposer.kept) for proposer in report.proposers),
        "proposers": [proposer.name for proposer in report.proposers],
    }


def _breaker(breaker: mesh_pb2.BreakerStatus) -> dict[str, Any]:
    return {
        "role": role_names([breaker.role]),
        "state": _BREAKERS.get(breaker.state, ""),
        "left_out": breaker.left_out,
        "reason": breaker.reason,
    }


def objective_views(statuses: Iterable[mesh_pb2.GetStatusResponse]) -> dict[str, dict[str, float]]:
    """Return the objectives by model."""
    return {
        each.model: {"ttft_ms": each.ttft_ms, "tpot_ms": each.tpot_ms, "quantile": each.quantile}
        for status in statuses
        for each in status.objectives
    }


def policy_views(router: str, decisions: Iterable[mesh_pb2.Decision], now_s: float) -> list[dict[str, Any]]:
    """Return decisions as the router of that id reported them at `now_s`; that and `at_s` since 1970."""
    return [_policy_view(now_s - each.age_ms / 1000, router, each) for each in decisions]


def _policy_view(at_s: float, router: str, decision: mesh_pb2.Decision) -> dict[str, Any]:
    return {
        "at_s": round(at_s, 1),
        "router": router,
        "request_id": decision.request_id,
        "policy": decision.policy,
        "num_tokens": decision.num_tokens,
        "num_workers": decision.num_workers,
        "reason": decision.reason,
        "observed_ttft_ms": decision.observed_ttft_ms,
        "candidates": [_candidate(each) for each in decision.candidates[:MAX_CANDIDATES]],
    }


def _candidate(candidate: mesh_pb2.Candidate) -> dict[str, Any]:
    return {
        "decode": candidate.decode_worker_id,
        "prefill": candidate.prefill_worker_id,
        "ttft_ms": candidate.ttft_ms,
        "cached_tokens": candidate.decode_cached_tokens + candidate.prefill_cached_tokens,
        "cost": candidate.cost,
        "chosen": candidate.chosen,
        "note": candidate.note,
    }


WATCHED_PERIOD_S, IDLE_PERIOD_S = 1.0, 10.0
DECISIONS_PERIOD_S = 3.0  # of all answers they cost most to send and to read
WATCHED_FOR_S = 10.0
TIMEOUT_S = 2.0
MAX_DECISIONS = 30
MAX_SCALINGS = 50

Metadata = tuple[tuple[str, str], ...]


@dataclass
class _Router:
    """Hold what is known of one router."""

    address: str
    stub: MeshAsyncStub
    status: mesh_pb2.GetStatusResponse | None = None
    policy: Sequence[dict[str, Any]] = ()
    explained_at: float = float("-inf")
    problem: str = "has not been asked yet"


class Topology:
    """Hold the latest answers. Belongs to one event loop; `start`, then `stop`."""

    def __init__(
        self, routers: Sequence[str], tls: Tls | None, metadata: Metadata | None, *, on_change: Callable[[], None]
    ) -> None:
        self._channels = [open_aio_channel(address, tls) for address in routers]
        self._routers = [_Router(address, MeshStub(channel)) for address, channel in zip(routers, self._channels, strict=True)]
        self._metadata = metadata
        self._on_change = on_change
        self._watched_at = float("-inf")
        self._wanted = asyncio.Event()
        self._scalings: deque[dict[str, Any]] = deque(maxlen=MAX_SCALINGS)
        self._scaled_at_s = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start polling."""
        self._task = asyncio.create_task(self._run(), name="topology")

    async def stop(self) -> None:
        """Stop. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        await asyncio.gather(*(channel.close() for channel in self._channels))

    def watch(self) -> None:
        """Note that a page is open."""
        is_news = not self._is_watched
        self._watched_at = time.monotonic()
        if is_news:
            self._wanted.set()

    def view(self) -> dict[str, Any]:
        """Return routers, workers, objectives and decisions, for the page."""
        statuses = [router.status for router in self._routers if router.status is not None]
        policy = (decision for router in self._routers for decision in router.policy)
        return {
            "routers": [router_view(each.address, each.status, each.problem) for each in self._routers],
            "workers": worker_views(statuses),
            "objectives": objective_views(statuses),
            "policy": heapq.nlargest(MAX_DECISIONS, policy, key=lambda decision: decision["at_s"]),
            "autoscaler": list(reversed(self._scalings)),
        }

    @property
    def _is_watched(self) -> bool:
        return time.monotonic() - self._watched_at < WATCHED_FOR_S

    async def _run(self) -> None:
        while True:
            self._wanted.clear()
            await asyncio.gather(*(self._ask(router) for router in self._routers))
            await asyncio.to_thread(self._read_scaling)
            self._on_change()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCHED_PERIOD_S if self._is_watched else IDLE_PERIOD_S):
                    await self._wanted.wait()

    async def _ask(self, router: _Router) -> None:
        try:
            router.status = await router.stub.GetStatus(mesh_pb2.GetStatusRequest(), timeout=TIMEOUT_S, metadata=self._metadata)
            router.problem = ""
        except grpc.aio.AioRpcError as error:
            router.problem = error_from_rpc(error).message or error.code().name
            return
        if self._is_watched and time.monotonic() - router.explained_at >= DECISIONS_PERIOD_S:
            router.explained_at = time.monotonic()
            await self._ask_why(router, router.status.router_id)

    async def _ask_why(self, router: _Router, router_id: str) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):  # requires admin rights: without them there are no decisions to show
            latest = mesh_pb2.ExplainRequest(latest=MAX_DECISIONS)
            explained = await router.stub.Explain(latest, timeout=TIMEOUT_S, metadata=self._metadata)
            router.policy = policy_views(router_id, explained.decisions, time.time())

    def _read_scaling(self) -> None:
        """Read what `pdmesh up --autoscale` on this machine has decided since the last look; repetitions only once."""
        statuses = [router.status for router in self._routers if router.status is not None]
        alive = [worker.info.address for status in statuses for worker in status.workers if worker.alive]
        decided = local_state.latest([*alive, *(canonical(router.address) for router in self._routers)])
        if decided is None or decided["at_s"] <= self._scaled_at_s:
            return
        self._scaled_at_s = decided["at_s"]
        for pool in decided["pools"]:
            self._note_scaling({"at_s": decided["at_s"], **pool})

    def _note_scaling(self, pool: dict[str, Any]) -> None:
        former = next((each for each in reversed(self._scalings) if each.get("name") == pool.get("name")), None)
        is_steady = pool.get("before") == pool.get("replicas")
        if former is not None and is_steady and former.get("before") == former.get("replicas"):
            self._scalings.remove(former)
        self._scalings.append(pool)
