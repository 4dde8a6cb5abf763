"""Processes die in the middle of a call's arguments: the client's stream goes on, and the call is that of an undisturbed run."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import pytest_asyncio

from pdmesh.client import AsyncClient, Tool
from pdmesh.client.types import Completed, Delta
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from pdmesh.models.registry import ensure_model
from tests.mesh.checks import Footprint, assert_whole, is_running
from tests.support.waiting import eventually

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.real_model, pytest.mark.timeout(300)]
ASKED = "Plan a week in Portugal: a town for each day."
STOP = {
    "type": "object",
    "properties": {"town": {"type": "string", "minLength": 4, "maxLength": 30}, "nights": {"type": "integer", "maximum": 9}},
    "required": ["town", "nights"],
    "additionalProperties": False,
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"stops": {"type": "array", "items": STOP, "minItems": 12, "maxItems": 12}},
    "required": ["stops"],
    "additionalProperties": False,
}
"""Many arguments: a process that dies after some of them leaves most to others."""
SAMPLING: Any = {"max_tokens": 700, "temperature": 0.8, "seed": 3}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def real() -> AsyncIterator[LocalMesh]:
    """Real weights. What dies is started again."""
    folder: Path = ensure_model("smollm2-135m-instruct", print)
    config = LocalMeshConfig(
        model=str(folder), num_prefill=1, num_decode=2, num_routers=2, port=0, http_port=0, num_threads=1, stop_grace_s=60
    )
    async with LocalMesh(config) as mesh:
        footprint = Footprint.of(mesh)
        yield mesh
        footprint.grow(mesh)
    footprint.assert_gone()


@dataclass
class Heard:
    """What has come of a stream, and whether it has ended."""

    calls: list[list[str]] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    num_resubmissions: int = 0

    def take(self, call_id: str | None, name: str | None, arguments: str) -> None:
        if name:
            self.calls.append([call_id or "", name, ""])
        self.calls[-1][2] += arguments

    @property
    def is_within_arguments(self) -> bool:
        return bool(self.calls) and self.calls[-1][2].count("town") >= 2 and not self.finish


async def over_http(mesh: LocalMesh, heard: Heard) -> Heard:
    """The stream of OpenAI's client."""
    tools: Any = [{"type": "function", "function": {"name": "plan", "parameters": SCHEMA}}]
    messages: Any = [{"role": "user", "content": ASKED}]
    async with openai.AsyncOpenAI(base_url=f"{mesh.http_urls[0]}/v1", api_key="none", timeout=200, max_retries=0) as client:
        usage: Any = {"stream_options": {"include_usage": True}}
        stream = await client.chat.completions.create(
            model="",
            messages=messages,
            tools=tools,
            tool_choice="required",
            parallel_tool_calls=False,
            stream=True,
            **SAMPLING,
            **usage,
        )
        async for chunk in stream:
            for choice in chunk.choices:
                heard.text += choice.delta.content or ""
                for call in choice.delta.tool_calls or []:
                    heard.take(call.id, call.function and call.function.name, (call.function and call.function.arguments) or "")
                heard.finish = choice.finish_reason or heard.finish
            for report in (chunk.model_extra or {}).get("pdmesh", []):
                heard.num_resubmissions = report["timings"]["num_resubmissions"]
    return heard


async def over_grpc(mesh: LocalMesh, heard: Heard) -> Heard:
    """The stream of the client library, which goes on at another router."""
    options: Any = {"tools": [Tool("plan", "", SCHEMA)], "tool_choice": "required", "parallel_tool_calls": False}
    async with (
        AsyncClient(mesh.router_addresses) as client,
        client.chat_stream([("user", ASKED)], timeout=200, **options, **SAMPLING) as events,
    ):
        async for event in events:
            if isinstance(event, Delta):
                heard.text += event.text
                for call in event.tool_calls:
                    heard.take(call.id, call.name, call.arguments)
                heard.finish = event.finish_reason.value if event.finish_reason else heard.finish
            elif isinstance(event, Completed):
                heard.num_resubmissions = event.timings.num_resubmissions
    return heard


async def decoding_worker(mesh: LocalMesh) -> str:
    """The decode worker that runs the one request."""
    async with AsyncClient(mesh.router_addresses) as client:
        while True:
            for worker in (await client.status(timeout=10)).workers:
                if worker.info.worker_id.startswith("decode") and worker.load.num_running:
                    return worker.info.worker_id
            await asyncio.sleep(0.02)


async def the_router(mesh: LocalMesh) -> str:
    """The router that a client asks first."""
    return "router-0"


@pytest.mark.parametrize(
    ("stream", "victim"), [(over_http, decoding_worker), (over_grpc, decoding_worker), (over_grpc, the_router)]
)
async def test_a_call_goes_on_where_a_process_died(
    real: LocalMesh, stream: Callable[..., Any], victim: Callable[[LocalMesh], Any]
) -> None:
    await real.wait_ready(60)
    undisturbed = await stream(real, Heard())
    (call,) = undisturbed.calls
    jsonschema.validate(json.loads(call[2]), SCHEMA)
    assert (call[1], undisturbed.finish, undisturbed.num_resubmissions) == ("plan", "tool_calls", 0)

    heard = Heard()
    task = asyncio.create_task(stream(real, heard))
    await eventually(lambda: heard.is_within_arguments or task.done(), timeout_s=120)
    name = await victim(real)
    pid, so_far = real.member(name).pid, heard.calls[-1][2]
    real.kill(name, signal.SIGKILL)
    await eventually(lambda: not is_running(pid))
    assert heard.is_within_arguments and not task.done()
    await task
    assert heard.calls == undisturbed.calls and heard.calls[-1][2].startswith(so_far)
    assert (heard.text, heard.finish) == (undisturbed.text, "tool_calls")
    assert heard.num_resubmissions == (1 if name.startswith("decode") else 0)
    await real.wait_ready(60)
    await assert_whole(real, timeout_s=30)
