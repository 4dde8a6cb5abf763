"""What is wrong with a request is refused before any worker hears of it, naming tensor or parameter."""

import json
import struct
from pathlib import Path
from typing import Any

import grpc
import pytest

from pdmesh.runtime.errors import error_from_rpc
from pdmesh.third_party.kserve import grpc_service_pb2 as pb
from tests.router.kserve.calls import Input, as_raw, flag, ids, request, serving, text

INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND


def _tensor(name: str, datatype: str, shape: list[int], **contents: list[object]) -> Input:
    return Input(name=name, datatype=datatype, shape=shape, contents=pb.InferTensorContents(**contents))  # type: ignore[arg-type]


def _raw(tensor: Input, raw: bytes) -> pb.ModelInferRequest:
    return pb.ModelInferRequest(inputs=[tensor], raw_input_contents=[raw])


def _with_parameter(name: str, **value: object) -> pb.ModelInferRequest:
    return pb.ModelInferRequest(inputs=[ids()], parameters={name: pb.InferParameter(**value)})  # type: ignore[arg-type]


IDS = Input(name="input_ids", datatype="INT64", shape=[2])
TEXT = Input(name="text_input", datatype="BYTES", shape=[1])
SHARED = ids()
SHARED.parameters["shared_memory_region"].string_param = "x"

TENSORS = [
    (pb.ModelInferRequest(), 'inputs["text_input"]'),
    (request(ids(), text("text_input", "x")), 'inputs["input_ids"]'),
    (request(text("image", "x")), 'inputs["image"]'),
    (request(ids(), ids()), 'inputs["input_ids"]'),
    (request(text("text_input", "")), 'inputs["text_input"]'),
    (request(text("text_input", "x" * 101)), 'inputs["text_input"]'),
    (request(_tensor("text_input", "FP32", [1], fp32_contents=[1.0])), 'inputs["text_input"]'),
    (request(_tensor("text_input", "BYTES", [2], bytes_contents=[b"a", b"b"])), 'inputs["text_input"]'),
    (request(_tensor("text_input", "BYTES", [1], bytes_contents=[b"\xff"])), 'inputs["text_input"]'),
    (request(_tensor("text_input", "BYTES", [], bytes_contents=[b"a"])), 'inputs["text_input"]'),
    (request(_tensor("input_ids", "INT64", [3], int64_contents=[64, 65])), 'inputs["input_ids"]'),
    (request(_tensor("input_ids", "INT64", [-1, -2], int64_contents=[64, 65])), 'inputs["input_ids"]'),
    (request(_tensor("input_ids", "INT64", [2, 1], int64_contents=[64, 65])), 'inputs["input_ids"]'),
    (request(_tensor("input_ids", "INT64", [2], int_contents=[64, 65])), 'inputs["input_ids"]'),
    (request(_tensor("input_ids", "INT64", [1], int64_contents=[-1])), 'inputs["input_ids"][0]'),
    (request(_tensor("input_ids", "INT64", [1], int64_contents=[2**40])), 'inputs["input_ids"][0]'),
    (request(_tensor("input_ids", "INT64", [2], int64_contents=[64, 999])), 'inputs["input_ids"][1]'),
    (request(_tensor("input_ids", "INT64", [0])), 'inputs["input_ids"]'),
    (request(ids([64] * 2048)), 'inputs["input_ids"]'),
    (request(SHARED), 'inputs["input_ids"]'),
    (request(ids(), flag("stream", True)), 'inputs["stream"]'),
    (request(ids(), flag("exclude_input_in_output", False)), 'inputs["exclude_input_in_output"]'),
    (_raw(IDS, struct.pack("<2q", 64, 65)[:-1]), 'inputs["input_ids"]'),
    (_raw(TEXT, b"\x05\x00\x00\x00abc"), 'inputs["text_input"]'),
    (_raw(TEXT, b"\x05\x00"), 'inputs["text_input"]'),
    (_raw(ids(), b""), 'inputs["input_ids"]'),
    (pb.ModelInferRequest(inputs=[IDS], raw_input_contents=[b"", b""]), "raw_input_contents"),
    (request(text("messages", "no json")), 'inputs["messages"]'),
    (request(text("messages", "{}")), 'inputs["messages"]'),
    (request(text("messages", "[]")), 'inputs["messages"]'),
    (request(text("messages", "[1]")), 'inputs["messages"][0]'),
    (request(text("messages", '[{"role": "user", "content": [1]}]')), 'inputs["messages"][0]'),
    (request(text("messages", '[{"role": "user", "content": "a", "tools": "b"}]')), 'inputs["messages"][0]'),
    (request(text("messages", '[{"role": "", "content": "a"}]')), 'inputs["messages"][0].role'),
    (request(outputs=["no_such"]), 'outputs["no_such"]'),
    (request(ids(), text("sampling_parameters", "x")), 'inputs["sampling_parameters"]'),
    (pb.ModelInferRequest(inputs=[ids(), text("sampling_parameters", "[1]")]), 'inputs["sampling_parameters"]'),
]
JSON = [
    ("temperature", "warm"),
    ("temperature", True),
    ("temperature", 10**400),
    ("temperature", -1),
    ("top_k", -2),
    ("top_p", 2),
    ("max_tokens", 0),
    ("max_tokens", 1.5),
    ("max_tokens", 5000),
    ("n", 99),
    ("n", 2**32 - 1),
    ("seed", -1),
    ("logprobs", 21),
    ("ignore_eos", "maybe"),
    ("stop", [1]),
    ("stop", ["a"] * 17),
    ("stop_token_ids", ["x"]),
    ("logit_bias", [70]),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"70": "warm"}),
    ("logit_bias", {"70": 1e30}),
    ("logit_bias", {"999": 1}),
    ("choice", 3),
    ("regex", 3),
    ("json_schema", 3),
    ("constraint", {"regex": "a", "choice": ["b"]}),
    ("constraint", {"other": "a"}),
    ("mode", "fast"),
    ("priority", 9),
    ("session_id", 5),
    ("session_id", "two words"),
    ("kv_retention_s", 86_401),
    ("kv_retention_s", "5m"),
    ("session_final", "maybe"),
    ("session_final", True),
    ("priority_hint", 1001),
    ("tenant", "x" * 200),
    ("frobnicate", 1),
]
PARAMETERS = [
    (_with_parameter("temperature", string_param="warm"), 'parameters["temperature"]'),
    (_with_parameter("max_tokens", int64_param=-3), 'parameters["max_tokens"]'),
    (_with_parameter("max_tokens"), 'parameters["max_tokens"]'),
    (_with_parameter("sequence_id", int64_param=3), 'parameters["sequence_id"]'),
    (_with_parameter("triton_enable_empty_final_response", int64_param=3), 'parameters["triton_enable_empty_final_response"]'),
]


async def test_every_refusal_names_what_is_wrong(model_folder: Path) -> None:
    cases = [*TENSORS, *PARAMETERS]
    for name, value in JSON:
        parameters: dict[str, Any] = {name: value}
        cases.append((request(**parameters), f'inputs["sampling_parameters"].{name}'))
    async with serving(model_folder, max_prompt_bytes=100) as (mesh, stub):
        for message, field in cases:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.ModelInfer(message)
            error = error_from_rpc(raised.value)
            assert error.code is INVALID, (field, error)
            assert (error.field or "").startswith(field) and field in error.message, (field, error)
        assert mesh["d0"].submits == [] and mesh.router.core.flow_control.admission.num_inflight == 0


async def test_a_parameter_twice(model_folder: Path) -> None:
    message = request(temperature=0.5)
    message.parameters["temperature"].double_param = 0.5
    async with serving(model_folder) as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.ModelInfer(message)
        assert 'parameters["temperature"]' in (raised.value.details() or "")


async def test_models_and_versions_that_are_not_there(model_folder: Path) -> None:
    other, version = request(), request()
    other.model_name, version.model_version = "other", "2"
    async with serving(model_folder) as (_, stub):
        for message, field in ((other, "model_name"), (version, "model_version")):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.ModelInfer(message)
            assert raised.value.code() is NOT_FOUND and error_from_rpc(raised.value).field == field
        for call in (stub.ModelMetadata(pb.ModelMetadataRequest(name="x")), stub.ModelConfig(pb.ModelConfigRequest(name="x"))):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call
            assert raised.value.code() is NOT_FOUND
        assert not (await stub.ModelReady(pb.ModelReadyRequest(name="x"))).ready
        assert not (await stub.ModelReady(pb.ModelReadyRequest(name="tiny", version="2"))).ready


async def test_numbers_that_no_struct_holds_are_refused_too(model_folder: Path) -> None:
    huge = request(ids(), text("sampling_parameters", '{"n": 1e999}'))
    del huge.inputs[2:]
    async with serving(model_folder) as (_, stub):
        for message in (huge, as_raw(request(ids([64]), seed=2**64))):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.ModelInfer(message)
            assert raised.value.code() is INVALID
            assert json.dumps("sampling_parameters") in (raised.value.details() or "")
