"""Two ends of a transfer in one process: pools, a delegate with the real state machine, and a raw peer that may misbehave."""

import asyncio
import itertools
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field

import grpc

from kvtransfer.conversion import FP8Scales
from kvtransfer.errors import TransferRefused
from kvtransfer.manifest import PROTOCOL_VERSION, KVMemory, Part, check_push_token, new_token, part_views, unknown_reservation
from kvtransfer.receiver.push import PushTarget
from kvtransfer.receiver.receiver import Receiver
from kvtransfer.reservation import (
    AttemptFailed,
    Committed,
    Finished,
    InvalidTransition,
    Mode,
    PushOpened,
    ReservationState,
    reserved,
    transition,
)
from kvtransfer.sender.send_queue import FirstTokensDrawn, KVReadiness, complete_readiness
from kvtransfer.sender.sender import PushJob, Sender
from kvtransfer.staging import StagedMemory
from kvtransfer.stream import expect
from kvtransfer.transports.base import DeviceReadSource, Outgoing
from kvtransfer.transports.grpc import SERVICE, PushService, add_push_service
from kvtransfer.transports.registry import transports_with
from pdmesh.runtime.rpc.mesh_secret import MeshSecret
from pdmesh.runtime.rpc.server import GrpcServer
from pdmesh.runtime.rpc.tls import Tls
from pdmesh.v1 import common_pb2, transfer_pb2
from tests.support.certificates import mesh_secret, mesh_tls
from tests.support.kv_memory import FakeKVMemory, make_identity, make_layout, make_memory

EPOCH = 0xE0
DEADLINE_S = 10.0
CHOICES = (transfer_pb2.CommittedChoice(token_id=42, index=1),)


@dataclass
class Held:
    """A reservation of FakeDelegate."""

    state: ReservationState
    token: bytes
    block_ids: tuple[int, ...]
    first_block: int
    num_tokens: int


@dataclass
class FakeDelegate:
    """Decode's part in a transfer. `events` lists what happened; hooks let a test act in the middle."""

    held: dict[str, Held] = field(default_factory=dict)
    events: list[tuple[str, str]] = field(default_factory=list)
    commits: list[tuple[transfer_pb2.TransferCommit, int, str]] = field(default_factory=list)
    on_progress: Callable[[PushTarget], None] = lambda target: None
    on_commit: Callable[[PushTarget], None] = lambda target: None

    def open_push(self, hello: transfer_pb2.TransferHello) -> PushTarget:
        held = self.held.get(hello.reservation_id)
        if held is None:
            raise unknown_reservation(hello.reservation_id)
        check_push_token(hello, epoch=EPOCH, token=held.token, attempt=held.state.attempt)
        try:
            held.state = transition(held.state, PushOpened(hello.attempt), time.monotonic())
        except InvalidTransition as error:
            raise TransferRefused(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from error
        self.events.append(("open", hello.reservation_id))
        return PushTarget(hello.reservation_id, hello.attempt, held.block_ids, held.first_block, held.num_tokens)

    def push_progress(self, target: PushTarget) -> bool:
        self.on_progress(target)
        return self.held[target.reservation_id].state.accepts_bytes(target.attempt)

    async def commit_push(
        self, target: PushTarget, commit: transfer_pb2.TransferCommit, *, num_bytes: int, transport: str
    ) -> None:
        self.on_commit(target)
        held = self.held[target.reservation_id]
        held.state = transition(held.state, Committed(target.attempt), time.monotonic())
        self.commits.append((commit, num_bytes, transport))
        self.events.append(("commit", target.reservation_id))

    def push_failed(self, target: PushTarget, reason: str) -> None:
        held = self.held[target.reservation_id]
        held.state = transition(held.state, AttemptFailed(target.attempt, reason), time.monotonic())
        self.events.append(("failed", reason))

    def push_finished(self, target: PushTarget) -> None:
        held = self.held[target.reservation_id]
        held.state = transition(held.state, Finished(), time.monotonic())
        self.events.append(("finished", target.reservation_id))

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]


class World:
    """A receiver and a sender over one transport ("tcp+tls", "grpc+tls": encrypted; "tcp+secret",
    "grpc+secret": in a mesh with a secret; "cuda_ipc+gpu", "nixl+gpu": on a real GPU;
    "nixl+device": as on one), on pools of different sizes."""

    def __init__(
        self,
        transport: str,
        *,
        num_layers: int = 3,
        num_blocks: int = 64,
        part_bytes: int = 4096,
        idle_timeout_s: float = 5.0,
        identity: common_pb2.Identity | None = None,
        layout: common_pb2.KVLayout | None = None,
        source_layout: common_pb2.KVLayout | None = None,
        tls: Tls | None = None,
        secret: MeshSecret | None = None,
        fp8_scales: FP8Scales = (),
    ) -> None:
        """`layout` is the receiver's, `source_layout` the sender's: the same unless given."""
        self.transport, _, self.variant = transport.partition("+")
        self.tls = mesh_tls() if self.variant == "tls" else tls
        self.secret = mesh_secret() if self.variant == "secret" else secret
        self.transports = transports_with(self.tls, self.secret)
        self.fp8_scales = fp8_scales
        self.identity = identity or make_identity(num_layers=num_layers)
        self.layout = layout or make_layout()
        self.source_layout = source_layout or self.layout
        self.source = make_memory(self.identity, self.source_layout, num_blocks)
        self.target = make_memory(self.identity, self.layout, num_blocks + 5)
        self.source.fill(1)
        self.target.fill(2)
        self.before = bytes(self.target.memory())
        self.seen_source, self.seen_target = self._seen()
        self.delegate = FakeDelegate()
        self.receiver = Receiver(
            self.seen_target,
            self.delegate,
            self.identity,
            self.layout,
            transports=(self.transport,),
            idle_timeout_s=idle_timeout_s,
            tls=self.tls,
            secret=self.secret,
            fp8_scales=fp8_scales,
        )
        self.sender = self.make_sender(part_bytes=part_bytes)

    def _seen(self) -> tuple[KVMemory, KVMemory]:
        """The pools as the ends see them: over cuda_ipc, and nixl+device, as those of a device."""
        if self.variant == "gpu":
            from tests.support.gpu_memory import GpuMemory

            return GpuMemory(self.source, self.source_layout.block_size), GpuMemory(self.target, self.layout.block_size)
        if self.transport != "cuda_ipc" and self.variant != "device":
            return self.source, self.target
        from tests.support.host_sharing import staged  # torch, for which other transports have no need

        return staged(self.source, self.source_layout.block_size), staged(self.target, self.layout.block_size)

    def make_sender(
        self,
        *,
        memory: KVMemory | None = None,
        part_bytes: int = 4096,
        reply_timeout_s: float = 5.0,
        num_connections: int = 1,
    ) -> Sender:
        return Sender(
            memory or self.seen_source,
            self.identity,
            self.source_layout,
            7,
            reply_timeout_s=reply_timeout_s,
            part_bytes=part_bytes,
            num_connections=num_connections,
            tls=self.tls,
            secret=self.secret,
        )

    def job(
        self,
        name: str = "r1",
        *,
        num_blocks: int = 20,
        first_block: int = 0,
        start: int = 0,
        spread: bool = False,
        feed: KVReadiness | None = None,
    ) -> PushJob:
        """A reservation of `num_blocks` blocks on the receiver, and the push that fills it. The last block is filled in part."""
        num_tokens = num_blocks * self.layout.block_size - 3
        blocks = range(start, start + num_blocks)
        target_ids = tuple(reversed(blocks)) if spread else tuple(block + 3 for block in blocks)
        ids = range(start, start - (-num_tokens // self.source_layout.block_size))
        held = Held(reserved(1, Mode.REMOTE, time.monotonic(), 5.0), new_token(), target_ids, first_block, num_tokens)
        self.delegate.held[name] = held
        feed = feed or complete_readiness(self.source.num_layers, len(ids), FirstTokensDrawn(CHOICES))
        return PushJob(self.reservation(name), tuple(ids), num_tokens, feed)

    def reservation(self, name: str) -> common_pb2.Reservation:
        held = self.delegate.held[name]
        return common_pb2.Reservation(
            reservation_id=name,
            epoch=EPOCH,
            attempt=held.state.attempt,
            lease_ms=5000,
            token=held.token,
            endpoints=self.receiver.endpoints(),
            num_cached_tokens=held.first_block * self.layout.block_size,
            layout=self.layout,
        )

    def hello(self, name: str) -> transfer_pb2.TransferHello:
        held = self.delegate.held[name]
        return transfer_pb2.TransferHello(
            protocol_version=PROTOCOL_VERSION,
            push_id=os.urandom(16),
            reservation_id=name,
            epoch=EPOCH,
            attempt=held.state.attempt,
            token=held.token,
            identity=self.identity,
            layout=self.source_layout,
        )

    def check_arrived(self, job: PushJob) -> None:
        """The pushed blocks are equal, and no other byte of the receiver's pool has changed."""
        held = self.delegate.held[job.reservation.reservation_id]
        pairs = list(zip(job.source_block_ids, held.block_ids, strict=True))[held.first_block :]
        for source_id, target_id in pairs:
            assert self.source.block_bytes(source_id) == self.target.block_bytes(target_id)
        self.check_untouched(set(range(self.target.num_blocks)) - {target_id for _, target_id in pairs})

    def check_untouched(self, block_ids: set[int]) -> None:
        original = make_memory(self.identity, self.layout, self.target.num_blocks)
        original.memory()[:] = self.before
        for block_id in block_ids:
            assert original.block_bytes(block_id) == self.target.block_bytes(block_id)
        original.close()

    @asynccontextmanager
    async def raw_peer(
        self, hello: transfer_pb2.TransferHello | None = None, *, source: FakeKVMemory | None = None
    ) -> AsyncIterator["RawPeer"]:
        """A connection of a sender that does as the test says; greeted already if `hello` is given."""
        seen, source = source or self.seen_source, source or self.source
        endpoint = self.receiver.endpoints()[0]
        with ThreadPoolExecutor(1) as executor:
            outgoing = await self.transports[self.transport].connect(endpoint, seen, executor, DEADLINE_S)
            peer = RawPeer(outgoing, source, seen)
            try:
                await peer.stream.open()
                if hello is not None:
                    assert (await peer.greet(hello)).code == 0
                yield peer
            finally:
                outgoing.stream.close()
                await outgoing.stream.wait_closed()


class RawPeer:
    """A sender without manners."""

    def __init__(self, outgoing: Outgoing, source: FakeKVMemory, seen: KVMemory) -> None:
        self.outgoing, self._seen = outgoing, seen
        self.stream = outgoing.stream
        self._source = source

    async def greet(self, hello: transfer_pb2.TransferHello) -> transfer_pb2.TransferReply:
        await self.outgoing.send_hello(hello)
        return (await expect(self.stream, "hello_reply")).hello_reply

    def header(self, part: Part) -> transfer_pb2.PartHeader:
        return transfer_pb2.PartHeader(
            part_id=part.part_id,
            layer_start=part.layer_start,
            layer_end=part.layer_end,
            block_start=part.block_start,
            block_end=part.block_end,
            num_bytes=part.num_bytes(self._source.bytes_per_layer_block),
        )

    async def send_part(self, part: Part, source_ids: list[int], **changes: int) -> transfer_pb2.TransferMessage:
        """Send a part, its header or its end changed, and return the answer."""
        header, end = self.header(part), transfer_pb2.PartEnd(part_id=part.part_id)
        for name, value in changes.items():
            setattr(end if name == "crc32c" else header, name, value)
        views = part_views(self._source, part.layers, source_ids)
        if isinstance(self.outgoing, DeviceReadSource):
            assert isinstance(self._seen, StagedMemory), "of a device"
            await self.outgoing.settle(part.layers, source_ids, self._seen.marks.behind(part.layer_end), self.send_nothing)
        total = await self.outgoing.send_part(header, views, source_ids, lambda _count: None)
        end.crc32c, end.word_sum = end.crc32c or total % 2**32, end.crc32c or total
        with suppress(ConnectionError):  # refused by its header: the answer lies there
            await self.send(part_end=end)
        return await self.stream.read_message()

    async def send_nothing(self) -> None:
        """There is no hurry."""

    async def send(self, **message: object) -> None:
        await self.stream.write_message(transfer_pb2.TransferMessage(**message))  # type: ignore[arg-type]

    async def send_bytes(self, data: bytes) -> None:
        await self.stream.write_bytes(data)

    async def verdict(self) -> tuple[grpc.StatusCode, str]:
        """The refusal that ends the session."""
        reply = (await expect(self.stream, "commit_reply")).commit_reply
        return next(code for code in grpc.StatusCode if code.value[0] == reply.code), reply.message


def at_part(number: int, act: Callable[[], object]) -> Callable[[PushTarget], None]:
    """A hook for FakeDelegate.on_progress that acts before part `number` (from 1)."""
    calls = itertools.count(1)

    def hook(target: PushTarget) -> None:
        if next(calls) == number:
            act()

    return hook


async def until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Wait for `condition`, at most so long."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {deadline_s} s: {what}"
        await asyncio.sleep(0.005)


@contextmanager
def nothing_left() -> Iterator[None]:
    """File descriptors and threads are back to where they were. gRPC's own pollers may stay."""
    before = _descriptors()
    threads = set(threading.enumerate())
    yield
    deadline = time.monotonic() + DEADLINE_S
    while len(_descriptors()) > len(before) or set(threading.enumerate()) - threads:
        assert time.monotonic() < deadline, f"left: {_descriptors()} (were {before}), {set(threading.enumerate()) - threads}"
        time.sleep(0.005)


def _descriptors() -> list[str]:
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the one of listdir itself
            continue
        if link not in ("anon_inode:[eventfd]", "anon_inode:[eventpoll]"):
            links.append(link)
    return sorted(links)


@asynccontextmanager
async def running(world: World) -> AsyncIterator[World]:
    """Start the receiver; stop everything afterwards. No view of either pool may be left then: close() would raise."""
    await world.receiver.start()
    try:
        async with grpc_server(world.receiver, world.tls, world.secret) as world.receiver.grpc_address:
            try:
                yield world
            finally:
                await world.sender.close()
                await world.receiver.stop()
    finally:
        assert world.receiver.num_connections == 0
        for transport in world.transports.values():
            transport.close()
        for seen in (world.seen_source, world.seen_target):
            if isinstance(seen, StagedMemory):
                seen.close()
        world.source.close()
        world.target.close()


@asynccontextmanager
async def grpc_server(
    service: PushService, tls: Tls | None = None, secret: MeshSecret | None = None
) -> AsyncIterator[str | None]:
    """A worker's gRPC server; yields its address. None: the receiver takes no calls."""
    if isinstance(service, Receiver) and not service.takes_calls:
        yield None
        return
    server = GrpcServer("127.0.0.1", 0, tls=tls, secret=secret)
    server.register(add_push_service, service, SERVICE)
    await server.start()
    try:
        yield server.address
    finally:
        await server.drain(0)
