"""Which weights a router takes a worker to compute with."""

from __future__ import annotations

import time

import grpc.aio

from pdmesh.v1 import common_pb2, worker_pb2
from router.fleet.decode_stream import StreamSettings
from router.fleet.incarnation import Incarnation
from router.fleet.worker import Worker


async def test_a_report_made_before_a_change_does_not_undo_it() -> None:
    """It may come after the answer to UpdateWeights: the two come by streams of their own."""
    told = list[str]()
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        worker = Worker(
            "w:1",
            channel,
            StreamSettings("r"),
            report_period_ms=200,
            static=True,
            on_change=lambda: None,
            on_view=lambda: None,
            on_weights=lambda: told.append(weights_of(worker)),
        )
        info = worker_pb2.WorkerInfo(epoch=7, identity=common_pb2.Identity(model="m", weights_hash="first"))
        worker._up(Incarnation(info, worker_pb2.LoadReport(epoch=7), time.monotonic()))
        worker._report(worker_pb2.LoadReport(epoch=7, weights_hash="second"))
        worker.has_weights("third")
        worker._report(worker_pb2.LoadReport(epoch=7, weights_hash="second"))
        assert weights_of(worker) == "third" and told == ["second", "third"]
        assert worker.current is not None
        worker.current.former_weights = ("second", time.monotonic() - 1.0)
        worker._report(worker_pb2.LoadReport(epoch=7, weights_hash="second"))
        assert told == ["second", "third", "second"], "what it goes on to say is true"


def weights_of(worker: Worker) -> str:
    assert worker.current is not None
    return worker.current.info.identity.weights_hash
