"""Traces elsewhere: what docs/traces.md tells people to type, with the trace UI that it names; skipped where that is not there.

The mesh runs as `pdmesh up --otlp-endpoint` has it, so that traces go by its console. What has come is asked of the UI's API."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdmesh.client.client import AsyncClient
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from pdmesh.runtime.child import ChildProcess
from tests.mesh.checks import Footprint

VARIABLE = "PDMESH_TRACE_UI"
PROGRAM = os.environ.get(VARIABLE) or shutil.which("autotel-devtools") or ""
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not PROGRAM, reason=f"autotel-devtools is not installed: docs/traces.md says how; {VARIABLE} may name it, too"
    ),
]
PATHS = {
    "generate@router",
    "generate@router/route@router",
    "generate@router/admission@router",
    "generate@router/first_token_return@router",
    "generate@router/attempt@router",
    "generate@router/attempt@router/reserve@router",
    "generate@router/attempt@router/reserve@router/submit@decode",
    "generate@router/attempt@router/prefill@router",
    "generate@router/attempt@router/prefill@router/prefill@prefill",
    "generate@router/attempt@router/prefill@router/prefill@prefill/prefill.queue@prefill",
    "generate@router/attempt@router/prefill@router/prefill@prefill/prefill.compute@prefill",
    "generate@router/attempt@router/prefill@router/prefill@prefill/kv.push@prefill",
    "generate@router/attempt@router/prefill@router/prefill@prefill/kv.exposed@prefill",
    "generate@router/attempt@router/decode@decode",
    "generate@router/attempt@router/decode@decode/decode.queue@decode",
}
Json = Mapping[str, Any]


@dataclass(frozen=True)
class TraceUi:
    """One that runs. `endpoint` takes OTLP over gRPC."""

    endpoint: str
    http: httpx.AsyncClient

    async def answers(self) -> bool:
        try:
            return bool((await self.http.get("/healthz")).json().get("service") == "autotel-devtools")
        except httpx.TransportError:
            return False

    async def traces(self, name: str) -> Sequence[Json]:
        """Those whose root has this name."""
        found = (await self.http.get("/v1/traces")).raise_for_status().json()["traces"]
        return [trace for trace in found if trace["rootSpan"]["name"] == name]


@asynccontextmanager
async def running_ui() -> AsyncIterator[TraceUi]:
    """On ports of its own; gone afterwards. It keeps nothing on disk."""
    http_port, grpc_port = free_ports(2)
    child = ChildProcess("trace-ui", [PROGRAM, "--port", str(http_port), "--grpc-port", str(grpc_port)])
    await child.spawn()
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{http_port}", trust_env=False) as http:
            ui = TraceUi(f"127.0.0.1:{grpc_port}", http)
            await until(ui.answers)
            yield ui
    finally:
        child.kill()
        await child.wait()


def free_ports(count: int) -> list[int]:
    """Of this machine, for a program that takes another one where its own is taken."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [each.getsockname()[1] for each in held]
    finally:
        for each in held:
            each.close()


async def test_a_request_is_one_trace_with_its_spans_and_parents(tiny: Path) -> None:
    async with running_ui() as ui:
        config = LocalMeshConfig(model=str(tiny), port=0, num_threads=1, console_port=0, otlp_endpoint=ui.endpoint)
        async with LocalMesh(config) as mesh:
            footprint = Footprint.of(mesh)
            async with AsyncClient(mesh.router_addresses) as client:
                answer = await client.generate("x" * 150, mode="remote", max_tokens=8, ignore_eos=True, timeout=60)
            trace = await whole_trace(ui, answer.request_id)
            footprint.grow(mesh)
        footprint.assert_gone()
    spans = trace["spans"]
    assert {span["traceId"] for span in spans} == {trace["traceId"]}
    assert {path(span, spans) for span in spans} == PATHS
    assert not trace.get("partial") and trace["service"] == "pdmesh-router" and trace["status"] != "ERROR"
    root = trace["rootSpan"]["attributes"]
    assert root["pdmesh.prefill.worker"] == "prefill-0" and root["pdmesh.decode.worker"] == "decode-0"


async def whole_trace(ui: TraceUi, request_id: str) -> Json:
    """Of the only request there was, once all processes have sent their part."""

    async def is_whole() -> bool:
        return any({path(span, trace["spans"]) for span in trace["spans"]} >= PATHS for trace in await ui.traces("generate tiny"))

    await until(is_whole)
    (trace,) = await ui.traces("generate tiny")
    assert trace["rootSpan"]["attributes"]["gen_ai.response.id"] == request_id
    return trace


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 60.0) -> None:
    """TimeoutError after so long."""
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110 (another process is asked: nothing here would set an event)
            await asyncio.sleep(0.1)


def path(span: Json, spans: Sequence[Json]) -> str:
    """Names from the root on, each with the kind of its process; "?" for a parent that has not come (yet)."""
    name = f"{span['name'].split()[0]}@{span['attributes']['service.instance.id'].partition('-')[0]}"
    if not span.get("parentSpanId"):
        return name
    parents = [each for each in spans if each["spanId"] == span["parentSpanId"]]
    return f"{path(parents[0], spans) if parents else '?'}/{name}"
