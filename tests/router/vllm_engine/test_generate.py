"""Generate and Abort, through a real router and stub workers, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from pdmesh.runtime.errors import error_from_rpc
from pdmesh.runtime.rpc.channel import connect
from pdmesh.third_party.vllm import vllm_engine_pb2 as pb
from pdmesh.third_party.vllm.vllm_engine_pb2_grpc import VllmEngineStub
from pdmesh.v1 import common_pb2, mesh_pb2
from router.api.vllm.requests import to_mesh
from tests.router.mesh import PROMPT, Mesh, expected, running_mesh
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pdmesh.third_party.vllm.vllm_engine_pb2_grpc import VllmEngineAsyncStub


@asynccontextmanager
async def serving(folder: Path, **settings: object) -> AsyncIterator[tuple[Mesh, VllmEngineAsyncStub]]:
    async with running_mesh(folder, **settings) as mesh:  # type: ignore[arg-type]
        channel = connect(mesh.router.server.address)
        stub: VllmEngineAsyncStub = VllmEngineStub(channel)
        yield mesh, stub
        await channel.close()


@dataclass
class Answer:
    """A call, collected."""

    chunks: dict[int, list[pb.GenerateStreamChunk]] = field(default_factory=dict)
    ends: dict[int, pb.GenerateComplete] = field(default_factory=dict)

    def tokens(self, index: int = 0) -> list[int]:
        return [token for chunk in self.chunks[index] for token in chunk.token_ids]

    async def read(self, call: AsyncIterable[pb.GenerateResponse]) -> Answer:
        async for response in call:
            self.take(response)
        return self

    def take(self, response: pb.GenerateResponse) -> None:
        if response.WhichOneof("response") == "chunk":
            assert response.chunk.index not in self.ends
            self.chunks.setdefault(response.chunk.index, []).append(response.chunk)
        else:
            self.ends[response.complete.index] = response.complete


def request(id: str = "chatcmpl-1", *, stream: bool = True, max_tokens: int = 8, **sampling: object) -> pb.GenerateRequest:
    params = pb.SamplingParams(seed=5, max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
    return pb.GenerateRequest(request_id=id, tokenized=pb.TokenizedInput(input_ids=PROMPT), sampling_params=params, stream=stream)


async def test_stream(model_folder: Path) -> None:
    async with serving(model_folder) as (mesh, stub):
        mesh["d0"].pause_at = 10
        answer = Answer()
        async for response in stub.Generate(request(max_tokens=20)):
            mesh["d0"].resume.set()
            answer.take(response)
        assert answer.tokens() == expected(20) and len(answer.chunks[0]) > 1
        assert all(chunk.completion_tokens == len(chunk.token_ids) for chunk in answer.chunks[0])
        assert {chunk.prompt_tokens for chunk in answer.chunks[0]} == {50}
        end = answer.ends[0]
        assert (list(end.output_ids), end.finish_reason) == (expected(20), "length")
        assert (end.prompt_tokens, end.completion_tokens) == (50, 20)
        assert end.WhichOneof("matched_stop") is None
        assert mesh["d0"].submits[0].request_id.startswith("chatcmpl-1-")
        await mesh.until_whole()


async def test_whole_answer_of_several_choices_with_logprobs(model_folder: Path) -> None:
    async with serving(model_folder) as (mesh, stub):
        answer = await Answer().read(stub.Generate(request(stream=False, n=3, logprobs=2)))
        assert not answer.chunks
        for index in range(3):
            end = answer.ends[index]
            assert list(end.output_ids) == list(end.output_logprobs.token_ids) == expected(8, choice=index)
            assert end.output_logprobs.token_logprobs[1] == -0.5
            assert len(end.output_logprobs.top_logprobs[1].values) == 2
        await mesh.until_whole()


async def test_streamed_logprobs_belong_to_their_chunk(model_folder: Path) -> None:
    async with serving(model_folder) as (_, stub):
        answer = await Answer().read(stub.Generate(request(n=2, logprobs=0)))
        for index in range(2):
            assert answer.tokens(index) == expected(8, choice=index)
            assert all(list(chunk.output_logprobs.token_ids) == list(chunk.token_ids) for chunk in answer.chunks[index])


async def test_every_parameter_reaches_the_workers(model_folder: Path) -> None:
    async with serving(model_folder) as (mesh, stub):
        sampling: dict[str, Any] = {
            "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.5,
            "frequency_penalty": -0.3, "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [70], "logprobs": 3, "n": 2,
        }  # fmt: skip
        await Answer().read(stub.Generate(request(max_tokens=4, logit_bias={70: -1.5}, **sampling)))
        # Floats of 32 bits on their wire, doubles on ours: 0.7 stays 0.7.
        biases = [common_pb2.TokenBias(token_id=70, bias=-1.5)]
        assert mesh["d0"].submits[0].request.sampling == common_pb2.SamplingParams(
            seed=5, max_tokens=4, logit_bias=biases, **sampling
        )
        text = pb.GenerateRequest(text="Hallo", sampling_params=pb.SamplingParams(max_tokens=1, seed=-1))
        await Answer().read(stub.Generate(text))
        submitted = mesh["d0"].submits[1].request
        assert submitted.sampling == common_pb2.SamplingParams(seed=2**64 - 1, max_tokens=1, n=1)
        tokenized = await mesh.stub.Tokenize(mesh_pb2.TokenizeRequest(text="Hallo"))
        assert list(submitted.prompt_token_ids) == list(tokenized.token_ids)


@pytest.mark.parametrize(
    ("constraint", "ours"),
    [
        ({"json_schema": "{}"}, common_pb2.Constraint(json_schema="{}")),
        ({"regex": "a+"}, common_pb2.Constraint(regex="a+")),
        ({"grammar": "start: X"}, common_pb2.Constraint(grammar="start: X")),
        ({"json_object": True}, common_pb2.Constraint(json_schema='{"type": "object"}')),
        ({"json_object": False}, common_pb2.Constraint()),
        ({"choice": pb.ChoiceConstraint(choices=["a"])}, common_pb2.Constraint(choice=common_pb2.Alternatives(values=["a"]))),
        ({"choice": pb.ChoiceConstraint()}, common_pb2.Constraint(choice=common_pb2.Alternatives())),
    ],
)
def test_constraints(constraint: dict[str, Any], ours: common_pb2.Constraint) -> None:
    assert to_mesh(request(**constraint)).sampling.constraint == ours


async def test_what_ended_a_choice(model_folder: Path) -> None:
    tokens = expected(8)
    letters = [chr(ord("a") + token - 64) for token in tokens]
    async with serving(model_folder) as (mesh, stub):
        by_string = (await Answer().read(stub.Generate(request(stop=["".join(letters[2:4])])))).ends[0]
        assert (by_string.finish_reason, by_string.matched_stop_str) == ("stop", "".join(letters[2:4]))
        assert list(by_string.output_ids) == tokens[:4]
        await mesh.until_whole()


async def test_abort_while_decoding_frees_the_request(model_folder: Path) -> None:
    async with serving(model_folder) as (mesh, stub):
        mesh["d0"].pause_at = 4
        answers = [asyncio.create_task(Answer().read(stub.Generate(request(str(number))))) for number in range(3)]
        await eventually(lambda: len(mesh["d0"].held) == 3)
        await stub.Abort(pb.AbortRequest(request_ids=["0", "2", "unknown"]))
        await stub.Abort(pb.AbortRequest(request_ids=["0"]))
        for number in (0, 2):
            answer = await answers[number]
            assert answer.ends[0].finish_reason == "abort"
            assert list(answer.ends[0].output_ids) == expected(answer.ends[0].completion_tokens)
        await eventually(lambda: len(mesh["d0"].held) == 1)
        mesh["d0"].resume.set()
        assert (await answers[1]).tokens() == expected(8)
        await mesh.until_whole()


async def test_abort_in_the_queue(model_folder: Path) -> None:
    async with serving(model_folder, max_inflight=1, max_queued=1) as (mesh, stub):
        mesh["d0"].pause_at = 4
        admission = mesh.router.core.flow_control.admission
        running = asyncio.create_task(Answer().read(stub.Generate(request("running"))))
        await eventually(lambda: admission.num_inflight == 1)
        queued = asyncio.create_task(Answer().read(stub.Generate(request("queued"))))
        await eventually(lambda: admission.num_queued == 1)
        await stub.Abort(pb.AbortRequest(request_ids=["queued"]))
        assert (await queued).ends[0].finish_reason == "abort"
        assert admission.num_queued == 0
        mesh["d0"].resume.set()
        assert (await running).tokens() == expected(8)
        await mesh.until_whole()


async def test_abort_of_a_client_that_does_not_read(model_folder: Path) -> None:
    """The handler is sending when Abort comes; the call has to end with a status all the same."""
    async with serving(model_folder, max_buffered_tokens=50_000) as (mesh, stub):
        call = stub.Generate(request("slow", max_tokens=1900, n=16, logprobs=20))
        admission = mesh.router.core.flow_control.admission
        await eventually(lambda: admission.num_inflight == 1)
        await eventually(lambda: not mesh["d0"].held, timeout_s=30)  # all is generated; the client has read nothing
        await stub.Abort(pb.AbortRequest(request_ids=["slow"]))
        answer = await Answer().read(call)
        assert len(answer.ends) == 16
        assert answer.ends[15].finish_reason == "abort" and answer.ends[15].completion_tokens < 1900
        await mesh.until_whole()


async def test_a_client_that_leaves_frees_the_request(model_folder: Path) -> None:
    async with serving(model_folder) as (mesh, stub):
        mesh["d0"].pause_at = 4
        call = stub.Generate(request())
        await eventually(lambda: mesh["d0"].held)
        call.cancel()
        await mesh.until_whole()
        assert len(mesh["d0"].cancels) == 1
        mesh["d0"].pause_at = None
        assert (await Answer().read(stub.Generate(request()))).tokens() == expected(8)  # its id is free again


async def test_refusals_name_their_field(model_folder: Path) -> None:
    def changed(**fields: object) -> pb.GenerateRequest:
        message = request()
        message.MergeFrom(pb.GenerateRequest(**fields))  # type: ignore[arg-type]
        return message

    cases = [
        (pb.GenerateRequest(), "input"),
        (pb.GenerateRequest(tokenized=pb.TokenizedInput()), "input"),
        (pb.GenerateRequest(text=""), "input"),
        (pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[70, 999])), "tokenized.input_ids[1]"),
        (changed(kv_transfer_params=pb.KvTransferParams()), "kv_transfer_params"),
        (changed(kv_transfer_params_json="{}"), "kv_transfer_params_json"),
        (changed(mm_inputs=pb.MultimodalInputs()), "mm_inputs"),
        (changed(extra_mm_inputs=[pb.MultimodalInputs()]), "extra_mm_inputs"),
        (changed(media_refs=pb.MediaRefs()), "media_refs"),
        (changed(data_parallel_rank=1), "data_parallel_rank"),
        (request(prompt_logprobs=0), "sampling_params.prompt_logprobs"),
        (request(logit_bias={-1: 0.5}), "sampling_params.logit_bias"),
        (request(logit_bias={999: 0.5}), "sampling_params.logit_bias"),
        (request(logit_bias={1: 101}), "sampling_params.logit_bias"),
        (request(truncate_prompt_tokens=-1), "sampling_params.truncate_prompt_tokens"),
        (request(structural_tag="x"), "sampling_params.structural_tag"),
        (request(logprobs=-1), "sampling_params.logprobs"),
        (request(logprobs=21), "sampling_params.logprobs"),
        (request(temperature=-1), "sampling_params.temperature"),
        (request(temperature=float("nan")), "sampling_params.temperature"),
        (request(top_p=1.5), "sampling_params.top_p"),
        (request(n=17), "sampling_params.n"),
        (request(n=2**32 - 1), "sampling_params.n"),  # before anything of that size is made
        (request(max_tokens=0), "sampling_params.max_tokens"),
        (request(stop=[""]), "sampling_params.stop[0]"),
    ]
    async with serving(model_folder) as (mesh, stub):
        for message, name in cases:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await Answer().read(stub.Generate(message))
            error = error_from_rpc(raised.value)
            assert error.code is grpc.StatusCode.INVALID_ARGUMENT, (name, error)
            assert error.field == name and error.message.startswith(f"{name}: "), (name, error)
        assert mesh["d0"].submits == []


async def test_an_id_that_runs_already(model_folder: Path) -> None:
    async with serving(model_folder) as (mesh, stub):
        mesh["d0"].pause_at = 4
        first = asyncio.create_task(Answer().read(stub.Generate(request())))
        await eventually(lambda: mesh["d0"].held)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await Answer().read(stub.Generate(request()))
        assert raised.value.code() is grpc.StatusCode.ALREADY_EXISTS
        mesh["d0"].resume.set()
        assert (await first).tokens() == expected(8)
        await mesh.until_whole()
