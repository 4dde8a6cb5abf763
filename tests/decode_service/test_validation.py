"""Each malformed Submit is refused with a status that names the field, and nothing is reserved for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import grpc
import pytest

from decode_service.validation import SubmitValidator
from pdmesh.engine.request import EngineRequest
from pdmesh.runtime.errors import FailedPrecondition, error_from_rpc
from pdmesh.sampling_params import SamplingParams
from pdmesh.v1 import common_pb2, decode_pb2
from tests.support.mini_router import MiniRouter
from tests.support.worker_mesh import LOCAL, MODEL, REMOTE, Peer, history, token_request

INVALID, PRECONDITION = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION
NAN = float("nan")


def submit() -> decode_pb2.SubmitRequest:
    request = token_request([1, 2, 3])
    return decode_pb2.SubmitRequest(request_id="r1", router_id="router-1", attempt=1, mode=REMOTE, request=request)


def changed(change: Callable[[decode_pb2.SubmitRequest], object]) -> decode_pb2.SubmitRequest:
    request = submit()
    change(request)
    return request


def sampling(**fields: object) -> Callable[[decode_pb2.SubmitRequest], object]:
    return lambda request: request.request.sampling.MergeFrom(common_pb2.SamplingParams(**fields))  # type: ignore[arg-type]


def without(field: str) -> Callable[[decode_pb2.SubmitRequest], object]:
    return lambda request: request.request.sampling.ClearField(field)  # type: ignore[arg-type]


def emitted(*choices: list[int], n: int = 1, finished: bool = False) -> Callable[[decode_pb2.SubmitRequest], object]:
    def change(request: decode_pb2.SubmitRequest) -> None:
        request.request.sampling.n = n
        request.request.emitted.extend(history(*choices))
        for choice in request.request.emitted if finished else ():
            choice.finish_reason = common_pb2.FINISH_REASON_STOP

    return change


def constraint(ignore_eos: bool = False, **kind: object) -> Callable[[decode_pb2.SubmitRequest], object]:
    def change(request: decode_pb2.SubmitRequest) -> None:
        request.request.sampling.ignore_eos = ignore_eos
        request.request.sampling.constraint.CopyFrom(common_pb2.Constraint(**kind))  # type: ignore[arg-type]

    return change


def strays(**kind: object) -> Callable[[decode_pb2.SubmitRequest], object]:
    def change(request: decode_pb2.SubmitRequest) -> None:
        constraint(False, **kind)(request)
        emitted([1])(request)

    return change


REFUSED: dict[str, tuple[Callable[[decode_pb2.SubmitRequest], object], grpc.StatusCode, str]] = {
    "no id": (lambda r: setattr(r, "request_id", ""), INVALID, "request_id"),
    "odd id": (lambda r: setattr(r, "request_id", "a/b"), INVALID, "request_id"),
    "long id": (lambda r: setattr(r, "request_id", "x" * 65), INVALID, "request_id"),
    "no router": (lambda r: setattr(r, "router_id", ""), INVALID, "router_id"),
    "no attempt": (lambda r: setattr(r, "attempt", 0), INVALID, "attempt"),
    "no mode": (lambda r: setattr(r, "mode", 0), INVALID, "mode"),
    "unknown mode": (lambda r: setattr(r, "mode", 77), INVALID, "mode"),
    "no request": (lambda r: r.ClearField("request"), INVALID, "request"),
    "foreign epoch": (lambda r: setattr(r, "epoch", 12345), PRECONDITION, "epoch"),
    "foreign weights": (lambda r: setattr(r.identity, "weights_hash", "other"), PRECONDITION, "identity.weights_hash"),
    "foreign mode": (lambda r: setattr(r.identity, "numeric_mode", "other"), PRECONDITION, "identity.numeric_mode"),
    "foreign layers": (lambda r: setattr(r.identity, "num_layers", 77), PRECONDITION, "identity.num_layers"),
    "foreign model": (lambda r: setattr(r.request, "model", "other"), PRECONDITION, "request.model"),
    "empty prompt": (lambda r: r.request.ClearField("prompt_token_ids"), INVALID, "request.prompt_token_ids"),
    "unknown token": (lambda r: r.request.prompt_token_ids.append(99999), INVALID, "request.prompt"),
    "too long": (lambda r: r.request.prompt_token_ids.extend([1] * 2048), INVALID, "request.prompt"),
    "no seed": (without("seed"), INVALID, "request.sampling.seed"),
    "no max_tokens": (without("max_tokens"), INVALID, "request.sampling.max_tokens"),
    "zero max_tokens": (sampling(max_tokens=0), INVALID, "request.sampling.max_tokens"),
    "stop strings": (sampling(stop=["x"]), INVALID, "request.sampling.stop"),
    "negative temperature": (sampling(temperature=-1), INVALID, "request.sampling.temperature"),
    "temperature NaN": (sampling(temperature=NAN), INVALID, "request.sampling.temperature"),
    "zero top_p": (sampling(top_p=0), INVALID, "request.sampling.top_p"),
    "large min_p": (sampling(min_p=2), INVALID, "request.sampling.min_p"),
    "zero repetition_penalty": (sampling(repetition_penalty=0), INVALID, "request.sampling.repetition_penalty"),
    "infinite penalty": (sampling(presence_penalty=float("inf")), INVALID, "request.sampling.presence_penalty"),
    "min above max": (sampling(min_tokens=13), INVALID, "request.sampling.min_tokens"),
    "many logprobs": (sampling(logprobs=21), INVALID, "request.sampling.logprobs"),
    "many choices": (sampling(n=17), INVALID, "request.sampling.n"),
    "empty constraint": (constraint(), INVALID, "request.sampling.constraint"),
    "no regex": (constraint(regex="(a"), INVALID, "request.sampling.constraint.regex"),
    "no schema": (constraint(json_schema="3"), INVALID, "request.sampling.constraint.json_schema"),
    "no choice": (constraint(choice=common_pb2.Alternatives()), INVALID, "request.sampling.constraint.choice"),
    "constraint and ignore_eos": (constraint(True, regex="a+"), INVALID, "request.sampling.ignore_eos"),
    "history of another constraint": (strays(regex="a+"), INVALID, "request.emitted"),
    "history of another n": (emitted([1], [2]), INVALID, "request.emitted"),
    "all finished": (emitted([1], finished=True), INVALID, "request.emitted"),
    "history complete": (emitted([1] * 12), INVALID, "request.emitted"),
    "history too long": (emitted([1] * 13), INVALID, "request.emitted"),
    "history unknown token": (emitted([99999]), INVALID, "request.emitted"),
    "two histories, remote": (emitted([1], [2], n=2), INVALID, "mode"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_refused_by_name(decoder: Peer, name: str) -> None:
    change, code, field = REFUSED[name]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await decoder.decode.Submit(changed(change))
    error = error_from_rpc(caught.value)
    assert error.code is code, error
    assert error.field is not None
    assert error.field.startswith(field), error
    assert decoder.is_whole()


async def test_what_fits_is_taken(decoder: Peer, router: MiniRouter) -> None:
    await router.submit(decoder, "r1", token_request([1]), epoch=decoder.info.epoch, identity=decoder.info.identity)
    await router.submit(decoder, "r2", token_request([1]), identity=common_pb2.Identity(model=MODEL))
    request = token_request([1, 2], n=2, emitted=history([4], []))
    await router.submit(decoder, "r3", request, mode=LOCAL)
    await router.until_finished("r3", 2)
    for name in ("r1", "r2"):
        await decoder.decode.Cancel(decode_pb2.CancelRequest(request_id=name))


async def test_cancel_needs_an_id(decoder: Peer) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await decoder.decode.Cancel(decode_pb2.CancelRequest(request_id="a b"))
    assert error_from_rpc(caught.value).field == "request_id"


class Kept:
    """Weights that a worker has replaced and has still."""

    def holds(self, weights_hash: str) -> bool:
        return weights_hash == "replaced"

    def request_for(self, weights_hash: str, wire: common_pb2.TokenRequest, request: EngineRequest) -> EngineRequest:
        return replace(request, weights_hash=weights_hash)


@pytest.mark.parametrize(
    ("change", "goes_on"),
    [
        (lambda r: None, False),
        (emitted([]), False),
        (emitted([1]), True),
        (lambda r: setattr(r, "attempt", 2), True),
    ],
    ids=["new", "nothing emitted", "emitted", "second attempt"],
)
async def test_only_what_has_begun_goes_on_with_replaced_weights(
    change: Callable[[decode_pb2.SubmitRequest], object], goes_on: bool
) -> None:
    async def translate(wire: common_pb2.TokenRequest) -> EngineRequest:
        return EngineRequest("r1", tuple(wire.prompt_token_ids), SamplingParams(max_tokens=12))

    validator = SubmitValidator(1, common_pb2.Identity(weights_hash="present"), translate, Kept())
    request = changed(change)
    request.identity.weights_hash = "replaced"
    if goes_on:
        submission = await validator.check(request, now=0.0, received_ns=0)
        assert submission.request.weights_hash == "replaced"
    else:
        with pytest.raises(FailedPrecondition, match="present") as caught:
            await validator.check(request, now=0.0, received_ns=0)
        assert caught.value.field == "identity.weights_hash"


@pytest.mark.parametrize(("left_ms", "unpaced_ns"), [(0, 0), (400, 1_200_000_000), (1, 1_000_500_000)])
async def test_half_of_the_time_to_its_ttft_objective_a_prompt_waits_for_paces(left_ms: int, unpaced_ns: int) -> None:
    async def translate(_: common_pb2.TokenRequest) -> EngineRequest:
        return EngineRequest("r1", (1, 2, 3), SamplingParams(max_tokens=4))

    asked = changed(lambda request: setattr(request, "ttft_left_ms", left_ms))
    submission = await SubmitValidator(1, common_pb2.Identity(), translate, None).check(asked, now=0.0, received_ns=1_000_000_000)
    assert submission.request.unpaced_from_ns == unpaced_ns
