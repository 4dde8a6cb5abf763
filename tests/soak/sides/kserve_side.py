"""KServe's Open Inference Protocol over its own stubs: ModelInfer and ModelStreamInfer."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import grpc

from pdmesh.client.channel import open_aio_channel
from pdmesh.errors import MeshError
from pdmesh.third_party.kserve import grpc_service_pb2 as pb
from pdmesh.third_party.kserve.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.soak.cases import Case
from tests.soak.sides.base import Answer, mesh_errors, new_answer

if TYPE_CHECKING:
    from pdmesh.third_party.kserve.grpc_service_pb2_grpc import GRPCInferenceServiceAsyncStub

_OUTPUTS = ("text_output", "output_ids", "finish_reason", "index", "num_output_tokens")


class KServeSide:
    """Every other request goes over a stream of its own; half of the streams tell errors as the status of the call."""

    name = "kserve"

    def __init__(self, router: str, rng: random.Random) -> None:
        self._channel = open_aio_channel(router, None)
        self._stub: GRPCInferenceServiceAsyncStub = GRPCInferenceServiceStub(self._channel)
        self._rng = rng

    def field_name(self, name: str) -> str:
        return name

    async def ask(self, case: Case, *, timeout_s: float, leave_after: int | None = None) -> Answer:
        answer = new_answer(case, has_logprobs=False)
        with mesh_errors():
            if leave_after is None and self._rng.random() < 0.5:
                response = await self._stub.ModelInfer(_request(case), timeout=timeout_s)
                _take_whole(answer, response)
                answer.ended = True
            else:
                await self._follow(case, answer, timeout_s, leave_after)
        return answer

    async def _follow(self, case: Case, answer: Answer, timeout_s: float, leave_after: int | None) -> None:
        as_status = self._rng.random() < 0.5
        metadata = (("triton_grpc_error", "true"),) if as_status else ()
        call = self._stub.ModelStreamInfer(_one(_request(case)), timeout=timeout_s, metadata=metadata)
        try:
            async for response in call:
                if response.error_message:
                    raise _error(response.error_message)
                answer.ended = response.infer_response.parameters["triton_final_response"].bool_param
                _take_piece(answer, response.infer_response)
                if leave_after is not None and answer.num_pieces >= leave_after:
                    answer.left = True
                    return
        finally:
            call.cancel()

    async def close(self) -> None:
        await self._channel.close()


async def _one(request: pb.ModelInferRequest) -> AsyncIterator[pb.ModelInferRequest]:
    yield request


def _request(case: Case) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(id="soak")
    if case.messages:
        messages = [{"role": role, "content": content} for role, content in case.messages]
        request.inputs.append(_text("messages", json.dumps(messages)))
    else:
        contents = pb.InferTensorContents(int64_contents=case.prompt)
        tensor = pb.ModelInferRequest.InferInputTensor(
            name="input_ids", datatype="INT64", shape=[len(case.prompt)], contents=contents
        )
        request.inputs.append(tensor)
    request.inputs.append(_text("sampling_parameters", json.dumps(case.options)))
    request.outputs.extend(pb.ModelInferRequest.InferRequestedOutputTensor(name=name) for name in _OUTPUTS)
    return request


def _text(name: str, value: str) -> pb.ModelInferRequest.InferInputTensor:
    contents = pb.InferTensorContents(bytes_contents=[value.encode()])
    return pb.ModelInferRequest.InferInputTensor(name=name, datatype="BYTES", shape=[1], contents=contents)


def _take_whole(answer: Answer, response: pb.ModelInferResponse) -> None:
    outputs = _outputs(response)
    texts, reasons, counts = (
        _strings(outputs["text_output"]),
        _strings(outputs["finish_reason"]),
        _ints(outputs["num_output_tokens"]),
    )
    ids = _ints(outputs["output_ids"])
    for choice, text, finish, count in zip(answer.choices, texts, reasons, counts, strict=True):
        choice.text, choice.finish = text, finish
        choice.tokens, ids = ids[:count], ids[count:]


def _take_piece(answer: Answer, response: pb.ModelInferResponse) -> None:
    outputs = _outputs(response)
    if "index" not in outputs:
        return
    choice = answer.choices[_ints(outputs["index"])[0]]
    choice.text += "".join(_strings(outputs["text_output"]))
    choice.tokens += _ints(outputs["output_ids"])
    choice.finish = "".join(_strings(outputs["finish_reason"])) or choice.finish


def _outputs(response: pb.ModelInferResponse) -> dict[str, bytes]:
    return {tensor.name: raw for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True)}


def _ints(raw: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(raw) // 4}i", raw))


def _strings(raw: bytes) -> list[str]:
    """Each behind its length in four bytes."""
    values = []
    while raw:
        (length,) = struct.unpack_from("<I", raw)
        values.append(raw[4 : 4 + length].decode())
        raw = raw[4 + length :]
    return values


def _error(message: str) -> MeshError:
    """From "[INVALID_ARGUMENT] what is wrong"."""
    name, _, text = message.removeprefix("[").partition("] ")
    return MeshError(text, code=getattr(grpc.StatusCode, name, grpc.StatusCode.UNKNOWN))
