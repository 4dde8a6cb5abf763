"""PrefillService.Embed on a real worker: transformers' states, errors by name, and nothing stays behind."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
import torch

from pdmesh.runtime.errors import error_from_rpc
from pdmesh.v1 import common_pb2, prefill_pb2
from tests.support.mini_router import MiniRouter
from tests.support.waiting import eventually
from tests.support.worker_mesh import MODEL, Model, Peer, running_worker

PROMPT = [5, 9, 70, 33] * 40
MEAN, LAST = common_pb2.POOLING_MEAN, common_pb2.POOLING_LAST


def wanted(pooling: common_pb2.Pooling.ValueType = MEAN, **changes: object) -> prefill_pb2.EmbedPromptRequest:
    sampling = common_pb2.SamplingParams(max_tokens=1, n=1, temperature=0.0, seed=0)
    request = common_pb2.TokenRequest(model=MODEL, prompt_token_ids=PROMPT, sampling=sampling)
    message = prefill_pb2.EmbedPromptRequest(request_id="embed-1", request=request, pooling=pooling)
    for name, value in changes.items():
        setattr(message, name, value)
    return message


@pytest.fixture(scope="module")
def states(model: Model) -> torch.Tensor:
    transformers = pytest.importorskip("transformers")
    found = transformers.AutoModel.from_pretrained(model.folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        last: torch.Tensor = found(torch.tensor([PROMPT])).last_hidden_state[0]
    return last


@pytest.mark.parametrize("pooling", [common_pb2.POOLING_UNSPECIFIED, MEAN, LAST])
async def test_it_returns_transformers_states(
    prefiller: Peer, states: torch.Tensor, pooling: common_pb2.Pooling.ValueType
) -> None:
    response = await prefiller.prefill.Embed(wanted(pooling))
    expected = states[-1] if pooling == LAST else states.mean(0)
    torch.testing.assert_close(torch.tensor(list(response.values)), expected, rtol=1e-4, atol=1e-5)
    assert response.timings.num_computed_tokens == len(PROMPT) and response.timings.num_steps == 3
    again = await prefiller.prefill.Embed(wanted(pooling))
    assert (again.timings.num_cached_tokens > 0) == (pooling == LAST)
    torch.testing.assert_close(torch.tensor(list(again.values)), expected, rtol=1e-4, atol=1e-5)


WRONG = [
    ({"request_id": "a b"}, "request_id", grpc.StatusCode.INVALID_ARGUMENT),
    ({"pooling": 9}, "pooling", grpc.StatusCode.INVALID_ARGUMENT),
]


@pytest.mark.parametrize(("changes", "field", "code"), WRONG)
async def test_a_wrong_field_is_named(prefiller: Peer, changes: dict[str, object], field: str, code: grpc.StatusCode) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await prefiller.prefill.Embed(wanted(**changes))  # type: ignore[arg-type]
    error = error_from_rpc(refused.value)
    assert (error.field, error.code) == (field, code)


async def test_more_than_one_token_and_an_empty_request_are_refused(prefiller: Peer) -> None:
    message = wanted()
    message.request.sampling.max_tokens = 2
    for request, field in ((message, "request.sampling"), (prefill_pb2.EmbedPromptRequest(request_id="a"), "request")):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await prefiller.prefill.Embed(request)
        assert error_from_rpc(refused.value).field == field


async def test_a_worker_without_the_role_refuses(router: MiniRouter, decoder: Peer) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await decoder.prefill.Embed(wanted())
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_cancelled_call_and_a_late_one_leave_nothing(model: Model) -> None:
    async with running_worker(model, roles=("prefill",), worker_id="p", engine={"max_num_batched_tokens": 1}) as peer:
        call = peer.prefill.Embed(wanted())
        await eventually(lambda: peer.worker.dispatcher.num_steps > 2)
        assert peer.worker.prefill.num_running == 0  # hand-offs are counted apart
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await peer.prefill.Embed(wanted(time_left_ms=1))
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await peer.worker.prefill.wait_idle()
        await eventually(lambda: not peer.engine.has_work)
        peer.engine.check_integrity()
