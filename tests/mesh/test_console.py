"""The console of a real mesh: it sees every process, and the traces of requests that went through them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from pdmesh.client.client import AsyncClient
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from router.config import RouterConfig
from tests.mesh import oracle
from tests.mesh.checks import Footprint

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]
needs_traces = pytest.mark.skipif(
    not any(field.name == "telemetry" for field in fields(RouterConfig)),
    reason="routers and workers of this version send no traces",
)
TTFT_PARTS = ("route", "admission_queue", "reserve", "prefill_queue", "prefill_compute", "first_token_return", "retry")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def mesh(tiny: Path) -> AsyncIterator[LocalMesh]:
    """With a console, and TLS between everybody: the page is for this machine and stays in the clear."""
    mesh = LocalMesh(LocalMeshConfig(model=str(tiny), port=0, num_threads=1, console_port=0, throwaway_tls=True))
    async with mesh:
        footprint = Footprint.of(mesh)
        yield mesh
        footprint.grow(mesh)
    footprint.assert_gone()


@pytest_asyncio.fixture(loop_scope="module")
async def http(mesh: LocalMesh) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=mesh.console_url, timeout=30, trust_env=False) as http:
        yield http


async def state(http: httpx.AsyncClient, condition: Callable[[Any], object]) -> Any:
    """The first that is so; AssertionError, with the last one, where none comes."""
    deadline = time.monotonic() + 30
    while not condition(seen := (await http.get("/api/state")).json()):
        assert time.monotonic() < deadline, seen
        await asyncio.sleep(0.05)
    return seen


async def test_every_process_is_seen(mesh: LocalMesh, http: httpx.AsyncClient) -> None:
    seen = await state(http, lambda seen: len(seen["workers"]) == 2)
    assert [(worker["id"], worker["roles"], worker["state"]) for worker in seen["workers"]] == [
        ("decode-0", ["decode"], "alive"),
        ("prefill-0", ["prefill"], "alive"),
    ]
    assert [router["problem"] for router in seen["routers"]] == [""] and seen["routers"][0]["registry_connected"]
    assert all(worker["blocks"]["total"] > 0 for worker in seen["workers"])


async def test_a_prompt_is_answered(http: httpx.AsyncClient) -> None:
    answer = await http.post("/api/generate", json={"prompt": "hello", "max_tokens": 6})
    lines = answer.text.splitlines()
    assert '"trace_id"' in lines[0] and '"done"' in lines[-1] and len(lines) > 2


@needs_traces
@pytest.mark.parametrize("mode", ["remote", "local"])
async def test_a_request_comes_with_its_trace_through_all_processes(mesh: LocalMesh, http: httpx.AsyncClient, mode: str) -> None:
    async with AsyncClient(mesh.router_addresses, tls=mesh.tls) as client:
        name = f"seen-{mode}"
        prompt = oracle.prompt_of(5, 40)
        answer = await client.generate(prompt, max_tokens=9, ignore_eos=True, mode=mode, request_id=name, timeout=60)
    seen = await state(http, lambda seen: any(each["request_id"] == name for each in seen["recent"]))
    (request,) = [each for each in seen["recent"] if each["request_id"] == name]
    assert (request["mode"], request["decode_worker"], request["output_tokens"]) == (mode, "decode-0", 9)
    assert request["ttft_ms"] == pytest.approx(answer.timings.ttft_ns / 1e6)
    assert abs(sum(request["parts"][part] for part in TTFT_PARTS) - request["ttft_ms"]) < max(1.0, 0.02 * request["ttft_ms"])
    wanted = {"route", "attempt", "reserve", "prefill.compute", "decode", "first_token_return"}
    wanted |= {"prefill", "kv.push", "kv.exposed"} if mode == "remote" else set()
    spans = await _spans(http, request["trace_id"], wanted)
    assert {span["instance"] for span in spans} >= ({"prefill-0", "decode-0"} if mode == "remote" else {"decode-0"})
    assert any(flow["prefill"] == ("prefill-0" if mode == "remote" else "") for flow in seen["flows"])


async def _spans(http: httpx.AsyncClient, trace_id: str, wanted: set[str]) -> list[Any]:
    """Of a trace, once the spans of all its processes have come."""
    async with asyncio.timeout(30):
        while True:
            spans = (await http.get(f"/api/traces/{trace_id}?soon=1")).json()["spans"]
            if wanted <= {span["name"] for span in spans}:
                return list(spans)
            await asyncio.sleep(0.05)


async def test_decisions_of_the_policy_are_shown_to_who_looks(http: httpx.AsyncClient) -> None:
    async with http.stream("GET", "/api/events") as response, asyncio.timeout(30):
        async for line in response.aiter_lines():
            if '"policy":[{' in line:
                break
