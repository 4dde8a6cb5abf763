"""Whatever protocol a caller speaks, its trace goes on: in headers over HTTP, in metadata over gRPC."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError

from pdmesh.runtime.rpc.channel import connect
from pdmesh.runtime.telemetry.propagation import SpanContext, inject
from pdmesh.runtime.telemetry.spans import Span
from pdmesh.runtime.telemetry.tracing import Tracing
from pdmesh.third_party.kserve.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from pdmesh.third_party.vllm.vllm_engine_pb2_grpc import VllmEngineStub
from tests.router.kserve import calls
from tests.router.mesh import Mesh, request
from tests.router.mesh import running_mesh as running
from tests.router.openai.conftest import client_of, url
from tests.router.vllm_engine import test_generate
from tests.runtime.telemetry.collected import Collected
from tests.support.waiting import eventually

METADATA = inject(SpanContext(0xABC, 0xDEF, True, "vendor=1"))
HEADERS = dict(METADATA)


async def _chat(mesh: Mesh) -> None:
    async with client_of(mesh) as client:
        messages = [{"role": "user", "content": "hi"}]
        await client.chat.completions.create(model="tiny", messages=messages, max_tokens=4, extra_headers=HEADERS)  # type: ignore[arg-type]


async def _messages(mesh: Mesh) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    async with httpx.AsyncClient(trust_env=False) as http:
        assert (await http.post(url(mesh, "/v1/messages"), json=body, headers=HEADERS)).status_code == 200


async def _stream(mesh: Mesh) -> None:
    async with client_of(mesh) as client:
        stream = await client.completions.create(model="tiny", prompt="hi", max_tokens=4, stream=True, extra_headers=HEADERS)
        async for _ in stream:
            pass


async def _infer(mesh: Mesh) -> None:
    channel = connect(mesh.router.server.address)
    await GRPCInferenceServiceStub(channel).ModelInfer(calls.request(), metadata=METADATA)
    await channel.close()


async def _infer_stream(mesh: Mesh) -> None:
    channel = connect(mesh.router.server.address)
    async for _ in GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([calls.request()]), metadata=METADATA):
        pass
    await channel.close()


async def _vllm(mesh: Mesh) -> None:
    channel = connect(mesh.router.server.address)
    async for _ in VllmEngineStub(channel).Generate(test_generate.request(), metadata=METADATA):
        pass
    await channel.close()


@pytest.mark.parametrize("ask", [_chat, _messages, _stream, _infer, _infer_stream, _vllm])
async def test_a_trace_goes_on(model_folder: Path, ask: Callable[[Mesh], Awaitable[None]]) -> None:
    async with running(model_folder, http_port=0) as mesh:
        client_stream = Collected()
        mesh.router.core.tracing = Tracing(client_stream, share=0.0)
        await ask(mesh)

        def roots() -> list[Span]:
            return [span for span in client_stream.spans if span.name == "generate tiny"]

        await eventually(roots)
        (root,) = roots()
        assert (root.context.trace_id, root.parent_id, root.context.state) == (0xABC, 0xDEF, "vendor=1")
        assert "error.type" not in root.attributes
        is_chat = ask in (_chat, _messages)
        assert root.attributes["gen_ai.operation.name"] == ("chat" if is_chat else "text_completion")
        await mesh.until_whole()


async def test_what_a_draining_router_refuses_leaves_a_trace(model_folder: Path) -> None:
    async with running(model_folder) as mesh:
        client_stream = Collected()
        mesh.router.core.tracing = Tracing(client_stream, share=0.0)
        await mesh.router.frontend.drain(0.05)
        with pytest.raises(AioRpcError) as refused:
            async for _ in mesh.stub.Generate(request(), metadata=METADATA):
                pass
        assert refused.value.code() is StatusCode.UNAVAILABLE
        (root,) = (span for span in client_stream.spans if span.name == "generate")
        assert (root.context.trace_id, root.parent_id) == (0xABC, 0xDEF)
        assert (root.is_failed, root.attributes["error.type"]) == (True, "UNAVAILABLE")


@pytest.mark.parametrize(
    ("body", "headers", "problem"),
    [
        (b'{"secret', {}, "body"),
        (b'{"model": "tiny", "prompt": "secret", "max_tokens": "secret"}', {}, "max_tokens"),
        (b'{"model": "tiny", "prompt": "hi", "secret": 1}', {}, "body"),
        (b"{}", {"Content-Type": "text/secret"}, "Content-Type"),
        (b"{}", {"X-Request-Timeout-Ms": "secret"}, "X-Request-Timeout-Ms"),
    ],
)
async def test_what_cannot_be_read_over_http_leaves_a_trace_without_its_text(
    model_folder: Path, body: bytes, headers: dict[str, str], problem: str
) -> None:
    async with running(model_folder, http_port=0) as mesh:
        client_stream = Collected()
        mesh.router.core.tracing = Tracing(client_stream, share=0.0)
        async with httpx.AsyncClient(trust_env=False) as http:
            sent = {"Content-Type": "application/json", **HEADERS, **headers}
            answer = await http.post(url(mesh, "/v1/completions"), content=body, headers=sent)
        assert answer.status_code in (400, 415)
        root = next(span for span in client_stream.spans if span.name == "generate")
        assert (root.context.trace_id, root.parent_id) == (0xABC, 0xDEF)
        assert (root.is_failed, root.attributes["error.type"], root.problem) == (True, "INVALID_ARGUMENT", problem)
        assert "secret" not in f"{root.attributes} {root.name} {root.problem}"
        assert all(not span.is_open for span in client_stream.spans)
