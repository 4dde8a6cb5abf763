"""No writer touches blocks after the fence: attempts replace each other, and quiesce waits for whoever is inside."""

import asyncio
import threading
import time

import grpc
import pytest

from kvtransfer import framing
from kvtransfer.errors import PushFailed
from kvtransfer.manifest import Part, part_views
from kvtransfer.reservation import Mode, NewAttempt, transition
from kvtransfer.transports import shm
from tests.kvtransfer.endpoints import World, at_part, nothing_left, running, until

PART = Part(0, 0, 3, 0, 20)


async def test_fenced_between_parts_then_the_next_attempt(world: World) -> None:
    job = world.job()
    held = world.delegate.held["r1"]

    def replace_attempt() -> None:
        held.state = transition(held.state, NewAttempt(2, Mode.REMOTE), time.monotonic())

    world.delegate.on_progress = at_part(5, replace_attempt)
    with pytest.raises(PushFailed) as raised:
        await world.sender.push(job, timeout_s=10)
    assert raised.value.code is grpc.StatusCode.ABORTED and not raised.value.retryable
    job.reservation.CopyFrom(world.reservation("r1"))
    await world.sender.push(job, timeout_s=10)
    world.check_arrived(job)
    assert [kind for kind in world.delegate.kinds() if kind != "failed"] == ["open", "open", "commit"]


async def test_a_new_attempt_ends_the_session_of_the_former(world: World) -> None:
    job = world.job()
    held = world.delegate.held["r1"]
    async with world.raw_peer(world.hello("r1")) as former:
        held.state = transition(held.state, NewAttempt(2, Mode.REMOTE), time.monotonic())
        job.reservation.CopyFrom(world.reservation("r1"))
        await world.sender.push(job, timeout_s=10)
        with pytest.raises(ConnectionError):
            await former.stream.read_message()
    world.check_arrived(job)


async def test_a_stranger_does_not_end_a_session(world: World) -> None:
    world.job()
    wrong = world.hello("r1")
    wrong.token = b"guess"
    async with world.raw_peer(world.hello("r1")) as rightful:
        async with world.raw_peer() as stranger:
            assert (await stranger.greet(wrong)).code == grpc.StatusCode.PERMISSION_DENIED.value[0]
        assert (await rightful.send_part(Part(0, 0, 1, 0, 4), [0, 1, 2, 3])).part_reply.ok


async def test_quiesce_without_a_writer_returns_at_once(world: World) -> None:
    world.job()
    await world.receiver.quiesce("r1")
    async with world.raw_peer(world.hello("r1")) as peer:
        await asyncio.wait_for(world.receiver.quiesce("r1"), 1)
        assert (await peer.send_part(Part(0, 0, 1, 0, 4), [0, 1, 2, 3])).part_reply.ok  # and disturbs nobody


@pytest.mark.parametrize("inline", ["tcp", "tcp+tls", "tcp+secret", "grpc", "grpc+tls"])
async def test_quiesce_cuts_off_a_writer_in_the_middle_of_a_part(inline: str) -> None:
    with nothing_left():
        async with running(World(inline, idle_timeout_s=60)) as world:
            world.job()
            held = world.delegate.held["r1"]
            async with world.raw_peer(world.hello("r1")) as peer:
                body = b"".join(part_views(world.source, PART.layers, range(20)))
                await peer.send(part=peer.header(PART))
                await peer.send_bytes(body[: len(body) // 2])
                half = held.block_ids[9]
                await until(
                    lambda: world.target.block_view(1, 0, half) == world.source.block_view(1, 0, 9), "half of it is written"
                )
                held.state = transition(held.state, NewAttempt(2, Mode.LOCAL), time.monotonic())
                await asyncio.wait_for(world.receiver.quiesce("r1"), 2)
                frozen = bytes(world.target.memory())
                with pytest.raises(ConnectionError):
                    while True:
                        await peer.send_bytes(body[len(body) // 2 :])
                await until(lambda: world.receiver.num_connections == 0, "the session ends")
                assert bytes(world.target.memory()) == frozen


async def test_quiesce_waits_for_a_shm_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, go_on = threading.Event(), threading.Event()
    copy_runs = framing.copy_runs

    def slow_copy(*args: object) -> int:
        inside.set()
        assert go_on.wait(10)
        return copy_runs(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(shm, "copy_runs", slow_copy)
    with nothing_left():
        async with running(World("shm")) as world:
            push = asyncio.create_task(world.sender.push(world.job(), timeout_s=10))
            await until(inside.is_set, "a copy is under way")
            held = world.delegate.held["r1"]
            held.state = transition(held.state, NewAttempt(2, Mode.LOCAL), time.monotonic())
            quiesced = asyncio.create_task(world.receiver.quiesce("r1"))
            done, _ = await asyncio.wait([quiesced], timeout=0.1)
            assert not done
            go_on.set()
            await quiesced
            frozen = bytes(world.target.memory())
            with pytest.raises(PushFailed):
                await push
            assert bytes(world.target.memory()) == frozen
