"""What counts as silence, who hears a refusal when, and who is still known to be writing: with real sockets."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import grpc
import pytest

from kvtransfer.errors import PushFailed
from kvtransfer.manifest import Part, part_views
from kvtransfer.receiver import push as receiver_push
from kvtransfer.receiver.push import PushTarget
from kvtransfer.receiver.receiver import Receiver
from kvtransfer.reservation import Cancelled, transition
from kvtransfer.sender import sender as sender_module
from kvtransfer.sender.push import PushConnection, PushJob
from kvtransfer.sender.send_queue import FirstTokensDrawn, KVReadiness, Ready
from pdmesh.v1 import common_pb2, transfer_pb2
from tests.kvtransfer.endpoints import CHOICES, World, nothing_left, running, until
from tests.support.kv_memory import make_identity, make_layout

LAYERS = 3


@asynccontextmanager
async def slow_link(port: int, bytes_per_s: float) -> AsyncIterator[str]:
    """The address of a way to `port` on which so much passes towards it."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, slowly: bool) -> None:
        try:
            while data := await reader.read(32768):
                await asyncio.sleep(len(data) / bytes_per_s if slowly else 0)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, far_writer, slowly=True), pump(far_reader, writer, slowly=False))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=65536)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


def port_of(world: World) -> int:
    return int(world.receiver.endpoints()[0].address.rpartition(":")[2])


def counted(job: PushJob) -> PushJob:
    """Its engine makes steps all the time."""
    steps = itertools.count()
    return PushJob(job.reservation, job.source_block_ids, job.num_tokens, job.feed, lambda: next(steps))


async def test_a_part_may_take_longer_than_any_timeout_while_bytes_flow() -> None:
    """12 MB in one part at 4 MB/s; silence of a second would end it."""
    world = World("tcp", num_layers=40, num_blocks=300, idle_timeout_s=1.0)
    async with running(world), slow_link(port_of(world), 4e6) as address:
        sender = world.make_sender(part_bytes=1 << 24, reply_timeout_s=1.0)
        job = world.job(num_blocks=300)
        job.reservation.endpoints[0].address = address
        assert (await sender.push(job, timeout_s=30)).num_parts == 1
        world.check_arrived(job)
        await sender.close()


async def test_the_first_connection_waits_for_the_last_part_of_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "BYTES_FOR_A_CONNECTION", 1 << 20)
    world = World("tcp", num_layers=40, num_blocks=300, idle_timeout_s=0.6)
    async with running(world), slow_link(port_of(world), 4e6) as address:
        sender = world.make_sender(part_bytes=9 << 20, num_connections=2)
        job = world.job(num_blocks=300)
        job.reservation.endpoints[0].address = address
        assert (await sender.push(job, timeout_s=30)).num_parts == 2
        world.check_arrived(job)
        await sender.close()


@pytest.mark.parametrize("num_connections", [1, 2, 3])
async def test_signs_of_life_come_well_within_the_lease(num_connections: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "BYTES_FOR_A_CONNECTION", 1 << 10)
    async with running(World("tcp", idle_timeout_s=0.6)) as world:
        sender = world.make_sender(num_connections=num_connections)
        job = counted(world.job(feed=KVReadiness()))
        job.reservation.lease_ms = 600
        job.feed.advance(Ready(4, 12, 0))
        push = asyncio.create_task(sender.push(job, timeout_s=10))
        await asyncio.sleep(1.5)
        job.feed.advance(Ready(20, 20, LAYERS))
        job.feed.end(FirstTokensDrawn(CHOICES))
        await push
        world.check_arrived(job)
        await sender.close()


class SlowCommits:
    """A delegate whose engine has to end a step before it commits: until `step` is set."""

    def __init__(self, world: World) -> None:
        self.is_asked, self.step = asyncio.Event(), asyncio.Event()
        self._commit = world.delegate.commit_push
        world.delegate.commit_push = self._wait_and_commit  # type: ignore[method-assign]

    async def _wait_and_commit(
        self, target: PushTarget, commit: transfer_pb2.TransferCommit, *, num_bytes: int, transport: str
    ) -> None:
        self.is_asked.set()
        await self.step.wait()
        await self._commit(target, commit, num_bytes=num_bytes, transport=transport)


@pytest.mark.parametrize("transport", ["tcp", "shm", "grpc"])
async def test_a_commit_may_take_a_step_of_the_engine_while_the_receiver_is_alive(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver_push, "ALIVE_S", 0.05)
    async with running(World(transport)) as world:
        commits, sender = SlowCommits(world), world.make_sender(reply_timeout_s=0.5)
        push = asyncio.create_task(sender.push(world.job(), timeout_s=30))
        await commits.is_asked.wait()
        await asyncio.sleep(1.5)  # three times what a silent receiver gets
        assert not push.done()
        commits.step.set()
        assert (await push).committed
        await sender.close()


async def test_a_receiver_that_is_silent_after_the_commit_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver_push, "ALIVE_S", 60.0)
    async with running(World("tcp")) as world:
        commits, sender = SlowCommits(world), world.make_sender(reply_timeout_s=0.5)
        with pytest.raises(PushFailed) as raised:
            await sender.push(world.job(), timeout_s=30)
        assert raised.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
        commits.step.set()
        await until(lambda: world.delegate.kinds() == ["open", "commit"], "it was committed all the same")
        await sender.close()


async def test_an_older_sender_gets_no_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take them for a broken protocol."""
    monkeypatch.setattr(receiver_push, "ALIVE_S", 0.02)
    async with running(World("tcp")) as world:
        commits, sender = SlowCommits(world), world.make_sender(reply_timeout_s=10)
        hello = sender._hello

        def as_before(reservation: common_pb2.Reservation) -> transfer_pb2.TransferHello:
            older = hello(reservation)
            older.ClearField("reads_alive")
            return older

        sender._hello = as_before  # type: ignore[method-assign]
        monkeypatch.setattr(PushConnection, "_take", _without_signs)
        push = asyncio.create_task(sender.push(world.job(), timeout_s=30))
        await commits.is_asked.wait()
        await asyncio.sleep(0.3)
        commits.step.set()
        assert (await push).committed
        await sender.close()


_take = PushConnection._take


def _without_signs(self: PushConnection, message: transfer_pb2.TransferMessage) -> None:
    assert message.WhichOneof("message") != "alive"
    _take(self, message)


@pytest.mark.parametrize("longest_step_s", [0.0, 30.0], ids=["its engine is stuck", "its engine is in a long step"])
async def test_a_prefill_in_a_long_step_keeps_its_lease(longest_step_s: float) -> None:
    """No step ends for three leases. Whether that is long is for the worker to say, which knows its steps."""
    async with running(World("tcp", idle_timeout_s=0.5)) as world:
        ready = world.job(feed=KVReadiness())
        job = replace(ready, num_steps=lambda: 7, longest_step_s=lambda: longest_step_s)
        job.reservation.lease_ms = 500
        job.feed.advance(Ready(4, 20, 0))
        push = asyncio.create_task(world.sender.push(job, timeout_s=10))
        await asyncio.sleep(1.5)
        assert push.done() != bool(longest_step_s)
        job.feed.advance(Ready(20, 20, LAYERS))
        job.feed.end(FirstTokensDrawn(CHOICES))
        if longest_step_s:
            await push
            world.check_arrived(job)
        else:
            with pytest.raises(PushFailed):
                await push


async def test_the_time_of_a_push_is_bounded_from_the_end_of_its_prefill_on() -> None:
    world = World("tcp", num_layers=40, num_blocks=300, part_bytes=1 << 18)
    async with running(world), slow_link(port_of(world), 2e6) as address:
        job = world.job(num_blocks=300, feed=KVReadiness())
        job.reservation.endpoints[0].address = address
        job.feed.advance(Ready(0, 300, 1))
        push = asyncio.create_task(world.sender.push(job, timeout_s=0.5))
        await asyncio.sleep(0.7)
        assert not push.done()  # the prefill may take as long as it likes
        job.feed.advance(Ready(300, 300, 40))
        job.feed.end(FirstTokensDrawn(CHOICES))
        with pytest.raises(PushFailed) as raised:
            await push
        assert raised.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: world.delegate.kinds() == ["open", "failed"], "the attempt fails")


@pytest.mark.parametrize("num_layers", [0, LAYERS], ids=["between parts", "before the commit"])
async def test_a_refusal_is_heard_while_nothing_is_to_be_sent(num_layers: int) -> None:
    async with running(World("tcp", idle_timeout_s=0.5)) as world:
        job = counted(world.job(feed=KVReadiness()))
        job.reservation.lease_ms = 500
        job.feed.advance(Ready(20 if num_layers else 4, 20, num_layers))
        push = asyncio.create_task(world.sender.push(job, timeout_s=10))
        await until(lambda: world.receiver.num_connections == 1, "it opens")
        await asyncio.sleep(0.2)
        held = world.delegate.held["r1"]
        held.state = transition(held.state, Cancelled(), time.monotonic())
        with pytest.raises(PushFailed) as raised:
            await push
        assert raised.value.code is grpc.StatusCode.ABORTED and not raised.value.retryable


async def test_who_takes_connections_and_says_nothing_is_asked_last() -> None:
    with nothing_left():
        world = World("tcp")
        world.receiver = Receiver(world.target, world.delegate, world.identity, world.layout, transports=("tcp", "grpc"))
        deaf = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
        async with deaf, running(world):
            sender = world.make_sender(reply_timeout_s=0.5)
            took = []
            for name in ("r1", "r2"):
                job = world.job(name)
                job.reservation.endpoints[0].address = f"127.0.0.1:{deaf.sockets[0].getsockname()[1]}"
                started = time.monotonic()
                assert (await sender.push(job, timeout_s=10)).transport == "grpc"
                took.append(time.monotonic() - started)
            assert took[0] >= 0.5 > took[1]
            await sender.close()


async def test_a_push_that_takes_the_name_of_a_former_one_is_seen_by_quiesce() -> None:
    """The former one lingers over a refusal; when it ends, the new one's name is still known."""
    async with running(World("tcp", idle_timeout_s=30)) as world:
        world.job("r1")
        world.job("r2", start=20)
        name = b"x" * 16
        first, second, other = world.hello("r1"), world.hello("r1"), world.hello("r2")
        first.push_id = second.push_id = other.push_id = name
        second.connection = 1
        async with world.raw_peer(first), world.raw_peer(second) as lingering:
            await lingering.send(part=lingering.header(Part(0, 0, 99, 0, 1)))
            await lingering.stream.read_message()
            await until(lambda: not world.receiver._pushes, "the first connection ends the push")
            async with world.raw_peer(other) as peer:
                part = Part(0, 0, LAYERS, 0, 20)
                body = b"".join(part_views(world.source, part.layers, range(20, 40)))
                await peer.send(part=peer.header(part))
                await peer.send_bytes(body[:1000])
                await until(lambda: world.receiver.num_connections == 1, "the linger ends")
                held = world.delegate.held["r2"]
                held.state = transition(held.state, Cancelled(), time.monotonic())
                await asyncio.wait_for(world.receiver.quiesce("r2"), 5)
                frozen = bytes(world.target.memory())  # the blocks are somebody else's from here on
                with suppress(ConnectionError):
                    await peer.send_bytes(body[1000:])
                await until(lambda: world.receiver.num_connections == 0, "it is closed")
                assert bytes(world.target.memory()) == frozen


async def test_a_layout_that_no_kernel_can_have_is_refused_by_name() -> None:
    identity = make_identity(num_layers=LAYERS, head_dim=16)
    async with running(World("tcp", identity=identity, layout=make_layout(16, arrangement="panels"))) as world:
        world.job("r1")
        hello = world.hello("r1")
        hello.layout.block_size = 8
        async with world.raw_peer() as peer:
            reply = await peer.greet(hello)
        assert reply.code == grpc.StatusCode.FAILED_PRECONDITION.value[0] and "layout.arrangement" in reply.message
        assert world.delegate.kinds() == []  # the reservation's attempt is not used up
