"""Which weights and adapters a router takes a worker to compute with."""

from __future__ import annotations

import time
from collections.abc import Callable

import grpc.aio
import pytest

from pdmesh.v1 import common_pb2, worker_pb2
from router.fleet.decode_stream import StreamSettings
from router.fleet.incarnation import Incarnation
from router.fleet.worker import Worker


async def test_a_report_made_before_a_change_does_not_undo_it() -> None:
    """It may come after the answer to UpdateWeights: the two come by streams of their own."""
    told = list[str]()
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        worker = worker_on(channel, lambda: told.append(weights_of(worker)))
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


async def test_a_report_made_before_an_adapter_came_or_went_does_not_undo_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that was answered would else be said to have failed, and the worker be left out until its next report."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    first, second = (common_pb2.AdapterInfo(name=name, digest=name) for name in ("first", "second"))

    def say(*adapters: common_pb2.AdapterInfo) -> list[str]:
        worker._report(worker_pb2.LoadReport(epoch=7, adapters=adapters))
        assert worker.current is not None
        return sorted(each.name for each in worker.current.adapters)

    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        worker = worker_on(channel)
        worker._up(Incarnation(worker_pb2.WorkerInfo(epoch=7), worker_pb2.LoadReport(epoch=7), now))
        assert say(first) == ["first"]
        worker.told_adapter(second)
        assert say(first) == ["first", "second"]
        worker.forget_adapter("first")
        assert say(first) == ["second"] == say(first, second)
        now += 1.0
        assert say(first) == ["first"], "what it goes on to say is true"


def worker_on(channel: grpc.aio.Channel, on_weights: Callable[[], None] = lambda: None) -> Worker:
    return Worker(
        "w:1", channel, StreamSettings("r"), report_period_ms=200, static=True, on_change=lambda: None, on_view=lambda: None,
        on_weights=on_weights,
    )  # fmt: skip
