"""One end of a transfer as a process of its own: `python -m tests.kvtransfer.transfer_process receive|send TRANSPORT`.

receive prints {"reservation": ...} (hex), takes one push, prints {"sum": CRC-32C of the blocks that arrived, "events": ...} and
serves until its standard input ends: a receiver that ends as soon as it has everything takes the sender's answer with it.
send reads a reservation (hex) from its first argument behind the transport, pushes once and prints {"outcome": ...}.
"""

import asyncio
import json
import sys

from kvtransfer.errors import PushFailed
from kvtransfer.framing import checksum
from kvtransfer.sender.sender import PushJob
from pdmesh.v1 import common_pb2
from tests.kvtransfer.endpoints import World, running, until

NUM_BLOCKS = 200
NUM_LAYERS = 12
START_S = 30  # of the other process, with torch


def make_world(transport: str) -> World:
    """The same on both sides: fixed seeds fill the pools."""
    return World(transport, num_layers=NUM_LAYERS, num_blocks=NUM_BLOCKS, part_bytes=1 << 16)


def sum_of(world: World, *, target: bool, job: PushJob) -> int:
    """CRC-32C of the request's blocks at one end."""
    ids = world.delegate.held["r1"].block_ids if target else job.source_block_ids
    memory, seen = (world.target, world.seen_target) if target else (world.source, world.seen_source)
    if world.variant == "gpu":
        seen.show()  # type: ignore[attr-defined]
    return checksum(memory.block_bytes(block_id) for block_id in ids)


async def receive(transport: str) -> None:
    async with running(make_world(transport)) as world:
        job = world.job(num_blocks=NUM_BLOCKS)
        _say(reservation=job.reservation.SerializeToString().hex(), expected=sum_of(world, target=False, job=job))
        await until(lambda: len(world.delegate.events) == 2, "a push", START_S)
        _say(sum=sum_of(world, target=True, job=job), events=world.delegate.kinds())
        await asyncio.to_thread(sys.stdin.read)


async def send(transport: str, reservation: str) -> None:
    async with running(make_world(transport)) as world:
        job = world.job(num_blocks=NUM_BLOCKS)
        job.reservation.CopyFrom(common_pb2.Reservation.FromString(bytes.fromhex(reservation)))
        try:
            result = await world.sender.push(job, timeout_s=20)
            _say(outcome=result.transport, num_bytes=result.num_bytes)
        except PushFailed as error:
            _say(outcome=error.code.name, retryable=error.retryable)


def _say(**what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    asyncio.run(receive(*arguments) if role == "receive" else send(*arguments))
