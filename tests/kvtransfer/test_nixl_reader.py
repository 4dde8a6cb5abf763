"""Reads of a peer's pool: every byte in its place, and nothing in the pool from a source that is paused, or dies."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from kvtransfer.manifest import Part, Rectangle, copies, shape_of
from kvtransfer.native.library import address_of
from kvtransfer.reservation import Mode, NewAttempt, transition
from kvtransfer.transports.nixl import reader as nixl_reader
from kvtransfer.transports.nixl.agent import Agent, NixlFailed
from kvtransfer.transports.nixl.reader import NUM_BUFFERS, Pull, Reader, cut, wire_order
from kvtransfer.transports.nixl.transport import NixlTransport
from tests.kvtransfer.endpoints import DEADLINE_S, World, nothing_left, running, until
from tests.support.kv_memory import FakeKVMemory
from tests.support.nixl import NEEDS_NIXL


@pytest.mark.parametrize("num_bytes", [1, 7, 64, 100, 4096])
def test_cut_keeps_every_byte_in_its_place(num_bytes: int) -> None:
    target, source = FakeKVMemory(2, 9, 64), FakeKVMemory(3, 11, 64)
    source.fill(3)
    to, origin = Rectangle(shape_of(target), range(2), [4, 5, 1, 7]), Rectangle(shape_of(source), range(1, 3), [0, 2, 3, 10])
    wire = wire_order(to)
    for reads, writes in zip(cut(copies(wire, origin), num_bytes, 0), cut(copies(to, wire), num_bytes, 1), strict=True):
        buffer = bytearray(num_bytes)
        for place, begin, size in reads.tolist():
            assert size > 0 and place + size <= num_bytes
            buffer[place : place + size] = source.memory()[begin : begin + size]
        for begin, place, size in writes.tolist():
            target.memory()[begin : begin + size] = buffer[place : place + size]
    for block in range(9):
        expected = bytes(4 * 64)
        if block in to.block_ids:
            origin_id = origin.block_ids[list(to.block_ids).index(block)]
            expected = b"".join(source.block_view(layer, kv, origin_id) for layer in (1, 2) for kv in (0, 1))
        assert target.block_bytes(block) == expected
    target.close()
    source.close()


SOURCE = """
import mmap, sys
from kvtransfer.native.library import address_of
from kvtransfer.transports.nixl.agent import Agent
pool = mmap.mmap(-1, int(sys.argv[1]))
pool.write(b"7" * len(pool))
agent = Agent(address_of(memoryview(pool)), len(pool))
print(agent.metadata.hex(), address_of(memoryview(pool)), flush=True)
sys.stdin.read()
"""


@dataclass
class Source:
    """A process with an agent whose pool is full of b"7". Reads of it take UCX's tcp: they need its help."""

    child: "subprocess.Popen[str]"
    metadata: bytes
    address: int

    def stop(self) -> None:
        self.child.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.child.send_signal(signal.SIGCONT)


@contextmanager
def source_process(num_bytes: int) -> Iterator[Source]:
    command = [sys.executable, "-c", SOURCE, str(num_bytes)]
    environment = {**os.environ, "UCX_TLS": "tcp"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as child:
        try:
            assert child.stdout is not None
            metadata, address = child.stdout.readline().split()
            yield Source(child, bytes.fromhex(metadata), int(address))
        finally:
            child.kill()


class Reading:
    """A pull of everything that a source has, stopped when it has begun."""

    def __init__(self, source: Source, memory: FakeKVMemory) -> None:
        self.reader = Reader()
        self.remote = self.reader.reach(source.metadata)
        blocks = Rectangle(shape_of(memory), range(memory.num_layers), range(memory.num_blocks))
        self.pull = Pull(self.reader, self.remote, source.address, blocks, memory, blocks)

    def begin(self, source: Source) -> None:
        """Until bytes have come and no more do."""
        assert self.wait(lambda: self.turn() > 0)
        source.stop()
        assert self.wait(lambda: self.turn() == 0) and self.pull.remaining

    def turn(self) -> int:
        return self.pull.turn(lambda: None)

    def wait(self, condition: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > deadline:
                return False
        return True


@pytest.fixture
def big() -> Iterator[FakeKVMemory]:
    """64 MiB: more than sockets hold."""
    memory = FakeKVMemory(8, 64, 64 << 10)
    yield memory
    memory.close()


@NEEDS_NIXL
def test_a_source_that_is_paused_cannot_write_into_the_pool_later(big: FakeKVMemory) -> None:
    with nothing_left(), source_process(big.num_bytes) as source:
        reading = Reading(source, big)
        reading.begin(source)
        reading.pull.close()
        assert reading.reader.num_free < NUM_BUFFERS  # kept: they are still being read into
        big.memory()[:] = b"x" * big.num_bytes  # the blocks are somebody else's by now
        source.go_on()
        assert reading.wait(lambda: tidied(reading.reader)), "the reads end, their buffers are free"
        assert bytes(big.memory()) == b"x" * big.num_bytes
        reading.reader.leave(reading.remote)
        reading.reader.close()


@NEEDS_NIXL
def test_a_source_that_dies_gives_the_buffers_back(big: FakeKVMemory) -> None:
    with nothing_left(), source_process(big.num_bytes) as source:
        reading = Reading(source, big)
        reading.begin(source)
        source.child.kill()
        with pytest.raises(NixlFailed):
            reading.wait(lambda: reading.turn() < 0)
        reading.pull.close()
        reading.reader.leave(reading.remote)
        assert reading.wait(lambda: tidied(reading.reader)), "the other read fails, too"
        assert reading.reader.num_remotes == 0, "it is disconnected from: a broken connection is not used again"
        reading.reader.close()


@NEEDS_NIXL
def test_a_reader_closes_while_a_read_is_under_way(big: FakeKVMemory) -> None:
    with nothing_left(), source_process(big.num_bytes) as source:
        reading = Reading(source, big)
        reading.begin(source)
        reading.pull.close()
        reading.reader.leave(reading.remote)
        started = time.monotonic()
        reading.reader.close()
        assert time.monotonic() - started < 5


@NEEDS_NIXL
async def test_quiesce_does_not_wait_for_a_paused_source() -> None:
    with nothing_left():
        async with running(World("nixl")) as world:
            with source_process(world.source.num_bytes) as source:
                world.job()
                source.stop()
                hello = world.hello("r1")
                hello.nixl_metadata, hello.pool_address = source.metadata, source.address
                hello.pool_num_blocks = world.source.num_blocks
                async with world.raw_peer() as peer:
                    await peer.send(hello=hello)
                    assert (await peer.stream.read_message()).hello_reply.code == 0
                    header = peer.header(Part(0, 0, 3, 0, 20))
                    header.source_block_ids[:] = range(20)
                    await peer.send(part=header)
                    nixl = world.receiver._transports[0]
                    assert isinstance(nixl, NixlTransport) and nixl._reader is not None
                    reader = nixl._reader
                    await until(lambda: reader.num_free < NUM_BUFFERS, "the read is under way")
                    held = world.delegate.held["r1"]
                    held.state = transition(held.state, NewAttempt(2, Mode.LOCAL), time.monotonic())
                    await asyncio.wait_for(world.receiver.quiesce("r1"), 2)
                    assert bytes(world.target.memory()) == world.before
                    source.go_on()
                    await until(lambda: tidied(reader), "the read ends")
                assert bytes(world.target.memory()) == world.before


def tidied(reader: Reader) -> bool:
    """What is over is given back when somebody comes or goes."""
    with reader._lock:
        reader._tidy()
    return reader.num_free == NUM_BUFFERS


@NEEDS_NIXL
def test_a_remote_is_kept_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, reader = FakeKVMemory(1, 2, 64), Reader()
    agent = Agent(address_of(memory.memory()), memory.num_bytes)
    first = reader.reach(agent.metadata)
    assert reader.reach(agent.metadata) is first
    reader.leave(first)
    reader.leave(first)
    assert reader.num_remotes == 1 and reader.reach(agent.metadata) is first
    monkeypatch.setattr(nixl_reader, "KEEP_S", 0)
    reader.leave(first)
    assert reader.num_remotes == 0
    reader.close()
    agent.close()
    memory.close()


@NEEDS_NIXL
def test_an_idle_agent_costs_no_core() -> None:
    reader = Reader()
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1
    reader.close()


@NEEDS_NIXL
def test_the_package_leaves_logging_as_it_was() -> None:
    assert logging.raiseExceptions and not logging.getLogger("nixl").handlers
