"""A protocol of clients is one module and one line of `router/api/protocols.py`: here one with a gRPC service and a route."""

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from pdmesh.runtime.rpc.channel import connect
from pdmesh.runtime.rpc.server import GrpcServer
from pdmesh.v1 import common_pb2, mesh_pb2
from router.api.frontend import Frontend
from router.api.http.body import HttpSettings
from router.api.protocols import PROTOCOLS, ClientProtocol
from tests.router import stub_model
from tests.router.mesh import expected, running_mesh, write_model

SERVICE = "example.Plain"
PROMPT = "a prompt that is longer than what a decode worker computes itself"


async def complete(frontend: Frontend, prompt: str) -> str:
    """The whole output, as text."""
    sampling = common_pb2.SamplingParams(seed=5, max_tokens=8)
    asked = mesh_pb2.GenerateRequest(text=prompt, sampling=sampling)
    text = ""
    async with aclosing(frontend.generate(asked, time_left_s=None)) as messages:
        async for message in messages:
            text += message.delta.text
    return text


def add_services(server: GrpcServer, frontend: Frontend) -> None:
    """Text in, text out."""

    async def call(prompt: bytes, context: object) -> bytes:
        return (await complete(frontend, prompt.decode())).encode()

    def add(answer: Callable[[bytes, object], Awaitable[bytes]], to: grpc.aio.Server) -> None:
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(answer)
        to.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Complete": handler}),))

    server.register(add, call, SERVICE)


def routes(frontend: Frontend, settings: HttpSettings) -> list[Route]:
    async def call(request: Request) -> Response:
        return PlainTextResponse(await complete(frontend, (await request.body()).decode()))

    return [Route("/plain", call, methods=["POST"])]


async def test_a_protocol_is_served_beside_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROTOCOLS, "plain", ClientProtocol(add_services, routes))  # the one line of the registry
    async with running_mesh(write_model(tmp_path), http_port=0) as mesh:
        text = stub_model.text_of(expected(8, prompt=list(PROMPT.encode())))
        channel = connect(mesh.router.server.address)
        over_grpc: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{SERVICE}/Complete")
        assert (await over_grpc(PROMPT.encode())).decode() == text
        await channel.close()
        assert mesh.router.http is not None
        async with httpx.AsyncClient(base_url=mesh.router.http.url) as http:
            assert (await http.post("/plain", content=PROMPT)).text == text
            assert (await http.get("/v1/models")).status_code == 200
            assert "/plain" in (await http.get("/nowhere")).text
        assert len(mesh["d0"].submits) == 2
        await mesh.until_whole()
