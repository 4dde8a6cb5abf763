"""A stock engine as a worker: its answers, its end, and what it refuses; real gRPC on loopback, with stub workers behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest

from pdmesh.runtime.errors import FailedPrecondition, InvalidArgument, error_from_rpc
from pdmesh.runtime.rpc.channel import connect
from pdmesh.third_party.vllm import vllm_engine_pb2 as pb
from pdmesh.third_party.vllm.vllm_engine_pb2_grpc import VllmEngineStub
from pdmesh.v1 import common_pb2, mesh_pb2, worker_pb2
from router.api.vllm.service import VllmEngineService
from tests.router import stub_model
from tests.router.engine_bridge.engines import address_of, begun, bridged, kill, only
from tests.router.mesh import PROMPT, Answer, expected, request
from tests.router.stub_workers import DECODE, StubWorker
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pdmesh.third_party.vllm.vllm_engine_pb2_grpc import VllmEngineAsyncStub

ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 2**31 - 20, "max_tokens": 40},
    {"n": 3, "logprobs": 2},
    {"stop_token_ids": [expected(8)[4]]},
    {"stop": [stub_model.text_of(expected(8)[2:4])]},
]


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: "-".join(asked))
async def test_the_answers_of_the_engine_itself(model_folder: Path, asked: dict[str, Any]) -> None:
    async with bridged(model_folder) as mesh:
        bare = await mesh.engines[0].generate(request(**asked))
        answer = await mesh.front.generate(request(**asked))
        assert _shown(answer) == _shown(bare)
        assert answer.timings.decode_worker.startswith("engine-127.0.0.1:")
        await mesh.until_whole()


def _shown(answer: Answer) -> list[object]:
    """Tokens, text, log-probabilities and ends of all choices."""
    choices = sorted({delta.choice for delta in answer.deltas})
    logprobs = [[entry for delta in answer.deltas if delta.choice == choice for entry in delta.logprobs] for choice in choices]
    ends = [(answer.last(choice).finish_reason, answer.last(choice).stop_reason) for choice in choices]
    return [[(answer.tokens(choice), answer.text(choice)) for choice in choices], logprobs, ends]


async def test_parameters_reach_the_engine_and_the_parts_of_ttft_add_up(model_folder: Path) -> None:
    sampling: dict[str, Any] = {
        "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.5,
        "frequency_penalty": -0.3, "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [70], "n": 2, "max_tokens": 4,
        "logit_bias": [common_pb2.TokenBias(token_id=70, bias=-1.5)],
    }  # fmt: skip
    async with bridged(model_folder) as mesh:
        answer = await mesh.front.generate(request(**sampling))
        assert only(mesh.engines[0]).submits[0].request.sampling == common_pb2.SamplingParams(seed=5, **sampling)
        said = answer.timings
        parts = said.route_ns + said.admission_queue_ns + said.reserve_ns + said.prefill_compute_ns + said.first_token_return_ns
        assert parts == pytest.approx(said.ttft_ns, rel=0.05, abs=1_000_000)
        assert said.prefill_compute_ns > 0


async def test_it_says_what_it_is(model_folder: Path) -> None:
    async with bridged(model_folder) as mesh:
        status = await mesh.front.stub.GetStatus(mesh_pb2.GetStatusRequest())
        info = status.workers[0].info
        assert (list(info.roles), list(info.transports), info.engine) == ([worker_pb2.ROLE_DECODE], [], "pdmesh")
        assert worker_pb2.ENGINE_LACK_REPRODUCIBLE in info.lacks
        assert (info.max_num_seqs, info.num_blocks, info.max_context) == (64, 1000, stub_model.MAX_CONTEXT)
        only(mesh.engines[0]).pause_at = 4
        asked = asyncio.create_task(mesh.front.generate(request(n=2)))
        view = mesh.front.router.core.fleet.views
        await eventually(lambda: (view()[0].num_seqs, view()[0].num_decoding) == (2, 2))
        assert view()[0].num_free_blocks < 1000
        only(mesh.engines[0]).resume.set()
        await asked
        await eventually(lambda: (view()[0].num_seqs, view()[0].num_free_blocks) == (0, 1000))


async def test_what_a_stock_engine_cannot_do_is_refused(model_folder: Path) -> None:
    async with bridged(model_folder) as mesh:
        stub = mesh.front.stub
        paused = worker_pb2.SetServingRequest(state=worker_pb2.SERVING_STATE_PAUSED)
        calls = (
            stub.UpdateWeights(mesh_pb2.MeshUpdateWeightsRequest(folder=str(model_folder))),
            stub.SendWeights(iter([worker_pb2.SendWeightsRequest(num_bytes=1)])),
            stub.SetServing(mesh_pb2.MeshSetServingRequest(serving=paused)),
        )
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_client_that_leaves_frees_the_engine(model_folder: Path) -> None:
    async with bridged(model_folder) as mesh:
        _, reader, _ = await begun(mesh, request(n=2), 4)
        reader.cancel()
        await asyncio.wait([reader])
        await mesh.until_whole()


@pytest.mark.parametrize("num_choices", [1, 2])
async def test_an_engine_that_dies_costs_no_error(model_folder: Path, num_choices: int) -> None:
    async with bridged(model_folder, num_engines=2) as mesh:
        answer, reader, victim = await begun(mesh, request(n=num_choices), 4)
        other = next(engine for engine in mesh.engines if engine is not victim)
        await kill(victim)
        await reader
        for choice in range(num_choices):
            first = expected(4, choice=choice)
            # The other was asked with the output so far, as for one choice, with the seed that vLLM gives that choice.
            assert answer.tokens(choice) == first + stub_model.output([*PROMPT, *first], 5 + choice, 0, 4)
        assert {len(submit.request.prompt_token_ids) for submit in only(other).submits} == {len(PROMPT) + 4}
        assert answer.timings.num_resubmissions == 1
        assert mesh.front.router.core.num_token_mismatches == 0
        await mesh.front.until_whole()


async def test_a_silent_engine_is_lost_until_it_answers_again(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent, heard = set[object](), asyncio.Event()
    answer_health = VllmEngineService.HealthCheck

    async def health(self: VllmEngineService, message: pb.HealthCheckRequest, context: Any) -> pb.HealthCheckResponse:
        if self._frontend in silent:
            await heard.wait()
        return await answer_health(self, message, context)

    monkeypatch.setattr(VllmEngineService, "HealthCheck", health)
    async with bridged(model_folder, num_engines=2, engine_timeout_s=0.4) as mesh:
        answer, reader, victim = await begun(mesh, request(), 4)
        for engine in mesh.engines:
            only(engine).pause_at = None
        silent.add(victim.router.frontend)
        await reader
        assert len(answer.tokens()) == 8 and answer.timings.num_resubmissions == 1
        await mesh.until_ready(1)
        silent.clear()
        heard.set()
        await mesh.until_ready(2)
        only(victim).resume.set()
        await mesh.until_whole()


async def test_alone_it_ends_with_a_clear_error(model_folder: Path) -> None:
    async with bridged(model_folder, resubmit_timeout_s=0.3) as mesh:
        _, reader, engine = await begun(mesh, request(), 4)
        await kill(engine)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reader
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "no decode worker of model 'tiny'" in (caught.value.details() or "")
        assert not mesh.front.router.core.fleet.ready()


@pytest.mark.parametrize(("field", "options"), [("options.cache_salt", {"cache_salt": "s"}), ("options.tenant", {"tenant": "a"})])
async def test_what_the_protocol_cannot_say_is_refused_by_name(model_folder: Path, field: str, options: dict[str, Any]) -> None:
    async with bridged(model_folder) as mesh:
        message = request()
        message.options.MergeFrom(mesh_pb2.RequestOptions(**options))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await mesh.front.generate(message)
        error = error_from_rpc(caught.value)
        assert isinstance(error, FailedPrecondition) and error.field == field and error.message.startswith(field)
        assert not only(mesh.engines[0]).submits
        # A worker of another kind takes it, though the engine is asked first.
        worker = await StubWorker("d1", (DECODE,)).start()
        mesh.front.router.core.fleet.on_registry([worker.info()])
        await mesh.until_ready(2)
        assert (await mesh.front.generate(message)).tokens() == expected(8)
        await worker.kill()


async def test_prefill_elsewhere_is_not_offered(model_folder: Path) -> None:
    async with bridged(model_folder, place_timeout_s=0.2) as mesh:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await mesh.front.generate(request(mode=mesh_pb2.PREFILL_MODE_REMOTE))
        assert "no prefill worker fits engine-" in (caught.value.details() or "")


async def test_tenants_may_share_an_engine_if_told_so(model_folder: Path) -> None:
    async with bridged(model_folder, engine_tenants="share") as mesh:
        message = request()
        message.options.tenant = "a"
        assert (await mesh.front.generate(message)).tokens() == expected(8)


async def test_a_refusal_of_the_engine_is_the_clients(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, so that it answers Submit, and late, so that it ends the request."""

    async def refuse(self: object, message: pb.GenerateRequest, context: object) -> AsyncIterator[pb.GenerateResponse]:
        await asyncio.sleep(message.sampling_params.min_p)
        raise InvalidArgument("sampling_params.top_k", "this engine has no top_k")
        yield

    monkeypatch.setattr(VllmEngineService, "Generate", refuse)
    async with bridged(model_folder) as mesh:
        for delay_s in (0.0, 0.2):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await mesh.front.generate(request(min_p=delay_s))
            error = error_from_rpc(caught.value)
            assert isinstance(error, InvalidArgument) and "no top_k" in error.message
        await mesh.front.until_whole()


async def test_a_request_that_the_engine_aborts_goes_on_elsewhere(model_folder: Path) -> None:
    async with bridged(model_folder, num_engines=2) as mesh:
        answer, reader, victim = await begun(mesh, request(), 4)
        other = next(engine for engine in mesh.engines if engine is not victim)
        only(other).pause_at = None
        channel = connect(address_of(victim))
        engine: VllmEngineAsyncStub = VllmEngineStub(channel)
        (submit,) = only(victim).submits
        await engine.Abort(pb.AbortRequest(request_ids=[submit.request_id[:-13]]))  # without the tail that its router has added
        await reader
        await channel.close()
        assert len(answer.tokens()) == 8 and only(other).submits
        await mesh.until_ready(2)
        await mesh.until_whole()
