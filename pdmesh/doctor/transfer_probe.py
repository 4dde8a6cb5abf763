"""Measures how fast KV crosses between two processes of this machine, by each transport: the real sender here, the receiver in a
child.

`python -m pdmesh.doctor.transfer_probe 256` prints one line of JSON for each transport: 256 MiB in a push. `receive 512` is the
child, with 512 blocks: it prints a reservation (hex) that any transport it offers may fill, and ends when its standard input
does.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from kvtransfer.errors import PushFailed
from kvtransfer.manifest import PoolShape, bytes_per_layer_block, check_push_token, new_token
from kvtransfer.receiver.push import PushTarget
from kvtransfer.receiver.receiver import Receiver
from kvtransfer.sender.push import PushJob
from kvtransfer.sender.send_queue import FirstTokensDrawn, complete_readiness
from kvtransfer.sender.sender import Sender
from kvtransfer.transports.grpc import SERVICE, add_push_service
from kvtransfer.transports.registry import installed
from pdmesh.platform import linux
from pdmesh.platform.capabilities import MEMFD
from pdmesh.runtime.child import import_path, python_command
from pdmesh.runtime.rpc.server import GrpcServer
from pdmesh.v1 import common_pb2, transfer_pb2

IDENTITY = common_pb2.Identity(model="transfer-probe", num_layers=16, num_kv_heads=8, head_dim=64)
LAYOUT = common_pb2.KVLayout(block_size=16, kv_dtype="bfloat16", tensor_parallel_size=1, arrangement="plain")
BLOCKS_PER_MIB = 2
NUM_PUSHES = 3  # the first one touches the pages; the fastest counts
NUM_TRIES = 5  # of the first push: nixl's agent may take longer to open than a push waits for it
PUSH_TIMEOUT_S = 3.0
START_TIMEOUT_S = 20.0


@dataclass
class Measured:
    """Hold results by name of the transport: bytes per second where it works, the problem where it does not."""

    bytes_per_s: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


async def measure(num_mib: int = 64) -> Measured:
    """Measure for a second or two. Raises TimeoutError or OSError if there is no second process."""
    measured, pool = Measured(), ProbePool(num_mib * BLOCKS_PER_MIB)
    async with _receiving_child(pool.num_blocks) as reservation:
        sender = Sender(pool, IDENTITY, LAYOUT, 1)
        try:
            for transport in installed():
                try:
                    measured.bytes_per_s[transport] = await _fastest(sender, reservation, transport, pool.num_blocks)
                except PushFailed as error:
                    measured.failures[transport] = error.message
        finally:
            await sender.close()
            pool.close()
    return measured


async def _fastest(sender: Sender, reservation: common_pb2.Reservation, transport: str, num_blocks: int) -> float:
    """Return the bytes per second of the best push. Raises PushFailed."""
    for left in reversed(range(NUM_TRIES)):
        try:
            best = await _push(sender, reservation, transport, num_blocks)
            break
        except PushFailed as error:
            if error.code is not grpc.StatusCode.UNAVAILABLE or not left:
                raise
    for _ in range(NUM_PUSHES - 1):
        best = max(best, await _push(sender, reservation, transport, num_blocks))
    return best


async def _push(sender: Sender, reservation: common_pb2.Reservation, transport: str, num_blocks: int) -> float:
    """Return the bytes per second of one push. Raises PushFailed."""
    offered = common_pb2.Reservation()
    offered.CopyFrom(reservation)
    offered.reservation_id = f"{transport}-{secrets.token_hex(4)}"
    del offered.endpoints[:]
    offered.endpoints.extend(each for each in reservation.endpoints if each.transport == transport)
    feed = complete_readiness(IDENTITY.num_layers, num_blocks, FirstTokensDrawn(()))
    job = PushJob(offered, tuple(range(num_blocks)), num_blocks * LAYOUT.block_size, feed)
    result = await sender.push(job, timeout_s=PUSH_TIMEOUT_S)
    return result.num_bytes / result.elapsed_ns * 1e9


@asynccontextmanager
async def _receiving_child(num_blocks: int) -> AsyncIterator[common_pb2.Reservation]:
    pipe = asyncio.subprocess.PIPE
    command = python_command("-m", "pdmesh.doctor.transfer_probe", "receive", str(num_blocks))
    nowhere = asyncio.subprocess.DEVNULL  # the child's log when it is killed is no finding
    child = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=nowhere, env={**os.environ, **import_path()}
    )
    try:
        assert child.stdout is not None
        async with asyncio.timeout(START_TIMEOUT_S):
            line = await child.stdout.readline()
        if not line:
            raise OSError(f"the receiving process ended with {await child.wait()}")
        yield common_pb2.Reservation.FromString(bytes.fromhex(line.decode("ascii")))
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


class ProbePool:
    """Allocate a pool of the shape of IDENTITY and LAYOUT; a sealed memfd, as an engine's is, where the system has them."""

    def __init__(self, num_blocks: int) -> None:
        self.num_layers = IDENTITY.num_layers
        self.num_blocks = num_blocks
        self.bytes_per_layer_block = bytes_per_layer_block(IDENTITY, LAYOUT)
        self.num_planes = 2
        self._shape = PoolShape(self.num_layers, self.num_blocks, self.bytes_per_layer_block)
        self.fd = linux.memfd("pdmesh-probe", self._shape.num_bytes) if MEMFD.is_there else None
        self._map = mmap.mmap(-1 if self.fd is None else self.fd, self._shape.num_bytes)
        if self.fd is not None:
            linux.seal(self.fd)

    def memory(self) -> memoryview:
        return memoryview(self._map)

    def block_view(self, layer: int, plane: int, block_id: int) -> memoryview:
        start = self._shape.offset(layer, plane, block_id)
        return self.memory()[start : start + self.bytes_per_layer_block]

    def close(self) -> None:
        """Release the memory."""
        self._map.close()
        if self.fd is not None:
            os.close(self.fd)


class ProbeDelegate:
    """Let the sender with the token write into all blocks, repeatedly."""

    def __init__(self, epoch: int, token: bytes, num_blocks: int) -> None:
        self._epoch = epoch
        self._token = token
        self._num_blocks = num_blocks

    def open_push(self, hello: transfer_pb2.TransferHello) -> PushTarget:
        check_push_token(hello, epoch=self._epoch, token=self._token, attempt=hello.attempt)
        num_tokens = self._num_blocks * LAYOUT.block_size
        return PushTarget(hello.reservation_id, hello.attempt, tuple(range(self._num_blocks)), 0, num_tokens)

    def push_progress(self, target: PushTarget) -> bool:
        return True

    async def commit_push(
        self, target: PushTarget, commit: transfer_pb2.TransferCommit, *, num_bytes: int, transport: str
    ) -> None:
        """Start nothing."""

    def push_failed(self, target: PushTarget, reason: str) -> None:
        """Ignore the failure: the sender receives it too."""

    def push_finished(self, target: PushTarget) -> None:
        """Release nothing."""


async def _receive(num_blocks: int) -> None:
    reservation = common_pb2.Reservation(epoch=1, attempt=1, token=new_token(), layout=LAYOUT)
    pool = ProbePool(num_blocks)
    delegate = ProbeDelegate(reservation.epoch, reservation.token, num_blocks)
    receiver = Receiver(pool, delegate, IDENTITY, LAYOUT, transports=installed())
    server = GrpcServer("127.0.0.1", 0)
    server.register(add_push_service, receiver, SERVICE)
    await receiver.start()
    await server.start()
    receiver.grpc_address = server.address
    reservation.endpoints.extend(receiver.endpoints())
    print(reservation.SerializeToString().hex(), flush=True)
    await asyncio.to_thread(sys.stdin.buffer.read)
    await receiver.stop()
    await server.drain(0)
    pool.close()


def main(arguments: list[str]) -> None:
    """Run the probe or the child, see the module's docstring."""
    if arguments[0] == "receive":
        asyncio.run(_receive(int(arguments[1])))
        return
    measured = asyncio.run(measure(int(arguments[0])))
    for transport, bytes_per_s in measured.bytes_per_s.items():
        print(json.dumps({"transport": transport, "mib": int(arguments[0]), "gb_per_s": round(bytes_per_s / 1e9, 3)}))
    for transport, why in measured.failures.items():
        print(json.dumps({"transport": transport, "failure": why}))


if __name__ == "__main__":
    main(sys.argv[1:])
