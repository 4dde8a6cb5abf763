"""ModelInfer: a whole answer, through a real router and stub workers, over real gRPC."""

import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from pdmesh.runtime.errors import error_from_rpc
from pdmesh.third_party.kserve import grpc_service_pb2 as pb
from pdmesh.v1 import common_pb2, mesh_pb2
from router.api.kserve.requests import Ask
from tests.router import stub_model
from tests.router.kserve.calls import as_raw, flag, ids, output, request, serving, text
from tests.router.mesh import expected


@pytest.mark.parametrize("raw", [False, True])
async def test_tokens_in_tokens_and_text_out(model_folder: Path, raw: bool) -> None:
    async with serving(model_folder) as (mesh, stub):
        message = request(id="my request/1")
        response = await stub.ModelInfer(as_raw(message) if raw else message)
        assert (response.model_name, response.model_version, response.id) == ("tiny", "1", "my request/1")
        assert output(response, "output_ids") == expected(8)
        assert output(response, "text_output") == [stub_model.text_of(expected(8))]
        assert output(response, "finish_reason") == ["length"]
        assert output(response, "num_input_tokens") == [50]
        assert output(response, "num_output_tokens") == [8]
        assert response.parameters["ttft_ns"].uint64_param > 0
        assert response.parameters["seed"].uint64_param == 5
        assert response.parameters["request_id"].string_param == "my-request-1"
        assert mesh["d0"].submits[0].request_id.startswith("my-request-1-")
        await mesh.until_whole()


async def test_text_and_messages_are_those_of_the_mesh(model_folder: Path) -> None:
    dispatch_order = [{"role": "user", "content": "Hé"}]
    async with serving(model_folder) as (mesh, stub):
        await stub.ModelInfer(request(text("text_input", "Hallo")))
        await stub.ModelInfer(request(text("messages", json.dumps(dispatch_order))))
        as_text = await mesh.stub.Tokenize(mesh_pb2.TokenizeRequest(text="Hallo"))
        as_chat = await mesh.stub.Tokenize(mesh_pb2.TokenizeRequest(messages=[mesh_pb2.ChatMessage(role="user", content="Hé")]))
        sent = [list(submit.request.prompt_token_ids) for submit in mesh["d0"].submits]
        assert sent == [list(as_text.token_ids), list(as_chat.token_ids)]


async def test_every_parameter_reaches_the_workers(model_folder: Path) -> None:
    parameters: dict[str, Any] = {
        "temperature": "0.7",  # as text, which clients of Triton send
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "seed": 2**63,
        "max_tokens": 4.0,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [70],
        "logit_bias": {"70": -1.5},
        "logprobs": 3,
        "n": 2,
        "tenant": "t",
        "cache_salt": "s",
        "session_id": "agent",
        "kv_retention_s": "60",
        "priority_hint": -4,
        "priority": 1,
        "mode": "remote",
    }
    async with serving(model_folder) as (mesh, stub):
        await stub.ModelInfer(request(**parameters))
        worker_request = mesh["d0"].submits[0].request
        sampling = worker_request.sampling
        assert sampling == common_pb2.SamplingParams(
            temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.5,
            frequency_penalty=-0.5, seed=2**63, max_tokens=4, min_tokens=2, ignore_eos=True, stop_token_ids=[70], logprobs=3, n=2,
            logit_bias=[common_pb2.TokenBias(token_id=70, bias=-1.5)],
        )  # fmt: skip
        assert worker_request.tenant == "t" and worker_request.cache_salt == "1:t:s"
        assert (worker_request.session_id, worker_request.kv_retention_s, worker_request.session_final) == ("agent", 60, False)
        assert worker_request.priority == common_pb2.PRIORITY_INTERACTIVE
        assert mesh["d0"].submits[0].mode == mesh_pb2.PREFILL_MODE_REMOTE


async def test_parameters_of_the_request_itself(model_folder: Path) -> None:
    message = pb.ModelInferRequest(model_name="tiny", inputs=[ids()])
    message.parameters["temperature"].double_param = 0.25
    message.parameters["max_tokens"].int64_param = 3
    message.parameters["seed"].uint64_param = 5
    message.parameters["ignore_eos"].bool_param = True
    message.parameters["stop"].string_param = '["xyz", "zzz"]'
    async with serving(model_folder) as (mesh, stub):
        response = await stub.ModelInfer(message)
        assert output(response, "output_ids") == expected(3)
        sampling = mesh["d0"].submits[0].request.sampling
        assert (sampling.temperature, sampling.max_tokens, sampling.ignore_eos) == (0.25, 3, True)


@pytest.mark.parametrize(
    ("name", "value", "constraint"),
    [
        ("json_schema", {"type": "object"}, common_pb2.Constraint(json_schema='{"type": "object"}')),
        ("json_schema", "{}", common_pb2.Constraint(json_schema="{}")),
        ("regex", "[a-z]+", common_pb2.Constraint(regex="[a-z]+")),
        ("choice", ["a", "b"], common_pb2.Constraint(choice=common_pb2.Alternatives(values=["a", "b"]))),
        ("grammar", "start: WORD", common_pb2.Constraint(grammar="start: WORD")),
        ("structured_outputs", {"json": {"a": 1}}, common_pb2.Constraint(json_schema='{"a": 1}')),
        ("guided_decoding", '{"regex": "x"}', common_pb2.Constraint(regex="x")),
        ("constraint", {"choice": ["x"]}, common_pb2.Constraint(choice=common_pb2.Alternatives(values=["x"]))),
    ],
)
async def test_constraints(name: str, value: object, constraint: common_pb2.Constraint) -> None:
    parameters: dict[str, Any] = {name: value}
    ask = Ask.read(request(**parameters), can_stream=False)
    assert ask.message.sampling.constraint == constraint
    assert ask.names["sampling.constraint"] == f'inputs["sampling_parameters"].{name}'


async def test_several_choices_with_logprobs(model_folder: Path) -> None:
    async with serving(model_folder) as (_, stub):
        response = await stub.ModelInfer(request(n=3, logprobs=2, max_tokens=4))
        tokens = [expected(4, choice=choice) for choice in range(3)]
        assert output(response, "output_ids") == [token for choice in tokens for token in choice]
        assert output(response, "num_output_tokens") == [4, 4, 4]
        assert output(response, "text_output") == [stub_model.text_of(choice) for choice in tokens]
        for choice, entries in zip(tokens, output(response, "logprobs"), strict=True):
            parsed = json.loads(str(entries))
            assert [entry["token_id"] for entry in parsed] == choice
            assert parsed[1]["logprob"] == -0.5 and len(parsed[1]["top_logprobs"]) == 2


async def test_outputs_are_those_asked_for(model_folder: Path) -> None:
    async with serving(model_folder) as (_, stub):
        response = await stub.ModelInfer(request(outputs=["seed", "text_output", "stop_reason"], stop="no such"))
        assert [tensor.name for tensor in response.outputs] == ["seed", "text_output", "stop_reason"]
        assert output(response, "seed") == [5]
        flagged = await stub.ModelInfer(request(ids(), flag("return_cumulative_logprob", True), logprobs=0))
        assert output(flagged, "cumulative_logprob")[0] is not None


async def test_the_prompt_before_the_output(model_folder: Path) -> None:
    async with serving(model_folder) as (_, stub):
        prompt = text("text_input", "Hallo ")
        with_prompt = await stub.ModelInfer(request(prompt, flag("exclude_input_in_output", False)))
        without = await stub.ModelInfer(request(prompt, flag("exclude_input_in_output", True)))
        assert output(with_prompt, "text_output") == [f"Hallo {output(without, 'text_output')[0]}"]


async def test_cancel_and_timeouts_free_the_request(model_folder: Path) -> None:
    async with serving(model_folder) as (mesh, stub):
        mesh["d0"].pause_at = 4
        call = stub.ModelInfer(request())
        while not mesh["d0"].held:
            assert not call.done()
            await mesh.router.core.fleet.changes.next.wait()
        call.cancel()
        await mesh.until_whole()
        for attempt in (stub.ModelInfer(request(timeout=200_000)), stub.ModelInfer(request(), timeout=0.2)):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await attempt
            assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await mesh.until_whole()


async def test_a_mesh_without_workers(model_folder: Path) -> None:
    async with serving(model_folder, prefill=0, decode=0, place_timeout_s=0.2) as (_, stub):
        assert not (await stub.ServerReady(pb.ServerReadyRequest())).ready
        assert not (await stub.ModelReady(pb.ModelReadyRequest(name="tiny"))).ready
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.ModelInfer(request())
        assert error_from_rpc(raised.value).code is grpc.StatusCode.UNAVAILABLE
