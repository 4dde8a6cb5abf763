"""What the router's stream carries, and what happens when it breaks, falls silent or comes back. Leases and deadlines too."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import grpc
import grpc.aio
import pytest

from pdmesh.runtime import failpoints
from pdmesh.v1 import decode_pb2, prefill_pb2
from tests.support.mini_router import MiniRouter
from tests.support.waiting import eventually
from tests.support.worker_mesh import LOCAL, Model, Peer, reference, running_worker, token_request

PROMPT = [10 + (7 * i) % 200 for i in range(60)]
LONG = token_request(PROMPT, max_tokens=300)
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE.value[0]
DEADLINE_EXCEEDED = grpc.StatusCode.DEADLINE_EXCEEDED.value[0]


def num_tokens(router: MiniRouter, request_id: str) -> int:
    return len(router.of(request_id).tokens.get(0, ()))


async def test_heartbeats_carry_progress_and_load(decoder: Peer, router: MiniRouter) -> None:
    await router.submit(decoder, "r1", token_request(PROMPT), mode=LOCAL)
    await router.until_finished("r1")
    num_frames, began = len(router.frames), time.monotonic()
    await eventually(lambda: len(router.frames) >= num_frames + 5)
    assert time.monotonic() - began > 0.3
    assert router.frames[-1].num_steps == decoder.engine.stats().num_steps
    assert router.frames[-1].epoch == decoder.info.epoch
    await eventually(lambda: any(frame.HasField("load") for frame in router.frames[num_frames:]))
    loads = [frame.load for frame in router.frames if frame.HasField("load")]
    assert loads[-1].worker_id == "d"
    assert loads[-1].num_total_blocks == 128


async def test_one_frame_per_step_for_all_requests(decoder: Peer, router: MiniRouter) -> None:
    for name in ("r1", "r2", "r3"):
        await router.submit(decoder, name, LONG, mode=LOCAL)
    for name in ("r1", "r2", "r3"):
        await router.until_finished(name)
    assert any(len(frame.outputs) == 3 for frame in router.frames)
    assert all(len({output.request_id for output in frame.outputs}) == len(frame.outputs) for frame in router.frames)


async def test_first_token_of_the_commit_is_sent_too(prefiller: Peer, decoder: Peer, router: MiniRouter) -> None:
    request = token_request(PROMPT)
    reservation = await router.submit(decoder, "r1", request)
    await router.prefill(prefiller, decoder, "r1", request, reservation)
    await router.until_finished("r1")
    assert router.of("r1").repeated == 1


async def test_broken_stream_loses_nothing(model: Model, decoder: Peer, router: MiniRouter) -> None:
    await router.submit(decoder, "r1", LONG, mode=LOCAL)
    await eventually(lambda: num_tokens(router, "r1") > 10)
    await router.detach()
    seen = router.of("r1")
    missed = sorted(seen.tokens[0])[-1] - 3  # as if the last frames had been lost on the way
    for index in [index for index in seen.tokens[0] if index >= missed]:
        del seen.tokens[0][index]
    seen.events.clear()
    await router.attach(decoder, [("r1", 0, missed)])
    await router.until_finished("r1")
    assert seen.output() == reference(model, LONG)[0]
    assert seen.started is not None


async def test_output_that_ended_meanwhile_is_kept(model: Model, decoder: Peer, router: MiniRouter) -> None:
    request = token_request(PROMPT)
    await router.detach()
    await router.submit(decoder, "r1", request, mode=LOCAL)
    await decoder.until_whole()
    await eventually(lambda: decoder.engine.stats().num_generated_tokens >= 12)
    await router.attach(decoder, [("r1", 0, 0)])
    await router.until_finished("r1")
    assert router.of("r1").output() == reference(model, request)[0]


async def test_not_named_at_attach_is_cancelled(decoder: Peer, router: MiniRouter) -> None:
    for name in ("kept", "dropped"):
        await router.submit(decoder, name, LONG, mode=LOCAL)
    await eventually(lambda: num_tokens(router, "dropped") > 3)
    await router.detach()
    await router.attach(decoder, [("kept", 0, 0)])
    await router.until_finished("kept")
    assert num_tokens(router, "dropped") < 300


async def test_submitted_while_detached_survives_the_next_attach(decoder: Peer, router: MiniRouter) -> None:
    await router.detach()
    await router.submit(decoder, "r1", token_request(PROMPT), mode=LOCAL)
    await router.attach(decoder)
    await router.until_finished("r1")


async def test_named_but_ended_is_reported(decoder: Peer, router: MiniRouter) -> None:
    await router.submit(decoder, "r1", LONG, mode=LOCAL, time_left_ms=50)
    await eventually(lambda: router.of("r1").failure)
    await router.detach()
    router.of("r1").events.clear()
    await router.attach(decoder, [("r1", 0, 0), ("never-submitted", 0, 0)])
    await eventually(lambda: router.of("r1").failure)
    failure = router.of("r1").failure
    assert failure is not None
    assert (failure.code, failure.attempt) == (DEADLINE_EXCEEDED, 1)
    assert router.of("never-submitted").failure is None


async def test_router_that_stays_away_is_given_up(decoder: Peer, router: MiniRouter) -> None:
    await router.submit(decoder, "r1", token_request(PROMPT, max_tokens=1500), mode=LOCAL)
    await router.submit(decoder, "r2", LONG)
    await router.detach()
    await decoder.until_whole()
    assert not router.of("r1").finished


async def test_silent_router_has_a_broken_stream(decoder: Peer, router: MiniRouter) -> None:
    await router.submit(decoder, "r1", LONG)
    router.silent = True
    began = time.monotonic()
    await eventually(lambda: router.ended)
    assert router.ended == [grpc.StatusCode.UNAVAILABLE]
    assert 0.3 < time.monotonic() - began < 5
    assert decoder.engine.stats().num_reserved == 1  # for the grace period
    await decoder.until_whole()


async def test_second_stream_takes_over(decoder: Peer, router: MiniRouter) -> None:
    again = MiniRouter(router.router_id)
    await router.submit(decoder, "r1", LONG, mode=LOCAL)
    await again.attach(decoder, [("r1", 0, 0)])
    await eventually(lambda: router.ended == [grpc.StatusCode.ABORTED])
    await again.until_finished("r1")
    await again.detach()


async def test_frames_of_a_slow_router_are_merged(model: Model, decoder: Peer) -> None:
    """A router that does not read fills gRPC's window; what follows waits here and goes out in few frames."""
    request = token_request(PROMPT, max_tokens=500, logprobs=20)
    router = MiniRouter("slow")
    # gRPC would widen its window by measuring the loopback; fixed at 64 KiB, it fills.
    async with grpc.aio.insecure_channel(decoder.info.address, options=[("grpc.http2.bdp_probe", 0)]) as channel:
        await router.attach(replace(decoder, channel=channel))
        router.paused.clear()
        await router.submit(decoder, "r1", request, mode=LOCAL)
        await eventually(lambda: decoder.engine.stats().num_generated_tokens >= 500, timeout_s=60)
        router.paused.set()
        await router.until_finished("r1")
        await router.detach()
    assert router.of("r1").output() == reference(model, request)[0]
    assert max(len(output.token_ids) for frame in router.frames for output in frame.outputs) > 1


async def test_two_routers_get_their_own(model: Model, decoder: Peer, router: MiniRouter) -> None:
    other = MiniRouter("router-2")
    await other.attach(decoder)
    requests = {"mine": token_request(PROMPT), "theirs": token_request(PROMPT[:33])}
    await router.submit(decoder, "mine", requests["mine"], mode=LOCAL)
    await other.submit(decoder, "theirs", requests["theirs"], mode=LOCAL)
    await router.until_finished("mine")
    await other.until_finished("theirs")
    assert (list(router.seen), list(other.seen)) == (["mine"], ["theirs"])
    await other.detach()


@pytest.mark.parametrize("mode", ["reserved", "running", "receiving"])
async def test_deadline_ends_a_request(prefiller: Peer, decoder: Peer, router: MiniRouter, mode: str) -> None:
    if mode == "running":
        await router.submit(decoder, "r1", token_request(PROMPT, max_tokens=1900), mode=LOCAL, time_left_ms=200)
    else:
        reservation = await router.submit(decoder, "r1", LONG, time_left_ms=400)
    if mode == "receiving":
        failpoints.install("push.before_commit=delay:800")
        _, outcome = await router.prefill(prefiller, decoder, "r1", LONG, reservation)
        assert outcome.status == prefill_pb2.HANDOFF_STATUS_FAILED
    await eventually(lambda: router.of("r1").failure)
    failure = router.of("r1").failure
    assert failure is not None
    assert failure.code == DEADLINE_EXCEEDED
    await decoder.until_whole()


async def test_lease_of_a_stalled_push_lapses(model: Model, prefiller: Peer) -> None:
    """The router is there; the writer is stuck: its own progress is what counts then."""
    async with running_worker(model, lease_s=0.4) as decoder:
        router = MiniRouter()
        await router.attach(decoder)
        failpoints.install("push.before_commit=delay:1500")
        reservation = await router.submit(decoder, "r1", LONG)
        pushing = asyncio.create_task(router.prefill(prefiller, decoder, "r1", LONG, reservation))
        await eventually(lambda: router.of("r1").failure)
        failure = router.of("r1").failure
        assert failure is not None
        assert failure.code == UNAVAILABLE
        await decoder.until_whole()
        _, outcome = await pushing
        assert outcome.status == prefill_pb2.HANDOFF_STATUS_FAILED
        await router.detach()


async def test_lease_is_renewed_while_the_router_follows(model: Model, prefiller: Peer) -> None:
    """A prompt may wait in prefill's queue for longer than a lease."""
    async with running_worker(model, lease_s=0.3, grace_s=30.0) as decoder:
        router = MiniRouter()
        await router.attach(decoder)
        request = token_request(PROMPT)
        reservation = await router.submit(decoder, "r1", request)
        await asyncio.sleep(1.0)
        _, outcome = await router.prefill(prefiller, decoder, "r1", request, reservation)
        assert outcome.status == prefill_pb2.HANDOFF_STATUS_COMMITTED
        await router.until_finished("r1")
        await router.submit(decoder, "r2", request)
        await router.detach()  # nobody renews now, and the grace period is long
        began = time.monotonic()
        await decoder.until_whole()
        assert time.monotonic() - began < 5


async def test_malformed_attach_is_refused(decoder: Peer) -> None:
    for first, field in (
        (decode_pb2.AttachRequest(router_id="with space"), "router_id"),
        (decode_pb2.AttachRequest(router_id="a", period_ms=1), "period_ms"),
        (decode_pb2.AttachRequest(router_id="a", resume_points=[decode_pb2.ResumePoint()]), "resume_points[0].request_id"),
    ):
        call = decoder.decode.Attach()
        await call.write(first)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, field
    call = decoder.decode.Attach()
    assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # it never said who it is
