"""Worlds whose pools lie on a device: memory of the host that no transport sees, behind streams that a test drives."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import Any

import torch

from kvtransfer.receiver.receiver import Receiver
from kvtransfer.sender.sender import Sender
from kvtransfer.staging import StagedMemory
from pdmesh.engine.kv_cache.copies import IndexedBlocks
from pdmesh.engine.kv_cache.staging import Marks, Staging, StagingSizes
from pdmesh.engine.kv_cache.streams import Streams
from pdmesh.v1 import common_pb2
from tests.kvtransfer.endpoints import World, nothing_left, running, until
from tests.support.kv_memory import FakeKVMemory
from tests.support.reordering import ReorderingStreams

LAYERS, BLOCKS = 3, 20


class Device:
    """A pool that begins with what lies in `shown`; two pieces each way, of three blocks of a layer."""

    def __init__(self, shown: FakeKVMemory, block_size: int, streams: Streams) -> None:
        self._shown = shown
        raw = torch.frombuffer(bytearray(shown.memory()), dtype=torch.int8)
        self.pool = raw.view(shown.num_layers, 2, shown.num_blocks, block_size, 1, -1)
        sizes = StagingSizes(num_pieces=2, piece_bytes=6 * shown.bytes_per_layer_block)
        self.out, self.back = (Staging(self.pool, streams, sizes, IndexedBlocks()) for _ in range(2))
        self.memory = StagedMemory(shown, self.out, self.back, Marks(streams))

    def show(self) -> None:
        """What the pool holds now is what checks look at."""
        self._shown.memory()[:] = self.pool.numpy().tobytes()

    @property
    def is_whole(self) -> bool:
        return (self.out.num_free, self.back.num_free) == (2, 2)


class StagedWorld:
    """A world whose sender or receiver, or both, have their pools on a device."""

    def __init__(self, world: World, streams: Streams, ends: str = "both") -> None:
        self.world, self.devices = world, list[Device]()
        if ends != "receiver":
            self.source = self._device(world.source, world.source_layout, streams)
            world.sender = Sender(self.source.memory, world.identity, world.source_layout, 7)
        if ends != "sender":
            self.target = self._device(world.target, world.layout, streams)
            settings: dict[str, Any] = {"transports": (world.transport,), "fp8_scales": world.fp8_scales}
            world.receiver = Receiver(self.target.memory, world.delegate, world.identity, world.layout, **settings)

    def _device(self, shown: FakeKVMemory, layout: common_pb2.KVLayout, streams: Streams) -> Device:
        self.devices.append(Device(shown, layout.block_size, streams))
        return self.devices[-1]


@asynccontextmanager
async def staged(
    transport: str, streams: Streams, ends: str = "both", *, world: World | None = None
) -> AsyncIterator[StagedWorld]:
    """It runs; at the end every piece is back, and what lies on the devices can be looked at."""
    with nothing_left():
        both = StagedWorld(world or World(transport), streams, ends)
        async with running(both.world):
            try:
                yield both
            finally:  # whoever ends waits for the device
                with at_work(streams) if isinstance(streams, ReorderingStreams) else nullcontext():
                    await both.world.sender.close()
            await until(lambda: all(device.is_whole for device in both.devices), "all pieces are back")
        for device in both.devices:
            device.memory.close()


@contextmanager
def at_work(streams: ReorderingStreams, seed: int = 0, *, steps: bool = True) -> Iterator[None]:
    """The device does what it is given, in an order of its own; of `seed` 0, copies as soon as they may come. Without `steps` it
    computes nothing."""
    chance, stop = random.Random(seed), threading.Event()

    def choose(count: int) -> int:
        return chance.randrange(count) if seed else count - 1

    def work() -> None:
        while not stop.is_set():
            if not streams.advance(choose, steps=steps):
                time.sleep(0.0005)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def do_all(streams: ReorderingStreams) -> None:
    """All that was given."""
    while streams.advance(lambda count: count - 1):
        pass
