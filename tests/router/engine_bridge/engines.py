"""A router whose workers are engines of vLLM's protocol: other routers, which serve it, in front of stub workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from pdmesh.v1 import mesh_pb2
from tests.router.mesh import Answer, Mesh, config_for, running_mesh, running_router
from tests.router.stub_workers import StubWorker
from tests.support.waiting import eventually


@dataclass
class Bridged:
    """The router in front, and the engines."""

    front: Mesh
    engines: list[Mesh]

    def busy(self) -> list[Mesh]:
        """The engines that hold a request."""
        return [engine for engine in self.engines if engine["d0"].held]

    async def until_ready(self, num_engines: int) -> None:
        fleet = self.front.router.core.fleet
        await eventually(lambda: sum(view.decode for view in fleet.views()) == num_engines)

    async def until_whole(self) -> None:
        for mesh in (self.front, *self.engines):
            await mesh.until_whole()


@asynccontextmanager
async def bridged(folder: Path, *, num_engines: int = 1, **settings: object) -> AsyncIterator[Bridged]:
    """Engines, each a router with stub workers of its own, and a router in front that has found them."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(running_mesh(folder, prefill=0)) for _ in range(num_engines)]
        addresses = tuple(f"grpc://{address_of(engine)}" for engine in engines)
        config = config_for(folder, engine_address=addresses, **settings)  # type: ignore[arg-type]
        router, stub = await stack.enter_async_context(running_router(config))
        result = Bridged(Mesh(router, stub, {}), engines)
        await result.until_ready(num_engines)
        yield result


def address_of(engine: Mesh) -> str:
    return engine.router.server.address


async def begun(mesh: Bridged, message: mesh_pb2.GenerateRequest, num_tokens: int) -> tuple[Answer, asyncio.Task[None], Mesh]:
    """Ask, and return once `num_tokens` of each choice are with the client, and the engine stands: the answer, which grows, its
    reader, and the engine."""
    for engine in mesh.engines:
        only(engine).pause_at = num_tokens
    answer = Answer()
    reader = asyncio.create_task(_read(mesh.front, message, answer))
    choices = range(message.sampling.n or 1)
    await eventually(lambda: reader.done() or all(len(answer.tokens(choice)) == num_tokens for choice in choices))
    assert not reader.done()
    (engine,) = mesh.busy()
    return answer, reader, engine


async def _read(front: Mesh, message: mesh_pb2.GenerateRequest, answer: Answer) -> None:
    call = front.stub.Generate(message, timeout=30.0)
    try:
        async for each in call:
            answer.take(each)
    finally:
        call.cancel()
    answer.check_indexes()


async def kill(engine: Mesh) -> None:
    """As if the process of the engine were gone."""
    await engine.router.server.server.stop(None)


def only(engine: Mesh) -> StubWorker:
    """Its worker."""
    return engine["d0"]
