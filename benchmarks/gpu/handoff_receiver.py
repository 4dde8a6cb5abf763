"""The receiving end of the measured hand-off as a process: `python -m benchmarks.gpu.handoff_receiver ENDS`.

A line of JSON each way:

    says first         {"transports": [NAME, ...]}   that it offers
    {"reserve": NAME}  a reservation for all its blocks (hex); the push into it follows
    {"sums": true}     what lies in its pool
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from typing import Any

from benchmarks.gpu.handoff_ends import Ends, fingerprint, one_launch_at_a_time
from benchmarks.gpu.part import prepare_interpreter
from benchmarks.handoff.ends import EPOCH, Grants
from kvtransfer.native import library as native_library
from kvtransfer.receiver.receiver import Receiver
from kvtransfer.staging import StagedMemory
from kvtransfer.transports.grpc import SERVICE, add_push_service
from kvtransfer.transports.registry import TRANSPORTS
from pdmesh.engine.kv_cache.pool import KVPool
from pdmesh.engine.kv_cache.staging import Marks, Staging, StagingSizes
from pdmesh.engine.kv_cache.streams import streams_of
from pdmesh.runtime.rpc.server import GrpcServer
from pdmesh.v1 import common_pb2
from pdmesh.worker.kv_memory import sharing_for, shown_to_others

LEASE_S = 60  # a step takes as long as it takes in Triton's interpreter


class ReceivingEnd:
    """A pool on the device, staged as a decode worker's."""

    def __init__(self, ends: Ends) -> None:
        self._ends = ends
        self._pool = KVPool(ends.shape, ends.device, shared=False)
        self._memory = _staged(ends, self._pool)
        self._receiver = Receiver(
            self._memory, Grants(self._pool), ends.identity, ends.layout, transports=TRANSPORTS, idle_timeout_s=LEASE_S
        )
        self._numbers = itertools.count()

    async def start(self) -> list[str]:
        """Names of the transports that it offers."""
        await self._receiver.start()
        self._server = GrpcServer("127.0.0.1", 0)
        self._server.register(add_push_service, self._receiver, SERVICE)
        await self._server.start()
        self._receiver.grpc_address = self._server.address
        return [endpoint.transport for endpoint in self._receiver.endpoints()]

    async def close(self) -> None:
        await self._receiver.stop()
        await self._server.drain(0)
        self._memory.close()
        self._pool.close()

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        if "sums" in command:
            return {"sums": fingerprint(self._pool, list(range(self._pool.num_blocks)))}
        endpoints = [each for each in self._receiver.endpoints() if each.transport == command["reserve"]]
        reservation = common_pb2.Reservation(
            reservation_id=f"r{next(self._numbers)}",
            epoch=EPOCH,
            attempt=1,
            lease_ms=LEASE_S * 1000,
            endpoints=endpoints,
            layout=self._ends.layout,
        )
        return {"reservation": reservation.SerializeToString().hex()}


def _staged(ends: Ends, pool: KVPool) -> StagedMemory:
    streams = streams_of(pool.tensor.device)
    nothing = StagingSizes(1, 2 * ends.shape.bytes_per_layer_block)  # it sends none
    out, back = (Staging(pool.tensor, streams, sizes) for sizes in (nothing, ends.sizes()[1]))
    back.warm()
    shown = shown_to_others(pool.tensor, streams, sharing_for(pool.tensor.device))
    return StagedMemory(pool, out, back, Marks(streams), shown)


async def serve(ends: Ends) -> None:
    end = ReceivingEnd(ends)
    print(json.dumps({"transports": await end.start()}), flush=True)
    loop = asyncio.get_running_loop()
    try:
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            print(json.dumps(end.answer(json.loads(line))), flush=True)
    finally:
        await end.close()


def main(ends: Ends) -> None:
    if ends.device == "cpu":
        prepare_interpreter()
        one_launch_at_a_time()
    native_library.prepare()
    asyncio.run(serve(ends))


if __name__ == "__main__":
    main(Ends.from_json(sys.argv[1]))
