"""A process that stands in for a worker or a router: `python -m tests.pdmesh.fake_service worker|router|broken|silent`.

Workers claim the address "127.0.0.1:1"; the router answers GetStatus with the workers named by `--workers`, alive.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from typing import Any

import grpc.aio

from pdmesh.v1 import mesh_pb2, worker_pb2
from pdmesh.v1.mesh_pb2_grpc import MeshServicer, add_MeshServicer_to_server

WORKER_ADDRESS = "127.0.0.1:1"


class StatusOnly(MeshServicer):
    Embed = LoadAdapter = UnloadAdapter = ListAdapters = ReleaseSession = UpdateWeights = None  # type: ignore[assignment]
    SetTrafficSplit = SetServing = SendWeights = None  # type: ignore[assignment]

    def __init__(self, workers: list[str]) -> None:
        self.workers = workers

    Explain = None  # type: ignore[assignment]

    async def GetStatus(
        self, request: mesh_pb2.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> mesh_pb2.GetStatusResponse:
        infos = [worker_pb2.WorkerInfo(worker_id=name, address=WORKER_ADDRESS) for name in self.workers]
        return mesh_pb2.GetStatusResponse(workers=[mesh_pb2.WorkerStatus(info=info, alive=True) for info in infos])

    Generate = Chat = Tokenize = ListModels = None  # type: ignore[assignment]


async def main(kind: str, workers: list[str]) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    address = WORKER_ADDRESS
    server = grpc.aio.server()
    if kind == "broken":
        print("the model does not fit: 12 GB needed", file=sys.stderr)
        raise SystemExit(3)
    if kind == "router":
        add_MeshServicer_to_server(StatusOnly(workers), server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
    print(json.dumps({"progress": "loading"}), flush=True)
    print(f"{kind} says hello", file=sys.stderr, flush=True)
    if kind != "silent":
        print(json.dumps({"ready": True, "address": address}), flush=True)
    await stopped.wait()
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:]))
