"""A client of the protocol as small as can be: tensors out of Python values, and back."""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pdmesh.runtime.rpc.channel import connect
from pdmesh.third_party.kserve import grpc_service_pb2 as pb
from pdmesh.third_party.kserve.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.router.mesh import PROMPT, Mesh, running_mesh

if TYPE_CHECKING:
    from pdmesh.third_party.kserve.grpc_service_pb2_grpc import GRPCInferenceServiceAsyncStub

Input = pb.ModelInferRequest.InferInputTensor
_FORMATS = {"INT32": "i", "INT64": "q", "UINT32": "I", "UINT64": "Q", "FP32": "f", "BOOL": "?"}


@asynccontextmanager
async def serving(folder: Path, **settings: object) -> AsyncIterator[tuple[Mesh, GRPCInferenceServiceAsyncStub]]:
    """A router before stub workers, and a stub of the protocol."""
    async with running_mesh(folder, **settings) as mesh:  # type: ignore[arg-type]
        channel = connect(mesh.router.server.address)
        stub: GRPCInferenceServiceAsyncStub = GRPCInferenceServiceStub(channel)
        yield mesh, stub
        await channel.close()


def text(name: str, value: str) -> Input:
    return Input(name=name, datatype="BYTES", shape=[1], contents=pb.InferTensorContents(bytes_contents=[value.encode()]))


def flag(name: str, value: bool) -> Input:
    return Input(name=name, datatype="BOOL", shape=[1], contents=pb.InferTensorContents(bool_contents=[value]))


def ids(values: Sequence[int] = PROMPT) -> Input:
    contents = pb.InferTensorContents(int64_contents=values)
    return Input(name="input_ids", datatype="INT64", shape=[len(values)], contents=contents)


def request(*inputs: Input, id: str = "r1", outputs: Sequence[str] = (), **parameters: object) -> pb.ModelInferRequest:
    """Parameters go into the JSON tensor, those of the protocol (`timeout`, `triton_…`) into the request's own."""
    message = pb.ModelInferRequest(model_name="tiny", id=id, inputs=inputs or [ids()])
    sampling: dict[str, object] = {"seed": 5, "max_tokens": 8}
    for name, value in parameters.items():
        if name.startswith("triton_") and isinstance(value, bool):
            message.parameters[name].bool_param = value
        elif name == "timeout" and isinstance(value, int):
            message.parameters[name].int64_param = value
        else:
            sampling[name] = value
    message.inputs.append(text("sampling_parameters", json.dumps(sampling)))
    message.outputs.extend(pb.ModelInferRequest.InferRequestedOutputTensor(name=name) for name in outputs)
    return message


def as_raw(message: pb.ModelInferRequest) -> pb.ModelInferRequest:
    """The same request with raw contents."""
    for tensor in message.inputs:
        ((_, elements),) = tensor.contents.ListFields()
        message.raw_input_contents.append(packed(tensor.datatype, elements))
        tensor.ClearField("contents")
    return message


def packed(datatype: str, elements: Sequence[bytes] | Sequence[int]) -> bytes:
    if datatype == "BYTES":
        return b"".join(struct.pack("<I", len(element)) + element for element in elements if isinstance(element, bytes))
    return struct.pack(f"<{len(elements)}{_FORMATS[datatype]}", *elements)


def output(response: pb.ModelInferResponse, name: str) -> list[object]:
    """The elements of an output."""
    ((tensor, raw),) = [pair for pair in zip(response.outputs, response.raw_output_contents, strict=True) if pair[0].name == name]
    if tensor.datatype != "BYTES":
        values: list[object] = list(struct.unpack(f"<{tensor.shape[0]}{_FORMATS[tensor.datatype]}", raw))
        return values
    texts: list[object] = []
    while raw:
        (length,) = struct.unpack_from("<I", raw)
        texts.append(raw[4 : 4 + length].decode())
        raw = raw[4 + length :]
    assert len(texts) == tensor.shape[0]
    return texts


def is_final(response: pb.ModelInferResponse) -> bool:
    return response.parameters["triton_final_response"].bool_param
