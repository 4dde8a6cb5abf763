"""vLLM's engine protocol, as a gateway speaks it: token ids in, token ids out, and Abort."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

from pdmesh.client.channel import open_aio_channel
from pdmesh.third_party.vllm import vllm_engine_pb2 as pb
from pdmesh.third_party.vllm.vllm_engine_pb2_grpc import VllmEngineStub
from pdmesh.v1 import mesh_pb2
from pdmesh.v1.mesh_pb2_grpc import MeshStub
from tests.soak.cases import Case
from tests.soak.sides.base import Answer, mesh_errors, new_answer

if TYPE_CHECKING:
    from pdmesh.third_party.vllm.vllm_engine_pb2_grpc import VllmEngineAsyncStub
    from pdmesh.v1.mesh_pb2_grpc import MeshAsyncStub

_NUMBERS = itertools.count()


class EngineSide:
    """Messages are tokenized by a call of their own, as gateways do it themselves. Who leaves calls Abort, or just goes."""

    name = "vllm_engine"

    def __init__(self, router: str, rng: random.Random) -> None:
        self._channel = open_aio_channel(router, None)
        self._stub: VllmEngineAsyncStub = VllmEngineStub(self._channel)
        self._mesh: MeshAsyncStub = MeshStub(self._channel)
        self._rng = rng

    def field_name(self, name: str) -> str:
        return f"sampling_params.{name}"

    async def ask(self, case: Case, *, timeout_s: float, leave_after: int | None = None) -> Answer:
        answer = new_answer(case, has_text=False)
        with mesh_errors():
            ids = case.prompt or await self._tokens(case)
            request = _request(case, ids)
            call = self._stub.Generate(request, timeout=timeout_s)
            try:
                async for response in call:
                    _take(answer, response)
                    if leave_after is None or answer.left or answer.num_pieces < leave_after:
                        continue
                    answer.left = True
                    if self._rng.random() < 0.5:
                        return answer
                    await self._stub.Abort(pb.AbortRequest(request_ids=[request.request_id]), timeout=timeout_s)
            finally:
                call.cancel()
        answer.ended = True
        return answer

    async def _tokens(self, case: Case) -> list[int]:
        messages = [mesh_pb2.ChatMessage(role=role, content=content) for role, content in case.messages]
        return list((await self._mesh.Tokenize(mesh_pb2.TokenizeRequest(messages=messages))).token_ids)

    async def close(self) -> None:
        await self._channel.close()


def _request(case: Case, ids: tuple[int, ...] | list[int]) -> pb.GenerateRequest:
    options = dict(case.options)
    options.pop("cache_salt", None)  # the protocol has none
    request = pb.GenerateRequest(request_id=f"soak-{next(_NUMBERS)}", stream=True)
    request.tokenized.input_ids.extend(ids)
    stop = options.pop("stop", [])
    request.sampling_params.MergeFrom(pb.SamplingParams(stop=stop, **options))  # type: ignore[arg-type]
    return request


def _take(answer: Answer, response: pb.GenerateResponse) -> None:
    if response.HasField("chunk"):
        chunk = response.chunk
        answer.choices[chunk.index].tokens += chunk.token_ids
        return
    end = response.complete
    choice = answer.choices[end.index]
    if list(end.output_ids) != choice.tokens:
        raise AssertionError(
            f"the end of choice {end.index} repeats other tokens than its chunks: {end.output_ids}, {choice.tokens}"
        )
    choice.num_logprobs = len(end.output_logprobs.token_ids)
    choice.finish = end.finish_reason
