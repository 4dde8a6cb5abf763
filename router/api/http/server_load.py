"""`GET /metrics` of the HTTP port: what gateways read of a model server's load, by the names that vLLM gave it.

Endpoint pickers of the Gateway API inference extension ask every server of a pool (its model server protocol lists names). The
router's own metrics, of which there are many more, are on another port (`--metrics-port`).

A server that takes no requests, or none soon, answers 503. One whose workers are all paused or asleep says that its KV is full:
requests wait there, where there is no other.

What vLLM has no name for is how fast a server is: a worker's latency model follows under a name of ours, if it is the only one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from pdmesh.planning.latency_message import STEP_METRIC, STEP_PARTS
from pdmesh.v1 import worker_pb2
from router.api.frontend import Frontend
from router.api.http.body import HttpSettings
from router.api.http.openapi import Endpoint
from router.context import RouterContext
from router.routing.worker_snapshot import WorkerSnapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Sample = tuple[str, str, float]


def routes(frontend: Frontend, settings: HttpSettings) -> Sequence[Route]:
    """Return the route. It needs no key, as /health needs none: a gateway has none."""

    async def metrics(request: Request) -> Response:
        if not frontend.is_ready:  # no picker is to send anything here
            return PlainTextResponse("", 503, media_type=CONTENT_TYPE)
        return PlainTextResponse("".join(_lines(samples(frontend.core))), media_type=CONTENT_TYPE)

    summary = "Load of this server in Prometheus' format, by vLLM's names, for gateways"
    return [Endpoint("/metrics", metrics, summary, method="GET", needs_key=False, raw="text/plain")]


def samples(core: RouterContext) -> Iterator[Sample]:
    """Yield the metrics of each served model: name, labels, value."""
    views = core.fleet.views()
    admission = core.flow_control.admission
    num_queued = admission.num_queued
    for name in core.models:
        workers = [view for view in views if view.model == name and view.decode]
        running = sum(view.num_decoding + max(0, view.dispatched_decodes) for view in workers)
        present = sum(max(0, view.num_seqs + view.dispatched_seqs) for view in workers)
        blocks = sum(view.num_total_blocks for view in workers)
        free = sum(max(0, view.num_free_blocks - view.dispatched_blocks) for view in workers)
        label = f'model_name="{_escaped(name)}"'
        if not workers and core.fleet.is_stopped(name, worker_pb2.ROLE_DECODE):
            present, blocks, free = admission.num_inflight, 1, 0
        yield "vllm:num_requests_running", label, running
        yield "vllm:num_requests_waiting", label, max(0, present - running) + num_queued
        yield "vllm:kv_cache_usage_perc", label, 1 - free / blocks if blocks else 0.0
        if workers:
            sizes = f'block_size="{workers[0].block_size}",num_gpu_blocks="{blocks}"'
            yield "vllm:cache_config_info", f"{label},{sizes}", 1
        yield from _speed(workers, label)


def _speed(workers: Sequence[WorkerSnapshot], label: str) -> Iterator[Sample]:
    model = workers[0].latency if len(workers) == 1 else None
    if model is None:
        return
    for part, name in STEP_PARTS.items():
        yield STEP_METRIC, f'{label},part="{part}"', getattr(model, name)


def _lines(found: Iterable[Sample]) -> Iterator[str]:
    typed: set[str] = set()
    for name, labels, value in sorted(found, key=lambda each: each[0]):
        if name not in typed:
            typed.add(name)
            yield f"# TYPE {name} gauge\n"
        yield f"{name}{{{labels}}} {value:.9g}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
