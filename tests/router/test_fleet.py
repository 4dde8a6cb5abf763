"""What the router knows of workers: streams are the truth, the registry only says where to look."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pdmesh.runtime.rpc.channel import Channels
from pdmesh.runtime.rpc.server import GrpcServer
from pdmesh.runtime.rpc.tls import Tls
from pdmesh.v1 import worker_pb2
from router.fleet import registry
from router.fleet.decode_stream import StreamSettings, is_refused
from router.fleet.registry import FleetRegistry
from router.fleet.worker import Dispatched
from tests.router.stub_workers import DECODE, PREFILL, StubWorker
from tests.support.certificates import copied, new_authority
from tests.support.waiting import eventually

SETTINGS = StreamSettings("r", heartbeat_ms=50, stream_timeout_s=0.5, grace_s=0.5)


@asynccontextmanager
async def running_fleet(
    *static: str, forget_s: float = 60.0, settings: StreamSettings = SETTINGS
) -> AsyncIterator[FleetRegistry]:
    channels = Channels()
    fleet = FleetRegistry(settings, channels, report_period_ms=50, forget_s=forget_s)
    fleet.start(static)
    yield fleet
    await fleet.stop()
    await channels.close()


async def test_an_empty_registry_takes_nobody_away() -> None:
    worker = await StubWorker("d0", (DECODE,)).start()
    async with running_fleet(forget_s=0.001) as fleet:
        fleet.on_registry([worker.info()])
        await eventually(fleet.ready)
        fleet.on_registry([])
        await fleet.forget_lost(time.monotonic() + 100)
        assert fleet.ready()
        await worker.kill()
        await eventually(lambda: not fleet.views())
        await fleet.forget_lost(time.monotonic() + 100)
        assert not fleet.workers


async def test_a_worker_that_is_registered_again_while_it_is_dropped_is_watched() -> None:
    worker = await StubWorker("d0", (DECODE,)).start()
    await worker.kill()
    async with running_fleet(forget_s=0.0) as fleet:
        fleet.on_registry([worker_pb2.WorkerInfo(address=worker.address)])
        fleet.on_registry([])
        dropping = asyncio.create_task(fleet.forget_lost(time.monotonic() + 100))
        await asyncio.sleep(0)
        assert not fleet.workers
        assert not dropping.done()
        fleet.on_registry([worker_pb2.WorkerInfo(address=worker.address)])
        await dropping
        again = await StubWorker("d0", (DECODE,), port=worker.port).start()
        await eventually(fleet.ready)
        await again.kill()


async def test_sweeping_goes_on_after_an_exception(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(registry, "SWEEP_PERIOD_S", 0.01)
    rounds = list[float]()

    async def fail(now: float) -> None:
        rounds.append(now)
        raise RuntimeError("broken")

    async with running_fleet() as fleet:
        fleet.forget_lost = fail  # type: ignore[method-assign]
        await eventually(lambda: len(rounds) > 2)
    assert "sweeping lost workers failed" in caplog.text


async def test_a_static_peer_is_never_forgotten() -> None:
    worker = await StubWorker("d0", (DECODE,)).start()
    async with running_fleet(worker.address) as fleet:
        await eventually(fleet.ready)
        await worker.kill()
        await eventually(lambda: not fleet.views())
        await fleet.forget_lost(time.monotonic() + 1000)
        again = await StubWorker("d0", (DECODE,), port=worker.port).start()
        await eventually(fleet.ready)
        assert fleet.workers[worker.address].current is not None
        assert {view.epoch for view in fleet.views()} == {again.epoch}
        await again.kill()


async def test_a_worker_that_came_back_elsewhere_replaces_its_former_self() -> None:
    former = await StubWorker("d0", (DECODE,)).start()
    other = await StubWorker("d1", (DECODE,)).start()
    async with running_fleet() as fleet:
        fleet.on_registry([former.info(), other.info()])
        await eventually(lambda: len(fleet.views()) == 2)
        await former.kill()
        await other.kill()
        successor = await StubWorker("d0", (DECODE,)).start()
        fleet.on_registry([successor.info()])
        await eventually(lambda: fleet.workers[successor.address].current is not None)
        await eventually(lambda: len(fleet.views()) == 1)  # both losses are noticed
        await fleet.forget_lost(time.monotonic())
        assert fleet.workers.keys() == {successor.address, other.address}  # d1 may yet come back
        await successor.kill()


async def test_a_silent_worker_is_lost_and_found_again() -> None:
    worker = await StubWorker("p0", (PREFILL,)).start()
    async with running_fleet(worker.address) as fleet:
        await eventually(fleet.views)
        incarnation = fleet.workers[worker.address].current
        assert incarnation is not None
        worker.watch_mute = True
        await asyncio.wait_for(incarnation.lost.wait(), 10)
        assert not fleet.views()
        worker.watch_mute = False
        await eventually(fleet.views)
        await worker.kill()


async def test_roles_change_while_running() -> None:
    worker = await StubWorker("w", (PREFILL,)).start()
    async with running_fleet(worker.address) as fleet:
        await eventually(lambda: [view.prefill for view in fleet.views()] == [True])
        assert not fleet.ready()
        worker.roles = (DECODE,)
        await eventually(fleet.ready)
        assert [view.prefill for view in fleet.views()] == [False]
        await worker.kill()


async def test_draining_worker_takes_nothing_new() -> None:
    worker = await StubWorker("d0", (DECODE,)).start()
    async with running_fleet(worker.address) as fleet:
        await eventually(fleet.ready)
        load = worker.load()
        load.draining = True
        worker.load = lambda: load  # type: ignore[method-assign]
        await eventually(lambda: not fleet.ready())
        assert fleet.workers[worker.address].current is not None
        await worker.kill()


async def test_a_heartbeat_makes_no_snapshot_where_only_readiness_is_asked() -> None:
    worker, other = await StubWorker("d0", (DECODE,)).start(), await StubWorker("d1", (DECODE,)).start()
    async with running_fleet(worker.address, other.address) as fleet:
        await eventually(lambda: len([view for view in fleet.views() if view.decode]) == 2 and fleet.ready())
        first = fleet.workers[worker.address]
        before, current = fleet._fleet_snapshot.get(worker.address), first.current
        assert before is not None and current is not None
        reported_at = current.reported_at
        await eventually(lambda: fleet.ready() and current.reported_at != reported_at)
        assert fleet._fleet_snapshot.get(worker.address) is before
        await worker.kill()
        await eventually(lambda: first.current is None)
        assert fleet.ready()  # the other still takes requests
        await other.kill()
        await eventually(lambda: not fleet.ready())


async def test_dispatches_count_until_the_second_report() -> None:
    worker = await StubWorker("p0", (PREFILL,)).start()
    async with running_fleet(worker.address) as fleet:
        await eventually(fleet.views)
        known = fleet.workers[worker.address]
        known.dispatched(Dispatched(1, 10, 160))
        (view,) = fleet.views()
        assert (view.dispatched_seqs, view.dispatched_blocks, view.tokens_ahead) == (1, 10, 160)
        await eventually(lambda: fleet.views()[0].dispatched_tokens == 0)
        await worker.kill()


async def test_a_dispatch_that_no_report_contains_has_a_pace_already() -> None:
    worker = await StubWorker("d0", (DECODE,)).start()
    load = worker.load()
    load.age_ms = 60_000  # a step that takes long: what is sent meanwhile is in no figures
    worker.load = lambda: load  # type: ignore[method-assign]
    async with running_fleet(worker.address) as fleet:
        await eventually(fleet.ready)
        known = fleet.workers[worker.address]
        known.dispatched(Dispatched(1, 10, 160, decodes=1, context=160, pace_s=0.04))
        known.dispatched(first := Dispatched(1, 10, 160, decodes=1, context=160, pace_s=0.02))
        known.dispatched(Dispatched(1, 10, 160, decodes=1, context=160))
        assert fleet.views()[0].pace_s == 0.02
        seen = worker.num_watches
        known.done(first)
        assert fleet.views()[0].pace_s == 0.04
        load.pace_s = 0.03
        await eventually(lambda: fleet.views()[0].pace_s == 0.03)
        assert fleet.views()[0].dispatched_seqs == 2 and worker.num_watches == seen
        await worker.kill()


async def test_a_dispatch_ends_with_the_workers_answer() -> None:
    worker = await StubWorker("p0", (PREFILL,)).start()
    async with running_fleet(worker.address) as fleet:
        await eventually(fleet.views)
        known = fleet.workers[worker.address]
        first, second = Dispatched(tokens=160), Dispatched(tokens=160)
        known.dispatched(first)
        known.dispatched(second)
        known.done(first)
        known.done(first)
        (view,) = fleet.views()
        assert view.tokens_ahead == 160  # the other one, though it looks the same
        await worker.kill()


async def test_what_has_ended_is_gone_before_the_report_says_so() -> None:
    worker = await StubWorker("d0", (DECODE,)).start()
    load = worker.load()
    load.num_running, load.num_free_blocks = 1, 900
    worker.load = lambda: load  # type: ignore[method-assign]
    async with running_fleet(worker.address) as fleet:
        await eventually(fleet.ready)
        known = fleet.workers[worker.address]
        known.released(Dispatched(1, 10, decodes=1, context=160), time.monotonic() + 0.3)
        (view,) = fleet.views()
        assert (view.num_decoding, view.dispatched_decodes, view.dispatched_seqs, view.dispatched_blocks) == (1, -1, -1, -10)
        engine = fleet.fleet_snapshot.get(worker.address)
        assert engine is not None and engine.rows == engine.rows_soon == 0
        await eventually(lambda: fleet.views()[0].dispatched_decodes == 0)
        await worker.kill()


async def test_a_report_of_later_than_the_arrival_contains_a_dispatch() -> None:
    sent = Dispatched(tokens=160, arrived_at=5.0)
    assert not any(sent.is_contained(4.9) for _ in range(10)), "so many heartbeats during a step of a second"
    assert sent.is_contained(5.1)


async def test_the_second_report_of_later_than_the_sending_contains_a_dispatch_whose_arrival_is_not_known() -> None:
    sent = Dispatched(tokens=160, sent_at=5.0)
    assert not any(sent.is_contained(4.9) for _ in range(10))
    assert [sent.is_contained(5.1), sent.is_contained(5.2)] == [False, True]


async def test_worker_that_says_nonsense_is_not_used() -> None:
    worker = await StubWorker("d0", (DECODE,)).start()
    wrong = worker_pb2.WorkerInfo(worker_id="d0")
    worker.info = lambda: wrong  # type: ignore[method-assign]
    async with running_fleet(worker.address) as fleet:
        fleet.on_registry([worker_pb2.WorkerInfo(worker_id="x", address="127.0.0.1:1")])
        await asyncio.sleep(0)
        assert fleet.views() == []
        await worker.kill()


async def test_refused_is_told_apart_from_unreachable() -> None:
    worker = await StubWorker("d0", (DECODE,)).start()
    assert not await is_refused(worker.address)
    await worker.kill()
    assert await is_refused(worker.address)
    assert not await is_refused("nonsense")


async def test_a_worker_that_refuses_our_former_certificate_is_asked_with_the_new_one(tmp_path: Path) -> None:
    before, after = new_authority(tmp_path / "before"), new_authority(tmp_path / "after")
    files = copied(before.config(), tmp_path)
    worker = StubWorker("d0", (DECODE,))
    worker.server = GrpcServer("127.0.0.1", 0, tls=Tls(after.config()))
    await worker.start()
    channels = Channels(tls=Tls(files))
    fleet = FleetRegistry(SETTINGS, channels, report_period_ms=50, forget_s=60.0)
    fleet.start([worker.address])
    await asyncio.sleep(0.2)
    copied(after.config(), tmp_path)
    assert not fleet.ready()
    await fleet.reopen_outdated(time.monotonic() + 100)
    await eventually(fleet.ready)
    assert not channels.is_outdated(worker.address)
    await fleet.stop()
    await channels.close()
    await worker.kill()
