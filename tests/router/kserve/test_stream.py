"""ModelStreamInfer: pieces, several requests at once, errors of one of them, the end of the stream."""

import asyncio
from collections.abc import AsyncIterable, Iterable
from pathlib import Path

import grpc
import pytest

from pdmesh.third_party.kserve import grpc_service_pb2 as pb
from router.api.kserve import service
from tests.router import stub_model
from tests.router.kserve.calls import flag, ids, is_final, output, request, serving
from tests.router.mesh import expected
from tests.support.waiting import eventually

Responses = list[pb.ModelStreamInferResponse]


async def _collect(call: AsyncIterable[pb.ModelStreamInferResponse]) -> dict[str, Responses]:
    """All responses by id."""
    by_id: dict[str, Responses] = {}
    async for response in call:
        by_id.setdefault(response.infer_response.id, []).append(response)
    return by_id


def _pieces(responses: Iterable[pb.ModelStreamInferResponse]) -> list[pb.ModelInferResponse]:
    return [response.infer_response for response in responses if response.infer_response.outputs]


def _tokens(responses: Responses, choice: int = 0) -> list[object]:
    pieces = [piece for piece in _pieces(responses) if output(piece, "index") == [choice]]
    return [token for piece in pieces for token in output(piece, "output_ids")]


async def test_pieces_add_up_and_the_last_one_is_final(model_folder: Path) -> None:
    async with serving(model_folder) as (mesh, stub):
        mesh["d0"].pause_at = 10
        responses: Responses = []
        async for response in stub.ModelStreamInfer(iter([request(max_tokens=20)])):
            mesh["d0"].resume.set()
            responses.append(response)
        pieces = _pieces(responses)
        assert len(pieces) > 1 and len(pieces) == len(responses)
        assert _tokens(responses) == expected(20)
        assert "".join(str(output(piece, "text_output")[0]) for piece in pieces) == stub_model.text_of(expected(20))
        assert [is_final(piece) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert [output(piece, "finish_reason")[0] for piece in pieces][-2:] == ["", "length"]
        await mesh.until_whole()


async def test_an_empty_final_response_if_asked_for(model_folder: Path) -> None:
    async with serving(model_folder) as (_, stub):
        message = request(n=2, triton_enable_empty_final_response=True)
        responses = (await _collect(stub.ModelStreamInfer(iter([message]))))["r1"]
        last = responses[-1].infer_response
        assert not last.outputs and [is_final(response.infer_response) for response in responses].count(True) == 1
        assert is_final(last) and last.parameters["num_output_tokens"].uint64_param == 16
        assert last.parameters["ttft_ns"].uint64_param > 0 and last.parameters["num_input_tokens"].uint64_param == 50
        for choice in range(2):
            assert _tokens(responses, choice) == expected(8, choice=choice)


async def test_a_whole_answer_on_a_stream(model_folder: Path) -> None:
    async with serving(model_folder) as (_, stub):
        plain = request(ids(), flag("stream", False), id="plain")
        with_final = request(ids(), flag("stream", False), id="final", triton_enable_empty_final_response=True)
        answers = await _collect(stub.ModelStreamInfer(iter([plain, with_final])))
        assert [is_final(response.infer_response) for response in answers["plain"]] == [True]
        assert [is_final(response.infer_response) for response in answers["final"]] == [False, True]
        assert output(answers["plain"][0].infer_response, "output_ids") == expected(8)


async def test_many_requests_at_once_and_an_error_of_one(model_folder: Path) -> None:
    async with serving(model_folder) as (mesh, stub):
        requests = [request(id=f"r{seed}", seed=seed, max_tokens=5 + seed) for seed in range(20)]
        requests.insert(3, request(id="bad", temperature=-1))
        requests.insert(7, request(id="unknown", frobnicate=1))
        answers = await _collect(stub.ModelStreamInfer(iter(requests)))
        for seed in range(20):
            assert _tokens(answers[f"r{seed}"]) == expected(5 + seed, seed=seed)
        (bad,) = answers["bad"]
        assert bad.error_message.startswith('[INVALID_ARGUMENT] inputs["sampling_parameters"].temperature: -1')
        assert is_final(bad.infer_response) and bad.infer_response.parameters["grpc_status"].string_param == "INVALID_ARGUMENT"
        assert 'inputs["sampling_parameters"].frobnicate' in answers["unknown"][0].error_message
        await mesh.until_whole()


async def test_requests_run_side_by_side_while_the_stream_is_open(model_folder: Path) -> None:
    async with serving(model_folder) as (mesh, stub):
        mesh["d0"].pause_at = 4
        call = stub.ModelStreamInfer(timeout=30)
        await call.write(request(id="slow"))
        await eventually(lambda: [held.is_paused for held in mesh["d0"].held.values()] == [True])
        mesh["d0"].pause_at = None
        await call.write(request(id="quick", seed=6))
        seen: dict[str, list[object]] = {"slow": [], "quick": []}
        async for response in call:
            assert not response.error_message
            seen[response.infer_response.id] += output(response.infer_response, "output_ids")
            if (len(seen["slow"]), len(seen["quick"])) == (4, 8):
                mesh["d0"].resume.set()
                await call.done_writing()
        assert seen == {"slow": expected(8), "quick": expected(8, seed=6)}
        await mesh.until_whole()


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_the_end_of_a_stream_frees_all_its_requests(model_folder: Path, how: str) -> None:
    async with serving(model_folder) as (mesh, stub):
        mesh["d0"].pause_at = 4
        call = stub.ModelStreamInfer(timeout=0.4 if how == "deadline" else None)
        for number in range(3):
            await call.write(request(id=str(number)))
        await eventually(lambda: len(mesh["d0"].held) == 3)
        if how == "cancel":
            call.cancel()
        await mesh.until_whole()
        assert len(mesh["d0"].cancels) == 3


async def test_a_client_that_wants_status_gets_it(model_folder: Path) -> None:
    async with serving(model_folder) as (mesh, stub):
        mesh["d0"].pause_at = 4
        call = stub.ModelStreamInfer(metadata=(("triton_grpc_error", "true"),))
        await call.write(request(id="runs"))
        await eventually(lambda: mesh["d0"].held)
        await call.write(request(id="bad", top_p=7))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await _collect(call)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert 'inputs["sampling_parameters"].top_p' in (raised.value.details() or "")
        await mesh.until_whole()


async def test_bytes_that_are_no_message_end_the_stream(model_folder: Path) -> None:
    async with serving(model_folder) as (mesh, _):
        async with grpc.aio.insecure_channel(mesh.router.server.address) as channel:
            method: grpc.aio.StreamStreamMultiCallable[bytes, bytes]
            method = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
            call = method(iter([b"\xff\xff"]), timeout=10)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                async for _message in call:
                    pass
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await mesh.until_whole()


async def test_a_router_that_goes_tells_every_request(model_folder: Path) -> None:
    async with serving(model_folder) as (mesh, stub):
        mesh["d0"].pause_at = 4
        call = stub.ModelStreamInfer()
        await call.write(request())
        await eventually(lambda: mesh["d0"].held)
        drain = asyncio.create_task(mesh.router.frontend.drain(0.05))
        await call.done_writing()
        responses = (await _collect(call))["r1"]
        assert responses[-1].error_message.startswith("[UNAVAILABLE]")
        await drain
        await mesh.until_whole()


async def test_a_stream_has_so_many_requests_at_a_time(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_REQUESTS", 2)
    async with serving(model_folder) as (mesh, stub):
        mesh["d0"].pause_at = 4
        call = stub.ModelStreamInfer(iter([request(id=str(number)) for number in range(5)]))
        await eventually(lambda: len(mesh["d0"].held) == 2)
        await asyncio.sleep(0.1)  # time enough to read one more
        assert len(mesh["d0"].submits) == 2
        mesh["d0"].resume.set()
        answers = await _collect(call)
        assert [_tokens(answers[str(number)]) for number in range(5)] == [expected(8)] * 5
        await mesh.until_whole()


async def test_a_client_that_reads_slowly_is_cancelled_and_told(model_folder: Path) -> None:
    async with serving(model_folder, max_buffered_tokens=100) as (mesh, stub):
        call = stub.ModelStreamInfer(iter([request(max_tokens=1900, logprobs=20, n=8)]))
        await eventually(lambda: mesh["d0"].cancels)
        responses = (await _collect(call))["r1"]
        assert responses[-1].error_message.startswith("[RESOURCE_EXHAUSTED]") and "slowly" in responses[-1].error_message
        await mesh.until_whole()
