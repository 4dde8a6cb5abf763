"""Pushes that succeed, are refused, or are given up: over every transport, with real sockets."""

import asyncio
import random
import time
from typing import Any

import grpc
import pytest

from kvtransfer.errors import PushFailed, TransferRefused
from kvtransfer.manifest import Part
from kvtransfer.sender.send_queue import NothingToDecode, complete_readiness
from kvtransfer.transports.base import Outgoing
from pdmesh.runtime import failpoints
from pdmesh.v1 import common_pb2, transfer_pb2
from tests.kvtransfer.endpoints import CHOICES, EPOCH, World, nothing_left, running, until


async def test_bytes_arrive(world: World) -> None:
    job = world.job()
    result = await world.sender.push(job, timeout_s=10)
    world.check_arrived(job)
    assert result.transport == world.transport and result.num_bytes == 20 * 3 * 2 * 512 and result.elapsed_ns > 0
    (commit, num_bytes, transport) = world.delegate.commits[0]
    assert (num_bytes, transport) == (result.num_bytes, world.transport)
    assert commit.num_parts == result.num_parts > 1 and list(commit.choices) == list(CHOICES)
    assert world.delegate.kinds() == ["open", "commit"]


async def test_a_push_has_ended_when_the_receiver_says_so(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left to close then is no part of the time in which decode waited."""
    close, took_ns = world.sender._close, 50_000_000

    async def slowly(*connections: Outgoing) -> None:
        await asyncio.sleep(1.1 * took_ns / 1e9)
        await close(*connections)

    monkeypatch.setattr(world.sender, "_close", slowly)
    began_ns = time.monotonic_ns()
    result = await world.sender.push(world.job(), timeout_s=10)
    assert began_ns <= result.started_ns < result.ended_ns <= time.monotonic_ns() - took_ns


async def test_prefix_blocks_are_not_sent(world: World) -> None:
    job = world.job(first_block=13)
    result = await world.sender.push(job, timeout_s=10)
    assert result.num_bytes == 7 * 3 * 2 * 512
    world.check_arrived(job)


@pytest.mark.parametrize("seed", range(6))
async def test_random_shapes(transport: str, seed: int) -> None:
    draw = random.Random(seed)
    with nothing_left():
        num_blocks = draw.randint(1, 60)
        world = World(
            transport, num_layers=draw.randint(1, 7), num_blocks=num_blocks, part_bytes=draw.choice([1, 2048, 65536, 1 << 22])
        )
        async with running(world):
            job = world.job(num_blocks=num_blocks, first_block=draw.randrange(num_blocks), spread=draw.random() < 0.5)
            await world.sender.push(job, timeout_s=20)
            world.check_arrived(job)


async def test_pushes_at_once(world: World) -> None:
    jobs = [world.job(f"r{i}", num_blocks=12, start=12 * i) for i in range(5)]
    await asyncio.gather(*(world.sender.push(job, timeout_s=10) for job in jobs))
    written = set()
    for job in jobs:
        block_ids = world.delegate.held[job.reservation.reservation_id].block_ids
        written |= set(block_ids)
        for source_id, target_id in zip(job.source_block_ids, block_ids, strict=True):
            assert world.source.block_bytes(source_id) == world.target.block_bytes(target_id)
    world.check_untouched(set(range(world.target.num_blocks)) - written)


async def test_the_last_block_may_be_the_only_one_missing(world: World) -> None:
    job = world.job(num_blocks=4, first_block=3)
    assert (await world.sender.push(job, timeout_s=10)).num_bytes == 3 * 2 * 512
    world.check_arrived(job)


@pytest.mark.parametrize(
    ("changes", "code", "field"),
    [
        ({"token": b"x" * 32}, grpc.StatusCode.PERMISSION_DENIED, "token"),
        ({"epoch": EPOCH + 1}, grpc.StatusCode.FAILED_PRECONDITION, "epoch"),
        ({"attempt": 2}, grpc.StatusCode.FAILED_PRECONDITION, "attempt"),
        ({"attempt": 0}, grpc.StatusCode.ABORTED, "attempt"),
        ({"reservation_id": "other"}, grpc.StatusCode.NOT_FOUND, "reservation_id"),
    ],
)
async def test_foreign_grants_are_refused(world: World, changes: dict[str, Any], code: grpc.StatusCode, field: str) -> None:
    job = world.job()
    for name, value in changes.items():
        setattr(job.reservation, name, value)
    with pytest.raises(PushFailed) as raised:
        await world.sender.push(job, timeout_s=10)
    assert raised.value.code is code and raised.value.message.startswith(field) and not raised.value.retryable
    assert world.delegate.events == []
    assert bytes(world.target.memory()) == world.before


@pytest.mark.parametrize("field", ["model", "weights_hash", "numeric_mode"])
async def test_another_identity_is_refused(world: World, field: str) -> None:
    identity = common_pb2.Identity()
    identity.CopyFrom(world.identity)
    setattr(identity, field, "other")
    world.sender._identity = identity
    with pytest.raises(PushFailed, match=f"identity.{field}: ours is .* theirs is 'other'") as raised:
        await world.sender.push(world.job(), timeout_s=10)
    assert raised.value.code is grpc.StatusCode.FAILED_PRECONDITION and world.delegate.events == []


async def test_another_layout_is_refused_by_the_sender(world: World) -> None:
    job = world.job()
    job.reservation.layout.arrangement = "panels"
    with pytest.raises(PushFailed, match=r"layout\.arrangement"):
        await world.sender.push(job, timeout_s=10)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda hello: setattr(hello.layout, "kv_dtype", "float8_e5m2"), "layout.kv_dtype"),
        (lambda hello: setattr(hello, "protocol_version", 9), "protocol_version"),
        (lambda hello: hello.ClearField("identity"), "identity.model"),
    ],
)
async def test_another_layout_or_version_is_refused_by_the_receiver(world: World, change: Any, field: str) -> None:
    world.job()
    hello = world.hello("r1")
    change(hello)
    async with world.raw_peer() as peer:
        reply = await peer.greet(hello)
    assert reply.code == grpc.StatusCode.FAILED_PRECONDITION.value[0] and reply.message.startswith(field)
    assert world.delegate.events == []


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"source_block_ids": (1, 2)}, "source_block_ids"),
        ({"source_block_ids": tuple(range(50, 70))}, "source_block_ids"),
        ({"num_tokens": 1}, "source_block_ids"),
    ],
)
async def test_a_wrong_job_is_refused_before_anything_is_sent(world: World, changes: dict[str, Any], field: str) -> None:
    job = world.job()
    for name, value in changes.items():
        object.__setattr__(job, name, value)
    with pytest.raises(PushFailed, match=field) as raised:
        await world.sender.push(job, timeout_s=10)
    assert raised.value.code is grpc.StatusCode.INVALID_ARGUMENT and world.delegate.events == []


PART = Part(0, 0, 2, 0, 4)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layer_end": 4}, "part.layer_end"),
        ({"block_end": 21}, "part.block_end"),
        ({"num_bytes": 1 << 40}, "part.num_bytes"),
        ({"num_bytes": 0}, "part.num_bytes"),
    ],
)
async def test_parts_out_of_range_are_refused(world: World, changes: dict[str, int], field: str) -> None:
    world.job()
    async with world.raw_peer(world.hello("r1")) as peer:
        answer = await peer.send_part(PART, [0, 1, 2, 3], **changes)
    assert answer.commit_reply.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert answer.commit_reply.message.startswith(field)
    await until(lambda: world.delegate.kinds() == ["open", "failed"], "the attempt fails")
    assert bytes(world.target.memory()) == world.before


async def test_overlapping_parts_are_refused(world: World) -> None:
    world.job()
    async with world.raw_peer(world.hello("r1")) as peer:
        assert (await peer.send_part(PART, [0, 1, 2, 3])).part_reply.ok
        answer = await peer.send_part(Part(1, 1, 3, 3, 5), [3, 4])
    assert "overlaps" in answer.commit_reply.message
    assert answer.commit_reply.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


async def test_an_incomplete_manifest_is_not_committed(world: World) -> None:
    world.job()
    async with world.raw_peer(world.hello("r1")) as peer:
        assert (await peer.send_part(PART, [0, 1, 2, 3])).part_reply.ok
        await peer.send(commit=transfer_pb2.TransferCommit(num_parts=1, num_tokens=317))
        code, message = await peer.verdict()
    assert code is grpc.StatusCode.FAILED_PRECONDITION and "layer 0, block 4" in message
    assert "commit" not in world.delegate.kinds()


async def test_what_the_delegate_refuses_at_commit(world: World) -> None:
    def refuse(target: object) -> None:
        raise TransferRefused(grpc.StatusCode.RESOURCE_EXHAUSTED, "no", field="choices")

    world.delegate.on_commit = refuse
    with pytest.raises(PushFailed, match="choices: no") as raised:
        await world.sender.push(world.job(), timeout_s=10)
    assert raised.value.retryable and world.delegate.kinds() == ["open", "failed"]


async def test_nothing_to_decode_releases(world: World) -> None:
    feed = complete_readiness(3, 20, NothingToDecode("every choice ended"))
    result = await world.sender.push(world.job(feed=feed), timeout_s=10)
    assert (result.committed, result.num_bytes) == (False, 0)
    assert world.delegate.kinds() == ["open", "finished"]


async def test_an_abort_fails_the_attempt(world: World) -> None:
    world.job()
    async with world.raw_peer(world.hello("r1")) as peer:
        await peer.send(abort=transfer_pb2.TransferAbort(reason="engine failed"))
        await until(lambda: len(world.delegate.events) == 2, "the attempt fails")
    assert world.delegate.events[1] == ("failed", "the sender gave up: engine failed")


async def test_a_release_that_reaches_nobody_says_so(world: World) -> None:
    job = world.job(feed=complete_readiness(3, 20, NothingToDecode("")))
    await world.receiver.stop()
    with pytest.raises(PushFailed) as raised:
        await world.sender.push(job, timeout_s=10)
    assert raised.value.retryable and raised.value.code is grpc.StatusCode.UNAVAILABLE


async def test_a_second_push_of_an_attempt_is_refused(world: World) -> None:
    job = world.job()
    await world.sender.push(job, timeout_s=10)
    with pytest.raises(PushFailed) as raised:
        await world.sender.push(job, timeout_s=10)
    assert raised.value.code is grpc.StatusCode.FAILED_PRECONDITION and not raised.value.retryable


@pytest.mark.parametrize("name", ["push.hello", "push.part", "push.before_commit", "push.committed"])
async def test_failpoints(world: World, name: str) -> None:
    failpoints.install(f"{name}=error@1")
    try:
        with pytest.raises(PushFailed, match="failpoint"):
            await world.sender.push(world.job(), timeout_s=10)
    finally:
        failpoints.install("")
    expected = {"push.hello": [], "push.committed": ["open", "commit"]}.get(name, ["open", "failed"])
    await until(lambda: world.delegate.kinds() == expected, str(expected))
