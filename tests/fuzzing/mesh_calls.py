"""Calls of the RPCs of a simulated router and worker, as an input says: what is sent, to which method, when, and when it ends.

    input  ── record, record, …
    record ── method (1 byte), flags (1), delay (1, in units of `DELAY_S`), length (2, little-endian), message

A message that protobuf refuses never reaches the product, and is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from pdmesh.v1.transfer_pb2 import TransferMessage

FILL, CANCEL, SAME_STREAM, WAIT, FRAMED = 1, 2, 4, 8, 16
"""Flags: put in what the worker knows (its epoch, the last reservation); cancel the call when the delay is over; send on the last
open stream of the method; wait for the answer, not for the delay; to Push, the message is a TransferMessage,
which is put into a frame."""
DELAY_S = 0.05
MOST_RECORDS = 12


def _names(services: dict[str, str]) -> tuple[str, ...]:
    return tuple(f"{service}.{method}" for service, methods in services.items() for method in methods.split())


NOT_OURS = "/grpc.reflection."
"""gRPC's own servicer, of which a simulated server has the one for threads."""
_FIRST_OF_WORKER = _names(
    {
        "pdmesh.v1.DecodeService": "Submit Cancel Attach",
        "pdmesh.v1.PrefillService": "Prefill Embed",
        "pdmesh.v1.WorkerControl": "GetInfo Watch SetRoles ListBlocks KeepTraces LoadAdapter UnloadAdapter ListAdapters "
        "ReleaseRetained",
        "pdmesh.v1.TransferService": "Push",
        "grpc.health.v1.Health": "Check Watch List",
    }
)
_FIRST_OF_ROUTER = _names(
    {
        "pdmesh.v1.Mesh": "Generate Chat Tokenize Embed ListModels GetStatus Explain LoadAdapter UnloadAdapter ListAdapters "
        "ReleaseSession",
        "inference.GRPCInferenceService": "ServerLive ServerReady ModelReady ServerMetadata ModelMetadata ModelInfer "
        "ModelStreamInfer ModelConfig RepositoryIndex",
        "vllm.grpc.engine.VllmEngine": "Generate Embed HealthCheck FlushCache Abort GetModelInfo GetServerInfo GetLoads "
        "GetTokenizer",
        "grpc.health.v1.Health": "Check Watch List",
    }
)
ROUTER_METHODS = (
    *_FIRST_OF_ROUTER,
    "vllm.grpc.engine.VllmEngine.SubscribeKvEvents",
    "pdmesh.v1.Mesh.UpdateWeights",
    "pdmesh.v1.Mesh.SetTrafficSplit",
    "pdmesh.v1.Mesh.SetServing",
    "pdmesh.v1.Mesh.SendWeights",
)
_LATER_OF_WORKER = "SendBlocks WatchBlocks WarmPrefix UpdateWeights SetServing SendWeights ReadWeights"
WORKER_METHODS = (*_FIRST_OF_WORKER, *_names({"pdmesh.v1.WorkerControl": _LATER_OF_WORKER}))
"""Methods, in the order of their numbers in kept inputs: new ones come last. A run finds one that is missing."""


def record(method: str, message: Message, flags: int = FILL, delay: int = 1) -> bytes:
    """Return a record of an input. `method`: the end of its full name, which no other of its server has."""
    index = next(i for names in (WORKER_METHODS, ROUTER_METHODS) for i, name in enumerate(names) if name.endswith(f".{method}"))
    data = message.SerializeToString()
    return bytes((index, flags, delay)) + len(data).to_bytes(2, "little") + data


@dataclass(frozen=True)
class Step:
    """A record, read: its message is one of its method."""

    method: MethodDescriptor
    flags: int
    delay_s: float
    message: Any

    @property
    def path(self) -> str:
        return f"/{self.method.containing_service.full_name}/{self.method.name}"


def steps_of(methods: Sequence[str], data: bytes) -> Iterator[Step]:
    """Yield the records of an input whose messages protobuf reads: gRPC refuses the others."""
    pool = descriptor_pool.Default()
    for _ in range(MOST_RECORDS):
        if len(data) < 5:
            return
        head, length = data[:3], int.from_bytes(data[3:5], "little")
        content, data = data[5 : 5 + length], data[5 + length :]
        method, flags = pool.FindMethodByName(methods[head[0] % len(methods)]), head[1]
        kind = TransferMessage if method.name == "Push" and flags & FRAMED else GetMessageClass(method.input_type)
        try:
            message = kind.FromString(content)
        except DecodeError:
            continue
        yield Step(method, flags, head[2] * DELAY_S, message)
