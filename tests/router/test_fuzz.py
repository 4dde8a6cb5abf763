"""Whatever a client sends, it gets an answer or a status that is its own fault; the router goes on."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import TypeVar

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.v1 import common_pb2, mesh_pb2
from tests.router.mesh import Mesh, expected, request, running_mesh

T = TypeVar("T")
CALLERS_FAULT = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE}

uint32 = st.one_of(st.integers(0, 400), st.integers(0, 2**32 - 1))
number = st.one_of(st.floats(), st.floats(0, 2))
text = st.one_of(st.sampled_from(["", "tiny", "hello", "stop"]), st.text(max_size=30))
finish = st.integers(0, 5)
grammars = st.one_of(text, st.sampled_from(["{}", "a+", "(a", 'start: "a" | /b+/', '{"type": "object"}']))
constraint = st.one_of(
    st.just(common_pb2.Constraint()),
    st.builds(lambda value: common_pb2.Constraint(json_schema=value), grammars),
    st.builds(lambda value: common_pb2.Constraint(regex=value), grammars),
    st.builds(lambda value: common_pb2.Constraint(grammar=value), grammars),
    st.builds(lambda values: common_pb2.Constraint(choice=common_pb2.Alternatives(values=values)), st.lists(text, max_size=3)),
)
sampling = st.builds(
    lambda fields: common_pb2.SamplingParams(**fields),
    st.fixed_dictionaries(
        {"max_tokens": st.integers(0, 12)},
        optional={
            "temperature": number,
            "top_k": uint32,
            "top_p": number,
            "min_p": number,
            "repetition_penalty": number,
            "presence_penalty": number,
            "seed": st.integers(0, 2**64 - 1),
            "min_tokens": st.integers(0, 14),
            "ignore_eos": st.booleans(),
            "stop": st.lists(text, max_size=3),
            "stop_token_ids": st.lists(uint32, max_size=3),
            "logprobs": st.integers(0, 25),
            "n": st.integers(0, 18),
            "constraint": constraint,
        },
    ),
)
options = st.builds(
    lambda fields: mesh_pb2.RequestOptions(**fields),
    st.fixed_dictionaries(
        {}, optional={"request_id": text, "tenant": text, "priority": finish, "mode": finish, "cache_salt": text}
    ),
)
emitted = st.builds(
    lambda index, token_ids, reason: common_pb2.EmittedChoice(index=index, token_ids=token_ids, finish_reason=reason),
    st.integers(0, 4),
    st.lists(uint32, max_size=6),
    finish,
)
resume = st.builds(
    lambda seed, choices: mesh_pb2.Resume(seed=seed, emitted=choices), st.integers(0, 2**64 - 1), st.lists(emitted, max_size=3)
)
messages = st.lists(st.builds(lambda role, content: mesh_pb2.ChatMessage(role=role, content=content), text, text), max_size=3)
tokens = st.builds(lambda ids: mesh_pb2.TokenIds(ids=ids), st.lists(uint32, max_size=20))
common = {"model": text, "sampling": sampling, "options": options, "resume": resume}


class Running:
    """A mesh on an event loop of its own: hypothesis calls its tests from no loop."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._context = running_mesh(folder, place_timeout_s=0.2)
        self.mesh: Mesh = self.call(self._context.__aenter__())

    def call(self, work: Coroutine[object, object, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=30)

    def close(self) -> None:
        self.call(self._context.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


@pytest.fixture(scope="module")
def running(model_folder: Path) -> Iterator[Running]:
    running = Running(model_folder)
    yield running
    running.call(running.mesh.until_whole())
    assert running.call(running.mesh.generate(request())).tokens() == expected(8)
    running.close()


async def _stream(call: "grpc.aio.UnaryStreamCall[object, mesh_pb2.GenerateResponse]") -> None:
    try:
        kinds = [message.WhichOneof("event") async for message in call]
    except grpc.aio.AioRpcError as error:
        assert error.code() in CALLERS_FAULT, error
    else:
        assert kinds[0] == "started" and kinds[-1] == "completed"


@settings(max_examples=60, deadline=None)
@given(st.fixed_dictionaries({}, optional={**common, "text": text}) | st.fixed_dictionaries({"tokens": tokens}, optional=common))
def test_generate(running: Running, fields: dict[str, object]) -> None:
    async def call() -> None:
        await _stream(running.mesh.stub.Generate(mesh_pb2.GenerateRequest(**fields), timeout=20))  # type: ignore[arg-type]

    running.call(call())


@settings(max_examples=30, deadline=None)
@given(st.fixed_dictionaries({"messages": messages}, optional=common))
def test_chat(running: Running, fields: dict[str, object]) -> None:
    async def call() -> None:
        await _stream(running.mesh.stub.Chat(mesh_pb2.ChatRequest(**fields), timeout=20))  # type: ignore[arg-type]

    running.call(call())


@settings(max_examples=30, deadline=None)
@given(st.fixed_dictionaries({}, optional={"model": text, "text": text, "messages": messages}))
def test_tokenize(running: Running, fields: dict[str, object]) -> None:
    async def call() -> None:
        try:
            answer = await running.mesh.stub.Tokenize(mesh_pb2.TokenizeRequest(**fields), timeout=20)  # type: ignore[arg-type]
        except grpc.aio.AioRpcError as error:
            assert error.code() in CALLERS_FAULT, error
        else:
            assert answer.max_context == 2048

    running.call(call())


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["Generate", "Chat", "Tokenize"]), st.binary(max_size=60))
def test_bytes(running: Running, method: str, data: bytes) -> None:
    async def call() -> None:
        address = running.mesh.router.server.address
        async with grpc.aio.insecure_channel(address) as channel:
            stream: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(f"/pdmesh.v1.Mesh/{method}")
            try:
                async for _ in stream(data, timeout=20):
                    pass
            except grpc.aio.AioRpcError as error:
                assert error.code() in CALLERS_FAULT, error

    running.call(call())
