"""A router in this process in front of stub workers, and a client as small as can be."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc.aio

from pdmesh.runtime.rpc.channel import connect
from pdmesh.v1 import common_pb2, mesh_pb2, mesh_pb2_grpc
from router.config import RouterConfig
from router.main import Router
from tests.router import stub_model
from tests.router.stub_workers import DECODE, PREFILL, StubWorker
from tests.support.tiny_models import IM_END, write_byte_tokenizer
from tests.support.waiting import eventually

PROMPT = list(range(64, 64 + 50))


@dataclass
class Answer:
    """A stream, collected."""

    started: mesh_pb2.Started = field(default_factory=mesh_pb2.Started)
    deltas: list[mesh_pb2.Delta] = field(default_factory=list)
    completed: mesh_pb2.Completed | None = None

    def tokens(self, choice: int = 0) -> list[int]:
        return [token for delta in self.deltas if delta.choice == choice for token in delta.token_ids]

    def text(self, choice: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas if delta.choice == choice)

    def last(self, choice: int = 0) -> mesh_pb2.Delta:
        return [delta for delta in self.deltas if delta.choice == choice][-1]

    @property
    def timings(self) -> mesh_pb2.Timings:
        assert self.completed is not None
        return self.completed.timings

    def check_indexes(self) -> None:
        """Each index once and in order."""
        following: dict[int, int] = {}
        for delta in self.deltas:
            if delta.choice in following:
                assert delta.first_index == following[delta.choice]
            following[delta.choice] = delta.first_index + len(delta.token_ids)

    def take(self, message: mesh_pb2.GenerateResponse) -> None:
        kind = message.WhichOneof("event")
        if kind == "started":
            self.started = message.started
        elif kind == "delta":
            self.deltas.append(message.delta)
        else:
            self.completed = message.completed


@dataclass
class Mesh:
    """What a test has in hands."""

    router: Router
    stub: mesh_pb2_grpc.MeshAsyncStub
    workers: dict[str, StubWorker]

    def __getitem__(self, name: str) -> StubWorker:
        return self.workers[name]

    async def generate(self, request: mesh_pb2.GenerateRequest, *, timeout: float = 30.0) -> Answer:
        answer, call = Answer(), self.stub.Generate(request, timeout=timeout)
        try:
            async for message in call:
                answer.take(message)
        finally:
            call.cancel()  # gRPC misses a cancellation that comes just when the request has gone out
        answer.check_indexes()
        return answer

    async def until_whole(self) -> None:
        """Nothing is left on any worker, and no place is taken."""
        admission = self.router.core.flow_control.admission
        await eventually(lambda: not any(worker.held for worker in self.workers.values()))
        await eventually(lambda: admission.num_inflight == admission.num_queued == 0)
        await eventually(lambda: len(self.router.core.background) == 0)


def request(
    prompt: Sequence[int] = PROMPT,
    *,
    max_tokens: int = 8,
    seed: int = 5,
    mode: mesh_pb2.PrefillMode.ValueType = mesh_pb2.PREFILL_MODE_UNSPECIFIED,
    resume: mesh_pb2.Resume | None = None,
    **sampling: object,
) -> mesh_pb2.GenerateRequest:
    return mesh_pb2.GenerateRequest(
        tokens=mesh_pb2.TokenIds(ids=prompt),
        sampling=common_pb2.SamplingParams(seed=seed, max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
        options=mesh_pb2.RequestOptions(mode=mode),
        resume=resume,
    )


def expected(num_tokens: int, *, prompt: Sequence[int] = PROMPT, seed: int = 5, choice: int = 0) -> list[int]:
    return stub_model.output(list(prompt), seed, choice, num_tokens)


def write_model(folder: Path) -> Path:
    """A folder with the byte tokenizer and what the router reads of config.json."""
    write_byte_tokenizer(folder, max_context=stub_model.MAX_CONTEXT)
    config = {"vocab_size": stub_model.VOCAB_SIZE, "max_position_embeddings": stub_model.MAX_CONTEXT, "eos_token_id": IM_END}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def config_for(folder: Path, workers: Sequence[StubWorker] = (), **settings: object) -> RouterConfig:
    config = RouterConfig(
        port=0,
        models=(f"tiny={folder}",),
        workers=tuple(worker.address for worker in workers),
        stream_timeout_s=1.0,
        heartbeat_ms=50,
        report_period_ms=50,
        reattach_grace_s=0.5,
        drain_grace_s=0.3,
        linger_s=0.0,
        policy="least-loaded",  # the stubs know no speed: nothing could be predicted of them
    )
    config = replace(config, **settings)  # type: ignore[arg-type]
    config.validate()
    return config


@asynccontextmanager
async def running_mesh(folder: Path, *, prefill: int = 1, decode: int = 1, **settings: object) -> AsyncIterator[Mesh]:
    """Stub workers p0, p1, …, d0, d1, … and a router that has found all of them."""
    workers = [StubWorker(f"p{number}", (PREFILL,)) for number in range(prefill)]
    workers += [StubWorker(f"d{number}", (DECODE,)) for number in range(decode)]
    async with mesh_of(folder, workers, **settings) as mesh:
        yield mesh


@asynccontextmanager
async def mesh_of(folder: Path, workers: Sequence[StubWorker], **settings: object) -> AsyncIterator[Mesh]:
    """These stub workers, and a router that has found all of them."""
    decode = sum(DECODE in worker.roles for worker in workers)
    for worker in workers:
        await worker.start()
    async with running_router(config_for(folder, workers, **settings)) as (router, stub):
        await eventually(lambda: len(router.core.fleet.views()) == len(workers))
        await eventually(lambda: sum(view.decode for view in router.core.fleet.views()) == decode)
        yield Mesh(router, stub, {worker.name: worker for worker in workers})
    for worker in workers:
        await worker.kill()


@asynccontextmanager
async def running_router(config: RouterConfig) -> AsyncIterator[tuple[Router, mesh_pb2_grpc.MeshAsyncStub]]:
    """A router and a client's stub."""
    router = Router(config)
    address = await router.start()
    channel: grpc.aio.Channel = connect(address)
    stub: mesh_pb2_grpc.MeshAsyncStub = mesh_pb2_grpc.MeshStub(channel)
    try:
        yield router, stub
    finally:
        await channel.close()
        await router.stop()
