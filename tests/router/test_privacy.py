"""What clients say stays out of traces, and of the logs unless the operator wants it there."""

from __future__ import annotations

import logging
from pathlib import Path

import grpc.aio
import httpx
import pytest

from pdmesh.runtime.telemetry.otlp import encode_request, encode_resource
from pdmesh.runtime.telemetry.tracing import Tracing
from pdmesh.v1 import common_pb2, mesh_pb2
from tests.router.mesh import Mesh, running_mesh
from tests.runtime.telemetry.collected import Collected

CANARY = "canary-6f1d"


async def _say_it_everywhere(mesh: Mesh) -> None:
    """In prompts, messages, stop strings, schemas and headers; in requests that run and in those that are refused."""
    sampling = common_pb2.SamplingParams(max_tokens=4, stop=[CANARY])
    await mesh.generate(mesh_pb2.GenerateRequest(text=CANARY, sampling=sampling))
    chat = mesh_pb2.ChatRequest(messages=[mesh_pb2.ChatMessage(role="user", content=CANARY)], sampling=sampling)
    assert [message async for message in mesh.stub.Chat(chat)]
    await mesh.stub.Tokenize(mesh_pb2.TokenizeRequest(text=CANARY))
    for wrong in (
        mesh_pb2.GenerateRequest(text=CANARY, sampling=common_pb2.SamplingParams(n=99)),
        mesh_pb2.GenerateRequest(text=CANARY * 100_000),
        mesh_pb2.GenerateRequest(text="x", options=mesh_pb2.RequestOptions(request_id=f"{CANARY}!")),
        mesh_pb2.GenerateRequest(text="x", model=CANARY),
    ):
        with pytest.raises(grpc.aio.AioRpcError):
            await mesh.generate(wrong)
    assert mesh.router.http is not None
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {CANARY}"}) as http:
        for path, body in (("completions", {"prompt": CANARY}), ("chat/completions", {"messages": CANARY}), (CANARY, {})):
            await http.post(f"{mesh.router.http.url}/v1/{path}", json={"model": "tiny", "max_tokens": 4, **body})


@pytest.mark.parametrize("switched_on", [False, True])
async def test_the_canary(
    model_folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, switched_on: bool
) -> None:
    caplog.set_level(logging.DEBUG)
    for name in ("httpx", "httpcore"):  # the client's own words
        monkeypatch.setattr(logging.getLogger(name), "level", logging.CRITICAL)
    spans = Collected()
    async with running_mesh(model_folder, http_port=0, max_prompt_bytes=100_000, log_requests=switched_on) as mesh:
        mesh.router.core.tracing = Tracing(spans)
        await _say_it_everywhere(mesh)
    assert len(caplog.records) > 5
    assert (CANARY in caplog.text) is switched_on
    assert sum(span.name.startswith("generate") for span in spans.spans) >= 7
    assert CANARY not in str(encode_request(spans.spans, encode_resource("pdmesh-router", {}, {}), 0))
