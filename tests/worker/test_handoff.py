"""Separated requests give the tokens of one engine alone, over every transport and with every kind of sampling."""

from __future__ import annotations

import asyncio

import pytest

from pdmesh.v1 import common_pb2, decode_pb2, prefill_pb2
from tests.support.mini_router import MiniRouter
from tests.support.nixl import NEEDS_NIXL
from tests.support.waiting import eventually, slowly
from tests.support.worker_mesh import LOCAL, Model, Peer, only_transport, reference, running_worker, token_request

PROMPT = [10 + (7 * i) % 200 for i in range(53)]
REQUESTS = {
    "greedy": token_request(PROMPT),
    "sampled": token_request(PROMPT, temperature=0.9, seed=2**63 + 11),
    "one token of prompt": token_request([65], max_tokens=20),
    "whole blocks": token_request(PROMPT[:48]),
    "three choices": token_request(PROMPT, temperature=1.1, n=3, seed=5),
    "two tokens": token_request(PROMPT, max_tokens=2),
}


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
async def test_tokens_equal_one_engine(
    model: Model, prefiller: Peer, decoder: Peer, router: MiniRouter, name: str, transport: str
) -> None:
    request = REQUESTS[name]
    reservation = await router.submit(decoder, "r1", request)
    first, outcome = await router.prefill(prefiller, decoder, "r1", request, only_transport(reservation, transport))
    assert outcome.status == prefill_pb2.HANDOFF_STATUS_COMMITTED, outcome
    assert outcome.transport == transport
    assert outcome.kv_bytes > 0
    await router.until_finished("r1", request.sampling.n)
    seen = router.of("r1")
    assert [seen.output(choice) for choice in range(request.sampling.n)] == reference(model, request)
    assert first is not None
    assert 0 < first.timings.prefill_compute_ns < first.timings.service_ns
    assert first.timings.num_computed_tokens == len(request.prompt_token_ids)
    started = seen.started
    assert started is not None
    assert (started.transport, started.kv_bytes, started.attempt) == (transport, outcome.kv_bytes, 1)


@pytest.mark.parametrize("name", REQUESTS)
async def test_local_tokens_equal_one_engine(model: Model, decoder: Peer, router: MiniRouter, name: str) -> None:
    request = REQUESTS[name]
    await router.submit(decoder, "r1", request, mode=LOCAL)
    await router.until_finished("r1", request.sampling.n)
    seen = router.of("r1")
    assert [seen.output(choice) for choice in range(request.sampling.n)] == reference(model, request)
    assert seen.started is not None
    timings = seen.started.local_prefill
    assert timings.num_computed_tokens == len(request.prompt_token_ids)
    parts = (timings.reserve_ns, timings.prefill_queue_ns, timings.prefill_compute_ns, timings.return_ns)
    assert sum(parts) == timings.service_ns and min(parts) > 0


async def test_what_passes_while_the_engine_takes_a_local_prompt_is_reserve(
    decoder: Peer, router: MiniRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = decoder.engine
    monkeypatch.setattr(engine, "run_local", slowly(engine.run_local, 0.05))
    await router.submit(decoder, "r1", token_request(PROMPT), mode=LOCAL)
    await router.until_finished("r1", 1)
    started = router.of("r1").started
    assert started is not None
    timings = started.local_prefill
    assert timings.reserve_ns > 50e6
    parts = (timings.reserve_ns, timings.prefill_queue_ns, timings.prefill_compute_ns, timings.return_ns)
    assert sum(parts) == timings.service_ns


async def test_prefix_hits_on_either_side(model: Model, prefiller: Peer, decoder: Peer, router: MiniRouter) -> None:
    warm, request = token_request(PROMPT[:40]), token_request([*PROMPT[:40], *range(100, 120)])
    await router.submit(decoder, "warm-decode", warm, mode=LOCAL)
    await router.until_finished("warm-decode")
    reservation = await router.submit(decoder, "r1", request)
    assert reservation.num_cached_tokens == 32
    first, outcome = await router.prefill(prefiller, decoder, "r1", request, reservation)
    await router.until_finished("r1")
    assert router.of("r1").output() == reference(model, request)[0]
    assert first is not None
    assert first.timings.num_cached_tokens == 0
    pushed = outcome.kv_bytes
    seen, outcome = await router.generate(prefiller, decoder, "r2", token_request([*PROMPT[:40], *range(120, 140)]))
    assert outcome.kv_bytes == pushed
    assert seen.started is not None
    assert seen.started.num_cached_tokens == 32
    assert prefiller.engine.stats().num_prefix_hit_tokens > 0
    assert seen.output() == reference(model, token_request([*PROMPT[:40], *range(120, 140)]))[0]


async def test_salts_keep_prefixes_apart(decoder: Peer, router: MiniRouter) -> None:
    def salted(tenant: str, salt: str) -> common_pb2.TokenRequest:
        request = token_request(PROMPT)
        request.tenant, request.cache_salt = tenant, salt
        return request

    await router.submit(decoder, "r1", salted("a", ""), mode=LOCAL)
    await router.until_finished("r1")
    for name, request, cached in (("r2", salted("b", ""), 0), ("r3", salted("a", "x"), 0), ("r4", salted("a", ""), 48)):
        reservation = await router.submit(decoder, name, request)
        assert reservation.num_cached_tokens == cached, name
        await decoder.decode.Cancel(decode_pb2.CancelRequest(request_id=name))


async def test_history_is_continued(model: Model, prefiller: Peer, decoder: Peer, router: MiniRouter) -> None:
    whole = reference(model, token_request(PROMPT))[0]
    emitted = [common_pb2.EmittedChoice(index=0, token_ids=whole[:5])]
    seen, _ = await router.generate(prefiller, decoder, "r1", token_request(PROMPT, emitted=emitted))
    assert sorted(seen.tokens[0]) == list(range(5, 12))
    assert seen.output() == whole[5:]


async def test_one_finished_choice_of_two(model: Model, prefiller: Peer, decoder: Peer, router: MiniRouter) -> None:
    both = reference(model, token_request(PROMPT, n=2, temperature=1.0))
    emitted = [
        common_pb2.EmittedChoice(index=0, token_ids=both[0][:3], finish_reason=common_pb2.FINISH_REASON_STOP),
        common_pb2.EmittedChoice(index=1, token_ids=both[1][:4]),
    ]
    request = token_request(PROMPT, n=2, temperature=1.0, emitted=emitted)
    reservation = await router.submit(decoder, "r1", request)
    await router.prefill(prefiller, decoder, "r1", request, reservation)
    await eventually(lambda: 1 in router.of("r1").finished)
    assert router.of("r1").output(1) == both[1][4:]
    assert 0 not in router.of("r1").tokens


async def test_one_token_finishes_on_prefill(model: Model, prefiller: Peer, decoder: Peer, router: MiniRouter) -> None:
    request = token_request(PROMPT, max_tokens=1)
    reservation = await router.submit(decoder, "r1", request)
    first, outcome = await router.prefill(prefiller, decoder, "r1", request, reservation)
    assert outcome.status == prefill_pb2.HANDOFF_STATUS_FINISHED
    assert first is not None
    assert first.tokens[0].finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert router.of("r1").output() == reference(model, request)[0]
    await decoder.until_whole()


async def test_stop_token_first(model: Model, prefiller: Peer, decoder: Peer, router: MiniRouter) -> None:
    [first_token] = reference(model, token_request(PROMPT, max_tokens=1))[0]
    request = token_request(PROMPT, stop_token_ids=[first_token])
    reservation = await router.submit(decoder, "r1", request)
    _, outcome = await router.prefill(prefiller, decoder, "r1", request, reservation)
    assert outcome.status == prefill_pb2.HANDOFF_STATUS_FINISHED
    assert router.of("r1").finished == {0: common_pb2.FINISH_REASON_STOP}


async def test_some_choices_end_with_their_first_token(model: Model, prefiller: Peer, decoder: Peer, router: MiniRouter) -> None:
    plain = token_request(PROMPT, temperature=6.0, n=4, seed=3)
    firsts = [tokens[0] for tokens in reference(model, plain)]
    request = token_request(PROMPT, temperature=6.0, n=4, seed=3, stop_token_ids=firsts[:1])
    assert any(token != firsts[0] for token in firsts), "choose another seed"
    seen, outcome = await router.generate(prefiller, decoder, "r1", request)
    assert outcome.status == prefill_pb2.HANDOFF_STATUS_COMMITTED
    assert [seen.output(choice) for choice in range(4)] == reference(model, request)


async def test_logprobs_travel(prefiller: Peer, decoder: Peer, router: MiniRouter) -> None:
    request = token_request(PROMPT, logprobs=2, max_tokens=5)
    seen, _ = await router.generate(prefiller, decoder, "remote", request)
    await router.submit(decoder, "local", request, mode=LOCAL)
    await router.until_finished("local")
    for index in range(5):
        remote, local = seen.logprobs[0][index], router.of("local").logprobs[0][index]
        assert remote == local, index
        assert len(remote.top) == 2


async def test_many_at_once(model: Model, prefiller: Peer, decoder: Peer, router: MiniRouter) -> None:
    requests = [token_request(PROMPT[: 5 + 6 * i], max_tokens=8 + i, temperature=0.8, seed=i) for i in range(8)]
    await asyncio.gather(*(router.generate(prefiller, decoder, f"r{i}", request) for i, request in enumerate(requests)))
    for i, request in enumerate(requests):
        assert router.of(f"r{i}").output() == reference(model, request)[0], i


async def test_a_worker_hands_off_to_itself(model: Model) -> None:
    async with running_worker(model, roles=("prefill", "decode")) as both:
        router = MiniRouter()
        await router.attach(both)
        for transport in both.info.transports:
            request = token_request(PROMPT, seed=1, temperature=0.7)
            reservation = await router.submit(both, transport, request)
            _, outcome = await router.prefill(both, both, transport, request, only_transport(reservation, transport))
            assert outcome.status == prefill_pb2.HANDOFF_STATUS_COMMITTED, outcome
            await router.until_finished(transport)
            assert router.of(transport).output() == reference(model, request)[0]
        await router.detach()


@NEEDS_NIXL
async def test_tokens_equal_one_engine_over_nixl(model: Model) -> None:
    async with (
        running_worker(model, roles=("decode",), worker_id="n", transports=("nixl", "tcp")) as decoder,
        running_worker(model, roles=("prefill",), worker_id="p") as prefiller,
    ):
        router = MiniRouter()
        await router.attach(decoder)
        for number, (case, request) in enumerate(REQUESTS.items()):
            name = f"r{number}"
            reservation = await router.submit(decoder, name, request)
            assert [endpoint.transport for endpoint in reservation.endpoints] == ["nixl", "tcp"]
            _, outcome = await router.prefill(prefiller, decoder, name, request, reservation)
            assert (outcome.status, outcome.transport) == (prefill_pb2.HANDOFF_STATUS_COMMITTED, "nixl"), outcome
            await router.until_finished(name, request.sampling.n)
            seen = router.of(name)
            assert [seen.output(choice) for choice in range(request.sampling.n)] == reference(model, request), case
        await router.detach()
