"""Hedges, ejections and moves: a client sees the same tokens, and no error."""

import asyncio
from pathlib import Path

import pytest

from pdmesh.runtime.errors import Unavailable
from pdmesh.v1 import mesh_pb2, worker_pb2
from router.fleet.circuit_breaker import HealthLimits, Role, State
from router.fleet.migration import RebalanceLimits
from router.fleet.worker import Dispatched
from router.lifecycle.decode_session import DecodeSession
from router.lifecycle.hedging import HedgeLimits
from router.lifecycle.placement import PlaceStage
from router.lifecycle.request import Dispatch
from tests.router.mesh import Answer, Mesh, expected, request, running_mesh
from tests.router.stub_workers import DECODE, PREFILL, StubWorker
from tests.support.waiting import eventually

REMOTE, LOCAL = mesh_pb2.PREFILL_MODE_REMOTE, mesh_pb2.PREFILL_MODE_LOCAL
MODES = [REMOTE, LOCAL]


def prefer(mesh: Mesh, name: str) -> None:
    """For the next prompt: the other prefill worker seems to be busy."""
    other = "p1" if name == "p0" else "p0"
    mesh.router.core.fleet.workers[mesh[other].address].dispatched(Dispatched(tokens=10_000))


def hedge_after(mesh: Mesh, seconds: float) -> None:
    mesh.router.core.hedging.limits = HedgeLimits(unknown_s=seconds)


async def test_late_prompt_goes_to_another_prefill_worker(model_folder: Path) -> None:
    async with running_mesh(model_folder, prefill=2) as mesh:
        hedge_after(mesh, 0.3)
        prefer(mesh, "p0")
        mesh["p0"].prefill_plan = ["mute"]
        answer = await mesh.generate(request())
        assert answer.tokens() == expected(8)
        assert (answer.timings.prefill_worker, answer.timings.num_retries, answer.timings.num_resubmissions) == ("p1", 1, 0)
        assert [(submit.attempt, submit.mode) for submit in mesh["d0"].submits] == [(1, REMOTE), (2, REMOTE)]
        await eventually(lambda: mesh["p0"].num_cancelled_prefills == 1)
        assert mesh.router.core.num_hedges == 1
        await mesh.until_whole()


async def test_late_prompt_without_another_prefill_worker_becomes_local(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        hedge_after(mesh, 0.3)
        mesh["p0"].prefill_plan = ["mute"]
        answer = await mesh.generate(request(n=2))
        assert [answer.tokens(choice) for choice in range(2)] == [expected(8, choice=choice) for choice in range(2)]
        assert [submit.mode for submit in mesh["d0"].submits] == [REMOTE, LOCAL]
        await mesh.until_whole()


async def test_silent_worker_is_left_before_it_is_lost_and_without_budget(model_folder: Path) -> None:
    async with running_mesh(model_folder, prefill=2, stream_timeout_s=3.0) as mesh:
        while mesh.router.core.hedging.budget.spend():
            pass
        prefer(mesh, "p0")
        mesh["p0"].prefill_plan = ["mute"]
        answering = asyncio.create_task(mesh.generate(request()))
        await eventually(lambda: mesh["p0"].prefills)
        mesh["p0"].watch_mute = True
        assert (await answering).tokens() == expected(8)
        assert mesh.router.core.num_hedges == 1
        assert mesh.router.core.fleet.workers[mesh["p0"].address].current is not None, "it has not been lost yet"


async def test_hedge_that_comes_too_late_changes_nothing(model_folder: Path) -> None:
    """The late worker has committed, unheard: decode refuses the next attempt, and the late one's first token counts."""
    async with running_mesh(model_folder, prefill=2) as mesh:
        hedge_after(mesh, 0.3)
        prefer(mesh, "p0")
        mesh["p0"].prefill_plan = ["late"]
        mesh["d0"].frames_mute = True
        answering = asyncio.create_task(mesh.generate(request(logprobs=0)))
        await eventually(lambda: len(mesh["d0"].submits) == 2)
        mesh["d0"].frames_mute = False
        answer = await answering
        assert answer.tokens() == expected(8)
        assert all(entry.chosen.logprob == -0.5 for delta in answer.deltas for entry in delta.logprobs)
        assert (answer.timings.prefill_worker, answer.timings.num_retries) == ("p0", 0)
        assert mesh.router.core.num_hedges == 0
        await mesh.until_whole()


async def breakers_of(mesh: Mesh, name: str) -> list[mesh_pb2.BreakerStatus]:
    """As a client is told."""
    status = await mesh.stub.GetStatus(mesh_pb2.GetStatusRequest())
    return [breaker for worker in status.workers if worker.info.worker_id == name for breaker in worker.breakers]


async def test_prefill_worker_that_fails_is_left_out_until_its_probe_goes_well(model_folder: Path) -> None:
    async with running_mesh(model_folder, prefill=2) as mesh:
        health = mesh.router.core.health_recorder.health
        health.limits = HealthLimits(ejection_s=0.5, jitter=0.0)
        sick, key = mesh["p0"], (mesh["p0"].address, mesh["p0"].epoch)
        sick.prefill_plan = ["break"] * 3
        for seed in range(3):
            prefer(mesh, "p0")
            assert (await mesh.generate(request([seed] * 50, seed=seed))).tokens() == expected(8, prompt=[seed] * 50, seed=seed)
        assert health.state(key, Role.PREFILL) is State.OPEN
        (shown,) = await breakers_of(mesh, "p0")
        assert (shown.role, shown.state, shown.left_out) == (PREFILL, mesh_pb2.BREAKER_STATE_OPEN, True)
        assert 0 < shown.left_ms <= 500 and "of its last requests failed" in shown.reason
        assert await breakers_of(mesh, "p1") == []
        asked = len(sick.prefills)
        prefer(mesh, "p0")
        await mesh.generate(request([77] * 50))
        assert len(sick.prefills) == asked, "it is left out"
        await eventually(
            lambda: not mesh.router.core.health_recorder.ejected(mesh.router.core.fleet.fleet_snapshot, Role.PREFILL)
        )
        prefer(mesh, "p0")
        await mesh.generate(request([78] * 50))
        assert len(sick.prefills) == asked + 1
        assert health.state(key, Role.PREFILL) is State.CLOSED
        assert await breakers_of(mesh, "p0") == [
            mesh_pb2.BreakerStatus(
                role=PREFILL, state=mesh_pb2.BREAKER_STATE_CLOSED, num_ejections=1, reason="its probe went well"
            )
        ]


@pytest.mark.parametrize("plan", ["busy", "unanswered"])
async def test_a_handoff_that_is_not_answered_in_time_is_a_fault_only_of_workers_that_have_time(
    model_folder: Path, plan: str
) -> None:
    """Slow is not broken: where heartbeats are late as well, the machine is busy."""
    async with running_mesh(model_folder, decode=2) as mesh:
        health = mesh.router.core.health_recorder.health
        mesh["p0"].prefill_plan = [plan] * 3
        for seed in range(3):
            assert (await mesh.generate(request([seed] * 50, seed=seed, mode=REMOTE))).tokens() == expected(
                8, prompt=[seed] * 50, seed=seed
            )
        sick = [health.breaker((mesh[name].address, mesh[name].epoch), Role.DECODE) for name in ("d0", "d1")]
        counted = [breaker.errors for breaker in sick if breaker is not None and breaker.errors]
        prefill = health.state((mesh["p0"].address, mesh["p0"].epoch), Role.PREFILL)
        assert (bool(counted), prefill) == ((False, State.CLOSED) if plan == "busy" else (True, State.OPEN))
        await mesh.until_whole()


async def test_a_submit_may_take_several_of_the_workers_longest_steps(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        await mesh.generate(request(), timeout=1000)
        await mesh["d0"].kill()
        slow = StubWorker("d0", (DECODE,), mesh["d0"].port, max_num_batched_tokens=8192)
        slow.latency_model = worker_pb2.LatencyModel(fixed_s=0.5, per_prefill_token_s=0.01)
        mesh.workers["d0"] = await slow.start()
        await eventually(lambda: mesh.router.core.fleet.workers[slow.address].current is not None)
        await mesh.generate(request(), timeout=1000)
        assert slow.submit_limits_s[-1] == pytest.approx(5 * 82.42, abs=10), "not 30 s: such a step takes 82"


async def test_when_nobody_else_is_left_an_ejected_worker_serves(model_folder: Path) -> None:
    async with running_mesh(model_folder, decode=2) as mesh:
        core = mesh.router.core
        core.health_recorder.health.limits = HealthLimits(ejection_s=100.0)
        key = (mesh["d0"].address, mesh["d0"].epoch)
        for _ in range(3):
            core.health_recorder.failed(key, Role.DECODE, "as the test says")
        await asyncio.gather(*(mesh.generate(request(seed=seed)) for seed in range(4)))
        assert not mesh["d0"].submits
        assert [(each.role, each.left_out) for each in await breakers_of(mesh, "d0")] == [(DECODE, True)]
        mesh["d1"].submit_errors = [Unavailable("not now")] * 2
        assert (await mesh.generate(request())).tokens() == expected(8)
        assert mesh["d0"].submits


async def started(mesh: Mesh, count: int, **options: object) -> tuple[list[asyncio.Task[Answer]], StubWorker, StubWorker]:
    """Requests that stand before their sixth token on one decode worker, and the other one, which runs freely."""
    decodes = [mesh["d0"], mesh["d1"]]
    for worker in decodes:
        worker.pause_at = 5
    mesh.router.core.fleet.workers[mesh["d1"].address].dispatched(Dispatched(seqs=40))
    asking = [asyncio.create_task(mesh.generate(request(seed=seed, max_tokens=60, **options))) for seed in range(count)]  # type: ignore[arg-type]
    await eventually(lambda: sum(len(worker.held) for worker in decodes) == count)
    await eventually(lambda: all(len(held.tokens[0]) == 5 for worker in decodes for held in worker.held.values()))
    first, other = decodes if decodes[0].held else decodes[::-1]
    other.pause_at = None
    return asking, first, other


@pytest.mark.parametrize("mode", MODES)
async def test_requests_leave_a_worker_that_drains(model_folder: Path, mode: mesh_pb2.PrefillMode.ValueType) -> None:
    async with running_mesh(model_folder, decode=2) as mesh:
        asking, first, other = await started(mesh, 1, mode=mode)
        first.draining = True
        (answer,) = await asyncio.gather(*asking)
        assert answer.tokens() == expected(60, seed=0)
        assert (answer.timings.num_resubmissions, answer.timings.decode_worker) == (0, other.name)
        (moved,) = other.submits
        assert (moved.mode, list(moved.request.emitted[0].token_ids)) == (mode, expected(5, seed=0))
        if mode == REMOTE:  # who leaves hands over
            assert [list(asked.request.emitted[0].token_ids) for asked in first.prefills] == [expected(5, seed=0)]
        await eventually(lambda: first.cancels == [first.submits[0].request_id])
        assert (mesh.router.core.num_migrations, mesh.router.core.num_token_mismatches) == (1, 0)
        await mesh.until_whole()


async def test_requests_of_several_choices_leave_it_too(model_folder: Path) -> None:
    async with running_mesh(model_folder, decode=2) as mesh:
        asking, first, _ = await started(mesh, 1, n=3)
        first.draining = True
        (answer,) = await asyncio.gather(*asking)
        assert [answer.tokens(choice) for choice in range(3)] == [expected(60, seed=0, choice=choice) for choice in range(3)]
        assert answer.timings.num_resubmissions == 0
        await mesh.until_whole()


@pytest.mark.parametrize("what", ["fail", "break", "break_after_first", "tokenless"])
async def test_hand_over_that_fails_costs_nothing(model_folder: Path, what: str) -> None:
    async with running_mesh(model_folder, decode=2) as mesh:
        asking, first, _ = await started(mesh, 1, mode=REMOTE)
        first.prefill_plan = [what]
        first.draining = True
        (answer,) = await asyncio.gather(*asking)
        assert answer.tokens() == expected(60, seed=0)
        assert answer.timings.num_resubmissions == 0
        await mesh.until_whole()


async def test_move_that_meets_a_bug_ends_no_stream(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = list[Dispatch]()

    def fail(stage: PlaceStage, dispatch: Dispatch, leaving: DecodeSession) -> None:
        tries.append(dispatch)
        raise RuntimeError("broken")

    monkeypatch.setattr(PlaceStage, "place_elsewhere", fail)
    async with running_mesh(model_folder, decode=2) as mesh:
        asking, first, _ = await started(mesh, 1)
        first.draining = True
        await eventually(lambda: tries)
        first.resume.set()
        (answer,) = await asyncio.gather(*asking)
        assert (answer.tokens(), answer.timings.decode_worker) == (expected(60, seed=0), first.name)
        await mesh.until_whole()


async def test_client_that_leaves_before_its_submit_is_answered_is_no_load(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitting = asyncio.Event()

    async def never(session: DecodeSession, *_: object, **__: object) -> None:
        submitting.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(DecodeSession, "submit", never)
    async with running_mesh(model_folder, prefill=0) as mesh:
        worker = mesh.router.core.fleet.workers[mesh["d0"].address]
        done = list[Dispatched]()
        monkeypatch.setattr(worker, "done", done.append)
        asking = asyncio.create_task(mesh.generate(request()))
        await submitting.wait()
        asking.cancel()
        await eventually(lambda: [sent.decodes for sent in done] == [1])


async def test_without_room_elsewhere_a_request_stays_to_its_end(model_folder: Path) -> None:
    async with running_mesh(model_folder, decode=2) as mesh:
        asking, first, other = await started(mesh, 1)
        other.full = True
        first.draining = True
        await eventually(lambda: other.submits)
        first.resume.set()
        (answer,) = await asyncio.gather(*asking)
        assert (answer.tokens(), answer.timings.decode_worker) == (expected(60, seed=0), first.name)
        assert mesh.router.core.num_migrations == 0
        await mesh.until_whole()


async def test_worker_that_dies_while_its_requests_leave(model_folder: Path) -> None:
    """The next stay is being prepared: it is what the request goes on with."""
    async with running_mesh(model_folder, prefill=2, decode=2) as mesh:
        asking, first, other = await started(mesh, 1, mode=REMOTE)
        first.prefill_plan = ["mute"]
        first.draining = True
        await eventually(lambda: first.prefills)
        await first.kill()
        (answer,) = await asyncio.gather(*asking)
        assert answer.tokens() == expected(60, seed=0)
        assert (answer.timings.num_resubmissions, len(other.submits)) == (0, 2)
        await eventually(lambda: not other.held)


async def test_client_that_leaves_while_its_request_moves(model_folder: Path) -> None:
    async with running_mesh(model_folder, decode=2) as mesh:
        asking, first, other = await started(mesh, 1, mode=REMOTE)
        first.prefill_plan = ["mute"]
        first.draining = True
        await eventually(lambda: first.prefills and other.held)
        asking[0].cancel()
        await mesh.until_whole()


async def test_one_request_leaves_a_worker_that_is_nearly_full(model_folder: Path) -> None:
    async with running_mesh(model_folder, decode=2) as mesh:
        rebalancer = mesh.router.mover.rebalancer
        assert rebalancer is not None
        rebalancer.limits = RebalanceLimits(patience_s=0.0, period_s=60.0)
        asking, first, other = await started(mesh, 3)
        first.num_free_blocks = 50
        await eventually(lambda: mesh.router.core.num_migrations == 1)
        await eventually(lambda: len(first.held) == 2)
        assert len(other.submits) == 1
        first.resume.set()
        answers = await asyncio.gather(*asking)
        assert [answer.tokens() for answer in answers] == [expected(60, seed=seed) for seed in range(3)]
        await mesh.until_whole()


async def test_rebalancing_can_be_switched_off(model_folder: Path) -> None:
    async with running_mesh(model_folder, rebalance="off") as mesh:
        assert mesh.router.mover.rebalancer is None
        assert DECODE in mesh["d0"].roles
