"""The systems that are compared: how each is started on this machine's cores, and how it is asked."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.harness import PLAIN_FLAGS, free_ports, say
from benchmarks.peers.environments import (
    TORCH,
    VLLM,
    Environment,
    child_environment,
    ensure_environment,
    peers_folder,
)
from benchmarks.peers.servers import Server, serving
from benchmarks.peers.weights import Subject, ensure_weights
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from pdmesh.loadtest.targets.grpc import GrpcSettings, GrpcTarget
from pdmesh.loadtest.targets.openai import OpenAiSettings, OpenAiTarget
from pdmesh.loadtest.targets.target import Target
from pdmesh.models.registry import ensure_model

MODEL, MAX_CONTEXT = "smollm2-135m-instruct", 2048
SMG_VLLM = Environment(
    "smg-vllm",
    (
        TORCH,
        *VLLM.steps[1:],
        ("install", "smg==1.13.0", "smg-grpc-servicer==0.14.1", "smg-grpc-proto==0.4.28"),
        # Their dependencies would bring a torch for GPUs.
        ("install", "--no-deps", "nixl==1.5.1", "nixl-cu12==1.5.1"),
    ),
    note="3.6 GB",
)
_VLLM_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_NO_USAGE_STATS": "1",
    # This version cannot read the ahead-of-time artefacts that it writes, and would compile anew at every start.
    "VLLM_USE_AOT_COMPILE": "0",
}
# By default the gateway gives up a request whose prefill shows nothing for 3 s, and after ten of them sends the only prefill
# engine nothing for a minute: on one core, one burst would decide the search. So that it may queue, as the others do:
_PATIENCE = ("--worker-wedge-secs", "60", "--disable-circuit-breaker")


@dataclass(frozen=True)
class System:
    """A row of the table. `start` yields what the load test asks, and ends all that it started. `command` is for people."""

    key: str
    name: str
    about: str
    command: str
    start: Callable[[], AbstractAsyncContextManager[Target]]


@asynccontextmanager
async def mesh(num_prefill: int, num_decode: int, num_both: int, *, is_separated: bool = True) -> AsyncIterator[Target]:
    """Router and workers as `pdmesh up` starts them, but that nobody guesses tokens ahead: nor do the others. `is_separated`: a
    worker may compute prompts for another."""
    config = LocalMeshConfig(
        model=str(ensure_model(MODEL, say)),
        model_name=MODEL,
        num_prefill=num_prefill,
        num_decode=num_decode,
        num_both=num_both,
        port=0,
        worker_args=PLAIN_FLAGS,
        router_args=() if is_separated else ("--policy", "least-loaded"),
        log_dir=str(peers_folder() / "logs" / f"capacity-mesh-{num_prefill}-{num_decode}-{num_both}"),
    )
    async with LocalMesh(config, on_event=say, on_progress=say) as running:
        target = GrpcTarget(
            ",".join(running.router_addresses), GrpcSettings(prompt="words", mode="" if is_separated else "local")
        )
        try:
            yield target
        finally:
            await target.close()


@asynccontextmanager
async def vllm(python: Path | None = None, max_context: int = MAX_CONTEXT, flags: Sequence[str] = ()) -> AsyncIterator[Target]:
    """vLLM's own server on all cores, with its defaults: chunked prefill, prefix caching. `python`: None, of an environment of
    its own."""
    python, weights = python or ensure_environment(VLLM, say), ensure_weights(Subject(MODEL), "bfloat16", say)
    (port,) = free_ports(1)
    argv = (
        *(str(python), "-m", "vllm.entrypoints.openai.api_server", *_model_flags(weights, max_context)),
        *("--host", "127.0.0.1", "--port", str(port), "--uvicorn-log-level", "warning", *flags),
    )
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    server = Server("capacity-vllm", argv, f"http://127.0.0.1:{port}/health", _vllm_environment(cores))
    async with serving([server]), _openai(port) as target:
        yield target


@asynccontextmanager
async def smg(max_context: int = MAX_CONTEXT) -> AsyncIterator[Target]:
    """SMG in front of two vLLM engines of a core each, KV from one to the other over NIXL."""
    python, weights = ensure_environment(SMG_VLLM, say), ensure_weights(Subject(MODEL), "bfloat16", say)
    prefill, decode, side_prefill, side_decode, port, metrics_port = free_ports(6)
    cores = sorted(os.sched_getaffinity(0))
    gateway = (
        *(str(python), "-m", "smg", "launch", "--pd-disaggregation", "--backend", "vllm"),
        *("--prefill", f"grpc://127.0.0.1:{prefill}", "--decode", f"grpc://127.0.0.1:{decode}"),
        *("--model-path", str(weights), "--host", "127.0.0.1", "--port", str(port), *_PATIENCE),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
    )
    engines = (("producer", prefill, side_prefill, cores[0]), ("consumer", decode, side_decode, cores[-1]))
    servers = [
        *(_vllm_engine(python, weights, max_context, *engine) for engine in engines),
        Server("capacity-smg", gateway, f"http://127.0.0.1:{port}/readiness", child_environment()),
    ]
    # The gateway last, when both serve: it would let requests through that they are not ready for.
    async with serving(servers[:2]), serving(servers[2:]), _openai(port) as target:
        yield target


def _vllm_engine(python: Path, weights: Path, max_context: int, role: str, port: int, side_port: int, core: int) -> Server:
    transfer = {"kv_connector": "NixlConnector", "kv_role": f"kv_{role}", "kv_buffer_device": "cpu"}
    argv = (
        *(str(python), "-m", "vllm.entrypoints.grpc_server", *_model_flags(weights, max_context)),
        *("--host", "127.0.0.1", "--port", str(port), "--kv-transfer-config", json.dumps(transfer)),
    )
    variables = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port)}
    # Its own warm-up, for kernels of GPUs, takes minutes of one core; everybody is warmed up alike, with load (`probes`).
    variables["SMG_VLLM_SERVICER_WARMUP"] = "off"
    environment = {**_vllm_environment(str(core)), **variables}
    return Server(f"capacity-vllm-{role}", argv, f"grpc://127.0.0.1:{port}", environment)


def _model_flags(weights: Path, max_context: int) -> tuple[str, ...]:
    return (
        *("--model", str(weights), "--served-model-name", MODEL),
        *("--dtype", "bfloat16", "--max-model-len", str(max_context)),
    )


def _vllm_environment(cores: str) -> dict[str, str]:
    cache = str(peers_folder() / "vllm-cache")
    return child_environment({**_VLLM_VARIABLES, "VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CACHE_ROOT": cache})


@asynccontextmanager
async def _openai(port: int) -> AsyncIterator[Target]:
    target = OpenAiTarget(f"http://127.0.0.1:{port}/v1", OpenAiSettings(model=MODEL, prompt="words"))
    try:
        yield target
    finally:
        await target.close()


_VLLM_ARGS = f"--model SMOLLM2_BF16 --dtype bfloat16 --max-model-len {MAX_CONTEXT}"
SYSTEMS = (
    System(
        "mesh",
        "pdmesh, separated",
        "router, a prefill and a decode worker; int8, as by default",
        "pdmesh up --prefill 1 --decode 1 --speculation none",
        partial(mesh, 1, 1, 0),
    ),
    System(
        "both",
        "pdmesh, two workers with both roles",
        "router, which chooses per request whether one computes for the other; int8, as by default",
        "pdmesh up --prefill 0 --decode 0 --both 2 --speculation none",
        partial(mesh, 0, 0, 2),
    ),
    System(
        "two-engines",
        "pdmesh, two aggregated engines",
        "router, two workers with both roles, a core each, each request on one of them; int8, as by default",
        "the same with --policy least-loaded of the router, and requests in mode local",
        partial(mesh, 0, 0, 2, is_separated=False),
    ),
    System(
        "aggregated",
        "pdmesh, aggregated",
        "router, one worker with both roles on all cores; int8, as by default",
        "pdmesh up --prefill 0 --decode 0 --both 1 --speculation none",
        partial(mesh, 0, 0, 1),
    ),
    System(
        "vllm",
        "vLLM, aggregated",
        "vllm-cpu 0.32.0 on all cores; bf16, chunked prefill and prefix caching as by default",
        f"VLLM_CPU_OMP_THREADS_BIND=0,1 python -m vllm.entrypoints.openai.api_server {_VLLM_ARGS}",
        vllm,
    ),
    System(
        "smg",
        "SMG + vLLM, separated",
        "smg 1.13.0, smg-grpc-servicer 0.14.1, two vllm-cpu 0.32.0 of a core each, nixl 1.5.1; bf16",
        f"VLLM_CPU_OMP_THREADS_BIND=0 python -m vllm.entrypoints.grpc_server {_VLLM_ARGS} --kv-transfer-config "
        """'{"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_buffer_device": "cpu"}'; """
        "the same on core 1 as kv_consumer; "
        f"smg launch --pd-disaggregation --backend vllm --prefill grpc://… --decode grpc://… {' '.join(_PATIENCE)}",
        smg,
    ),
)
