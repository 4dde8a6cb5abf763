"""One end of a hand-off as a process: `python -m benchmarks.handoff.ends receive|send`. A line of JSON each way.

receive   {"reserve": TRANSPORT}      a reservation for all its blocks (hex); the push into it follows
send      {"push": RESERVATION}       pushes all its blocks: seconds, bytes, parts, connections
both      {"cpu": true}               seconds of processor time that it has taken
both      {"checksums": BOOL}         with or without the checksum of the KV, from here on: whether that is possible
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from typing import Any

import torch

from kvtransfer.manifest import PROTOCOL_VERSION
from kvtransfer.native import library
from kvtransfer.receiver.push import PushTarget
from kvtransfer.receiver.receiver import Receiver
from kvtransfer.sender.push import PushJob
from kvtransfer.sender.send_queue import FirstTokensDrawn, complete_readiness
from kvtransfer.sender.sender import Sender
from kvtransfer.transports.grpc import SERVICE, add_push_service
from kvtransfer.transports.registry import installed
from pdmesh.engine.kernels.cpu import build
from pdmesh.engine.kv_cache.pool import KVPool, KVShape
from pdmesh.runtime.rpc.server import GrpcServer
from pdmesh.v1 import common_pb2, transfer_pb2

NUM_BYTES = 256 << 20
EPOCH = 1
PUSH_TIMEOUT_S = 60.0
TOKENS = FirstTokensDrawn((transfer_pb2.CommittedChoice(token_id=1, index=0),))

IDENTITY = common_pb2.Identity(
    model="smollm2-135m-instruct",
    weights_hash="0" * 64,
    num_layers=30,
    num_kv_heads=3,
    head_dim=64,
    numeric_mode="none",
    protocol_version=PROTOCOL_VERSION,
)
LAYOUT = common_pb2.KVLayout(block_size=16, kv_dtype="bfloat16", tensor_parallel_size=1, arrangement="plain")


def make_pool(fill: int, *, shared: bool) -> KVPool:
    """As large as NUM_BYTES allows, every page in memory. `shared`: as a prefill worker's; a decode worker's is not."""
    shape = KVShape(IDENTITY.num_layers, 1, LAYOUT.block_size, IDENTITY.num_kv_heads, IDENTITY.head_dim, torch.bfloat16)
    num_blocks = NUM_BYTES // shape.bytes_per_block
    size = (shape.num_layers, num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
    pool = KVPool(KVShape(*size, shape.dtype), shared=shared)
    pool.tensor.view(torch.uint8).random_(generator=torch.Generator().manual_seed(fill))
    return pool


class Grants:
    """Decode's part: whoever comes may fill all blocks."""

    def __init__(self, pool: KVPool) -> None:
        self._block_ids = tuple(range(pool.num_blocks))
        self.num_tokens = pool.num_blocks * LAYOUT.block_size

    def open_push(self, hello: transfer_pb2.TransferHello) -> PushTarget:
        return PushTarget(hello.reservation_id, hello.attempt, self._block_ids, 0, self.num_tokens)

    def push_progress(self, target: PushTarget) -> bool:
        return True

    async def commit_push(
        self, target: PushTarget, commit: transfer_pb2.TransferCommit, *, num_bytes: int, transport: str
    ) -> None:
        """Nothing to start."""

    def push_failed(self, target: PushTarget, reason: str) -> None:
        print(f"{target.reservation_id}: {reason}", file=sys.stderr)

    def push_finished(self, target: PushTarget) -> None:
        """Never: there is always something to decode."""


class ReceivingEnd:
    """Offers reservations for all of its blocks, and takes what is pushed into them."""

    def __init__(self, receiver: Receiver, layout: common_pb2.KVLayout, lease_ms: int = 5000) -> None:
        self._receiver, self._layout, self._lease_ms = receiver, layout, lease_ms
        self._numbers = itertools.count()

    async def start(self) -> None:
        await self._receiver.start()
        self._server = GrpcServer("127.0.0.1", 0)
        self._server.register(add_push_service, self._receiver, SERVICE)
        await self._server.start()
        self._receiver.grpc_address = self._server.address

    async def close(self) -> None:
        await self._receiver.stop()
        await self._server.drain(0)

    @property
    def transports(self) -> list[str]:
        """Names of those that it offers."""
        return [endpoint.transport for endpoint in self._receiver.endpoints()]

    async def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """A reservation that offers one transport."""
        endpoints = [each for each in self._receiver.endpoints() if each.transport == command["reserve"]]
        name = f"r{next(self._numbers)}"
        reservation = common_pb2.Reservation(
            reservation_id=name, epoch=EPOCH, attempt=1, lease_ms=self._lease_ms, endpoints=endpoints, layout=self._layout
        )
        return {"reservation": reservation.SerializeToString().hex()}


def receiving_end() -> ReceivingEnd:
    """On a pool as a decode worker's."""
    pool = make_pool(1, shared=False)
    return ReceivingEnd(Receiver(pool, Grants(pool), IDENTITY, LAYOUT, transports=installed()), LAYOUT)


class SendingEnd:
    def __init__(self) -> None:
        self._pool = make_pool(2, shared=True)
        self._sender = Sender(self._pool, IDENTITY, LAYOUT, EPOCH + 1)

    async def start(self) -> None:
        """It connects when it pushes."""

    async def close(self) -> None:
        await self._sender.close()

    async def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        reservation = common_pb2.Reservation.FromString(bytes.fromhex(command["push"]))
        num_blocks = self._pool.num_blocks
        feed = complete_readiness(IDENTITY.num_layers, num_blocks, TOKENS)
        job = PushJob(reservation, tuple(range(num_blocks)), num_blocks * LAYOUT.block_size, feed)
        started = time.perf_counter()
        result = await self._sender.push(job, timeout_s=PUSH_TIMEOUT_S)
        return {"seconds": time.perf_counter() - started, "num_bytes": result.num_bytes, "num_parts": result.num_parts}


def set_sums(sums: bool) -> bool:
    """Whether it can be done: without the native library the checksum is part of the way."""
    try:
        loaded = build.load_library(lambda _text: None, project=library.PROJECT)
        library.use(library.Native(loaded, None if sums else "unsummed"))
    except (build.NoCompiler, build.BuildFailed, ValueError):
        return False
    return True


async def answer(end: ReceivingEnd | SendingEnd, command: dict[str, Any]) -> dict[str, Any]:
    """To one line."""
    if "cpu" in command:
        return {"cpu_s": time.process_time()}
    if "checksums" in command:
        return {"done": set_sums(command["checksums"])}
    return await end.answer(command)


async def serve(end: ReceivingEnd | SendingEnd, *, says_transports: bool = False) -> None:
    """A line for each line, until there are no more. `says_transports`: one first, with what a receiving end offers."""
    await end.start()
    if says_transports and isinstance(end, ReceivingEnd):
        print(json.dumps({"transports": end.transports}), flush=True)
    loop = asyncio.get_running_loop()
    try:
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            print(json.dumps(await answer(end, json.loads(line))), flush=True)
    finally:
        await end.close()


def main(role: str) -> None:
    library.prepare()
    asyncio.run(serve(receiving_end() if role == "receive" else SendingEnd()))


def unsummed_worker() -> None:
    """A worker whose KV carries no checksum, for meshes of its own kind: `… ends worker [flags of a worker]` (protection.py)."""
    from pdmesh.worker.main import main as run_worker

    if not set_sums(sums=False):
        raise SystemExit("without the native library the checksum is part of the way and cannot be left out")
    run_worker()


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        del sys.argv[1]
        unsummed_worker()
    else:
        main(*sys.argv[1:])
