"""What a client sees when workers fail: a delay, the same tokens, no error."""

import asyncio
from pathlib import Path

import grpc
import pytest

from pdmesh.runtime.errors import FailedPrecondition, MeshError, ResourceExhausted, Unavailable, error_from_rpc
from pdmesh.v1 import common_pb2, mesh_pb2, worker_pb2
from router.fleet.worker import Dispatched, Worker
from router.main import Router
from tests.router.mesh import Answer, Mesh, config_for, expected, request, running_mesh, running_router
from tests.router.stub_workers import DECODE, PREFILL, StubWorker
from tests.support.waiting import eventually

REMOTE, LOCAL = mesh_pb2.PREFILL_MODE_REMOTE, mesh_pb2.PREFILL_MODE_LOCAL


@pytest.mark.parametrize("plan", ["reject", "fail", "break", "break_after_first"])
async def test_prefill_failure_is_retried_elsewhere(model_folder: Path, plan: str) -> None:
    async with running_mesh(model_folder, prefill=2) as mesh:
        mesh["p0"].prefill_plan = mesh["p1"].prefill_plan = plans = [plan]  # whichever is asked first
        answer = await mesh.generate(request())
        assert plans == []
        assert answer.tokens() == expected(8)
        assert (answer.timings.mode, answer.timings.num_retries) == (REMOTE, 1)
        assert [submit.attempt for submit in mesh["d0"].submits] == [1, 2]
        assert len({submit.request_id for submit in mesh["d0"].submits}) == 1
        await mesh.until_whole()


@pytest.mark.parametrize("plan", ["reject", "fail", "final", "break", "break_after_first"])
async def test_prefill_failure_becomes_local(model_folder: Path, plan: str) -> None:
    async with running_mesh(model_folder) as mesh:
        mesh["p0"].prefill_plan = [plan]
        answer = await mesh.generate(request())
        assert answer.tokens() == expected(8)
        assert (answer.timings.mode, answer.timings.num_retries) == (LOCAL, 1)
        assert [submit.mode for submit in mesh["d0"].submits] == [REMOTE, LOCAL]
        await mesh.until_whole()


async def test_failed_hand_off_of_choices_becomes_local_with_history(model_folder: Path) -> None:
    async with running_mesh(model_folder, prefill=2) as mesh:
        mesh["p0"].prefill_plan = mesh["p1"].prefill_plan = ["break_after_first"]
        answer = await mesh.generate(request(n=3))
        assert [answer.tokens(choice) for choice in range(3)] == [expected(8, choice=choice) for choice in range(3)]
        last = mesh["d0"].submits[-1]
        assert last.mode == LOCAL
        assert [list(choice.token_ids) for choice in last.request.emitted] == [expected(1, choice=choice) for choice in range(3)]


async def test_time_of_failed_attempts_is_retry_time(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        mesh["p0"].prefill_plan = ["fail"]
        timings = (await mesh.generate(request())).timings
        assert timings.retry_ns > 0


async def test_silent_prefill_worker_is_left_within_the_stream_timeout(model_folder: Path) -> None:
    async with running_mesh(model_folder, prefill=2) as mesh:
        stalled = mesh["p0"]
        stalled.prefill_plan = ["mute"]
        mesh["p1"].prefill_plan = []
        mesh.router.core.fleet.workers[mesh["p1"].address].dispatched(Dispatched(tokens=10_000))  # so that p0 is asked first
        answering = asyncio.create_task(mesh.generate(request()))
        await eventually(lambda: stalled.prefills)
        stalled.watch_mute = True
        answer = await answering
        assert answer.tokens() == expected(8)
        assert answer.timings.prefill_worker == "p1"
        await eventually(lambda: stalled.num_cancelled_prefills == 1)


async def test_hand_off_without_first_tokens_is_started_again(model_folder: Path) -> None:
    """Nobody else has them: to wait for them would be for ever."""
    async with running_mesh(model_folder) as mesh:
        mesh["p0"].prefill_plan = ["tokenless"]
        assert (await mesh.generate(request())).tokens() == expected(8)
        await mesh.until_whole()


@pytest.mark.parametrize("omit_committed", [False, True])
async def test_commit_whose_first_token_was_lost_is_started_again(model_folder: Path, omit_committed: bool) -> None:
    async with running_mesh(model_folder) as mesh:
        mesh["d0"].omit_committed = omit_committed
        mesh["p0"].prefill_plan = ["lie"]
        assert (await mesh.generate(request())).tokens() == expected(8)
        await mesh.until_whole()


@pytest.mark.parametrize("mode", [REMOTE, LOCAL])
async def test_killed_decode_worker(model_folder: Path, mode: mesh_pb2.PrefillMode.ValueType) -> None:
    async with running_mesh(model_folder, decode=2) as mesh:
        for name in ("d0", "d1"):
            mesh[name].pause_at = 5
        answering = asyncio.create_task(mesh.generate(request(max_tokens=20, mode=mode)))
        first, other = await _holder(mesh)
        await eventually(lambda: sum(map(len, next(iter(first.held.values())).tokens.values())) >= 5)
        other.pause_at = None
        await first.kill()
        answer = await answering
        assert answer.tokens() == expected(20)
        assert answer.timings.num_resubmissions == 1
        assert answer.timings.decode_worker == other.name
        emitted = other.submits[-1].request.emitted[0].token_ids
        assert list(emitted) == expected(len(emitted)) and len(emitted) <= 5
        assert mesh.router.core.num_token_mismatches == 0


async def _holder(mesh: Mesh) -> tuple[StubWorker, StubWorker]:
    """The decode worker that has the request, and the other one."""
    decodes = [mesh["d0"], mesh["d1"]]
    await eventually(lambda: any(worker.held for worker in decodes))
    return (decodes[0], decodes[1]) if decodes[0].held else (decodes[1], decodes[0])


async def test_restarted_decode_worker_takes_its_requests_again(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        old = mesh["d0"]
        old.pause_at = 5
        answering = asyncio.create_task(mesh.generate(request(max_tokens=20, n=2)))
        await eventually(lambda: old.held)
        await old.kill()
        old.held.clear()
        new = await StubWorker("d0", (DECODE,), port=old.port).start()
        answer = await answering
        assert [answer.tokens(choice) for choice in range(2)] == [expected(20, choice=choice) for choice in range(2)]
        assert new.submits[0].epoch == new.epoch != old.epoch
        await new.kill()


async def test_broken_stream_is_attached_again_and_nothing_is_lost(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        decode = mesh["d0"]
        decode.pause_at = 5
        answering = asyncio.create_task(mesh.generate(request(max_tokens=20)))
        await eventually(lambda: decode.held and sum(map(len, next(iter(decode.held.values())).tokens.values())) >= 5)
        decode.break_streams()
        await eventually(lambda: len(decode.attaches) == 2)
        decode.resume.set()
        answer = await answering
        assert answer.tokens() == expected(20)
        assert answer.timings.num_resubmissions == 0
        points = decode.attaches[1].resume_points
        assert [(point.request_id, point.choice) for point in points] == [(decode.submits[0].request_id, 0)]
        assert points[0].next_index <= 5


async def test_silent_stream_is_attached_again(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        decode = mesh["d0"]
        decode.pause_at = 5
        answering = asyncio.create_task(mesh.generate(request(max_tokens=20)))
        await eventually(lambda: decode.held)
        decode.frames_mute = True
        decode.resume.set()
        await eventually(lambda: len(decode.attaches) >= 2)
        decode.frames_mute = False
        assert (await answering).tokens() == expected(20)


async def test_stream_that_does_not_come_back_loses_its_requests(model_folder: Path) -> None:
    async with running_mesh(model_folder, decode=2) as mesh:
        for name in ("d0", "d1"):
            mesh[name].pause_at = 5
        answering = asyncio.create_task(mesh.generate(request(max_tokens=20)))
        first, other = await _holder(mesh)
        other.pause_at = None
        first.frames_mute = True
        answer = await answering
        assert answer.tokens() == expected(20)
        assert answer.timings.decode_worker == other.name
        await eventually(lambda: first.cancels)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED, grpc.StatusCode.INTERNAL])
async def test_request_that_decode_gives_up_goes_on_elsewhere(model_folder: Path, code: grpc.StatusCode) -> None:
    async with running_mesh(model_folder, decode=2) as mesh:
        for name in ("d0", "d1"):
            mesh[name].pause_at = 5
        answering = asyncio.create_task(mesh.generate(request(max_tokens=20)))
        first, other = await _holder(mesh)
        other.pause_at = None
        await eventually(lambda: next(iter(first.held.values())).running)
        first.fail(first.submits[0].request_id, code)
        assert (await answering).tokens() == expected(20)
        assert other.submits


async def test_logits_that_are_not_finite_end_the_request_at_once(model_folder: Path) -> None:
    """Every worker would compute the same: nothing is tried again."""
    async with running_mesh(model_folder, decode=2) as mesh:
        for name in ("d0", "d1"):
            mesh[name].pause_at = 5
        answering = asyncio.create_task(mesh.generate(request(max_tokens=20)))
        first, other = await _holder(mesh)
        await eventually(lambda: next(iter(first.held.values())).running)
        first.fail(first.submits[0].request_id, grpc.StatusCode.DATA_LOSS)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await answering
        assert raised.value.code() is grpc.StatusCode.DATA_LOSS
        assert not other.submits
        await mesh.until_whole()


async def test_a_prefill_whose_logits_are_not_finite_ends_the_request_at_once(model_folder: Path) -> None:
    async with running_mesh(model_folder, prefill=2) as mesh:
        for name in ("p0", "p1"):
            mesh[name].prefill_plan = ["not_finite"]
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await mesh.generate(request(mode=mesh_pb2.PREFILL_MODE_REMOTE))
        assert raised.value.code() is grpc.StatusCode.DATA_LOSS
        assert len(mesh["p0"].prefills) + len(mesh["p1"].prefills) == 1
        await mesh.until_whole()
        for name in ("p0", "p1"):
            mesh[name].prefill_plan = []
        assert (await mesh.generate(request())).tokens() == expected(8)


@pytest.mark.parametrize("error", [ResourceExhausted("no room"), FailedPrecondition("identity", "no"), Unavailable("draining")])
async def test_refused_submit_goes_to_another_worker(model_folder: Path, error: MeshError) -> None:
    async with running_mesh(model_folder, decode=2) as mesh:
        mesh["d0"].submit_errors = mesh["d1"].submit_errors = errors = [error]
        assert (await mesh.generate(request())).tokens() == expected(8)
        assert errors == []


async def test_without_room_requests_wait_in_line(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        mesh["d0"].full = True
        answering = [asyncio.create_task(mesh.generate(request(seed=seed))) for seed in range(5)]
        await eventually(lambda: len(mesh["d0"].submits) >= 2)
        mesh["d0"].full = False
        answers = await asyncio.gather(*answering)
        assert [answer.tokens() for answer in answers] == [expected(8, seed=seed) for seed in range(5)]
        await mesh.until_whole()


async def test_without_room_for_too_long_it_is_refused(model_folder: Path) -> None:
    async with running_mesh(model_folder, room_timeout_s=0.3) as mesh:
        mesh["d0"].full = True
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await mesh.generate(request())
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_router_with_all_its_streams_open_refuses_for_a_moment(model_folder: Path) -> None:
    async with running_mesh(model_folder, max_streams=2) as mesh:
        mesh["d0"].pause_at = 4
        answering = [asyncio.create_task(mesh.generate(request(seed=seed))) for seed in range(2)]
        await eventually(lambda: len(mesh["d0"].submits) == 2)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await mesh.generate(request())
        error = error_from_rpc(refused.value)
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "streams")
        assert error.retry_delay_s
        mesh["d0"].resume.set()
        assert [(await answer).tokens() for answer in answering] == [expected(8, seed=seed) for seed in range(2)]
        assert (await mesh.generate(request())).tokens() == expected(8)


@pytest.mark.parametrize(("name", "value"), [("max_streams", 0), ("max_streams", -1), ("max_connection_idle_s", -1.0)])
def test_bounds_that_are_none_are_named(model_folder: Path, name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}: must"):
        config_for(model_folder, (), **{name: value})


async def test_no_worker_is_unavailable(model_folder: Path) -> None:
    config = config_for(model_folder, place_timeout_s=0.2)
    async with running_router(config) as (router, stub):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await Mesh(router, stub, {}).generate(request())
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "no decode worker" in (refused.value.details() or "")


@pytest.mark.parametrize("state", [worker_pb2.SERVING_STATE_PAUSED, worker_pb2.SERVING_STATE_ASLEEP])
async def test_a_request_waits_for_a_stopped_worker_so_long_and_no_longer(
    model_folder: Path, state: worker_pb2.ServingState.ValueType
) -> None:
    """The router stays ready meanwhile: a balancer that left it out would refuse what waits here."""
    async with running_mesh(model_folder, place_timeout_s=0.1, paused_timeout_s=4.0) as mesh:
        for name in ("p0", "d0"):
            mesh[name].serving_state = state
        await eventually(lambda: not mesh.router.core.fleet.ready())
        assert mesh.router.core.is_ready
        waiting = asyncio.create_task(mesh.generate(request()))
        await asyncio.sleep(0.4)
        assert not waiting.done()
        for name in ("p0", "d0"):
            mesh[name].serving_state = worker_pb2.SERVING_STATE_RUNNING
        assert (await waiting).tokens() == expected(8)
        for name in ("p0", "d0"):
            mesh[name].serving_state = state
        await eventually(lambda: not mesh.router.core.fleet.ready())
        with pytest.raises(grpc.aio.AioRpcError, match=r"paused or asleep; waited [45] s") as refused:
            await mesh.generate(request())
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_all_that_wait_for_a_stopped_worker_outlast_the_limits_for_others(model_folder: Path) -> None:
    """Also those behind the first in the line, and once it runs, their time begins anew."""
    async with running_mesh(model_folder, prefill=0, place_timeout_s=0.1, room_timeout_s=4.0) as mesh:
        mesh["d0"].serving_state = worker_pb2.SERVING_STATE_ASLEEP
        await eventually(lambda: not mesh.router.core.fleet.ready())
        waiting = [asyncio.create_task(mesh.generate(request())) for _ in range(6)]
        await asyncio.sleep(5.0)
        assert not any(each.done() for each in waiting)
        mesh["d0"].serving_state = worker_pb2.SERVING_STATE_RUNNING
        answers = await asyncio.gather(*waiting)
        assert [answer.tokens() for answer in answers] == [expected(8)] * 6


async def test_what_only_a_stopped_worker_lacks_is_refused_as_ever(model_folder: Path) -> None:
    """A stopped worker that could not take a request either suspends no limit for it."""
    async with running_mesh(model_folder, prefill=0, decode=2, place_timeout_s=0.1, room_timeout_s=0.5) as mesh:
        mesh["d0"].serving_state = worker_pb2.SERVING_STATE_PAUSED
        await eventually(lambda: len(mesh.router.core.fleet.views()) == 1)
        assert (await mesh.generate(request())).tokens() == expected(8)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await mesh.generate(request(mode=REMOTE))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def abort(mesh: Mesh, abort_id: int, *names: str) -> None:
    """These workers report that somebody has paused them and ended all requests."""
    for name in names:
        mesh[name].serving_state, mesh[name].abort_id = worker_pb2.SERVING_STATE_PAUSED, abort_id


def reasons(answer: Answer) -> set[common_pb2.FinishReason.ValueType]:
    return {delta.finish_reason for delta in answer.deltas if delta.finish_reason}


async def test_an_abort_ends_what_runs_and_what_waits_with_what_it_has(model_folder: Path) -> None:
    """Once for each abort: what comes later waits until the workers run."""
    async with running_mesh(model_folder, max_inflight=3) as mesh:
        mesh["d0"].pause_at = 3
        running = [asyncio.create_task(mesh.generate(request(n=number))) for number in (1, 2)]
        await eventually(lambda: [held.is_paused for held in mesh["d0"].held.values()] == [True] * 2)
        mesh["d0"].full = True
        unplaced = asyncio.create_task(mesh.generate(request()))
        await eventually(lambda: mesh.router.core.flow_control.admission.num_inflight == 3)
        queued = asyncio.create_task(mesh.generate(request()))
        await eventually(lambda: mesh.router.core.flow_control.admission.num_queued == 1)
        abort(mesh, 7, "p0", "d0")
        answers = await asyncio.gather(*running, unplaced, queued)
        assert [reasons(answer) for answer in answers] == [{common_pb2.FINISH_REASON_ABORT}] * 4
        assert [answer.tokens() for answer in answers] == [expected(3), expected(3), [], []]
        assert [answer.completed and answer.completed.usage.completion_tokens for answer in answers] == [3, 6, 0, 0]
        await eventually(lambda: not mesh["d0"].held and not mesh.router.core.fleet.ready())  # both are known to be paused
        mesh["d0"].pause_at, mesh["d0"].full = None, False
        later = asyncio.create_task(mesh.generate(request()))
        await asyncio.sleep(0.3)  # a few reports with the same id
        assert not later.done()
        for name in ("p0", "d0"):
            mesh[name].serving_state = worker_pb2.SERVING_STATE_RUNNING
        assert (await later).tokens() == expected(8)
        await mesh.until_whole()


async def test_an_abort_of_before_a_router_came_ends_nothing(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        for name in ("p0", "d0"):
            mesh[name].abort_id = 5
        await eventually(lambda: all(worker.current and worker.current.load.abort_id == 5 for worker in fleet_of(mesh)))
        mesh["d0"].num_watches_ended = mesh["d0"].num_watches  # the report of that abort is the first of the next stream
        assert (await mesh.generate(request())).tokens() == expected(8)
        await mesh.until_whole()


def fleet_of(mesh: Mesh) -> list[Worker]:
    return list(mesh.router.core.fleet.workers.values())


async def test_without_a_worker_a_router_is_ready_only_where_pools_may_be_at_zero(model_folder: Path) -> None:
    for wake_timeout_s in (0.0, 60.0):
        async with running_router(config_for(model_folder, wake_timeout_s=wake_timeout_s)) as (router, _):
            assert router.core.is_ready is router.frontend.is_ready is (wake_timeout_s > 0)


@pytest.mark.parametrize(
    "later", [[("w", (PREFILL, DECODE))], [("p", (PREFILL,)), ("d", (DECODE,))]], ids=["both", "prefill first"]
)
async def test_all_that_wait_for_the_first_workers_are_served(
    model_folder: Path, later: list[tuple[str, tuple[worker_pb2.Role.ValueType, ...]]]
) -> None:
    """However long the start takes beyond what a request waits where there are workers."""
    gone = [await StubWorker(name, roles).start() for name, roles in later]
    for worker in gone:
        await worker.kill()
    config = config_for(model_folder, gone, wake_timeout_s=60.0, place_timeout_s=0.2, room_timeout_s=0.3)
    async with running_router(config) as (router, stub):
        waiting = [asyncio.create_task(Mesh(router, stub, {}).generate(request())) for _ in range(3)]
        started = []
        for worker in gone:
            await asyncio.sleep(0.7)
            started.append(await StubWorker(worker.name, worker.roles, port=worker.port).start())
        for answer in await asyncio.gather(*waiting):
            assert answer.tokens() == expected(8)
        for worker in started:
            await worker.kill()


async def test_requests_that_wait_for_the_first_worker_end_when_none_comes(model_folder: Path) -> None:
    config = config_for(model_folder, wake_timeout_s=0.6, place_timeout_s=0.1, room_timeout_s=0.1)
    async with running_router(config) as (router, stub):
        mesh = Mesh(router, stub, {})
        ends = await asyncio.gather(*(mesh.generate(request()) for _ in range(3)), return_exceptions=True)
        for end in ends:
            assert isinstance(end, grpc.aio.AioRpcError) and end.code() is grpc.StatusCode.UNAVAILABLE
            assert "no decode worker of 'tiny' has started; waited 1 s" in str(end.details())


@pytest.mark.parametrize("wake_timeout_s", [0.0, 3600.0])
async def test_forced_remote_without_prefill_is_unavailable(model_folder: Path, wake_timeout_s: float) -> None:
    """Also where a request waits for the first worker: the model has one."""
    async with running_mesh(model_folder, prefill=0, place_timeout_s=0.2, wake_timeout_s=wake_timeout_s) as mesh:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await mesh.generate(request(mode=REMOTE))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_decode_overtaking_prefill_changes_nothing(model_folder: Path) -> None:
    """The first tokens count as prefill gives them, with its timings and log-probabilities, however late they are read."""
    async with running_mesh(model_folder) as mesh:
        mesh["p0"].prefill_plan = ["late"]
        answer = await mesh.generate(request(logprobs=0, n=2))
        assert [answer.tokens(choice) for choice in range(2)] == [expected(8, choice=choice) for choice in range(2)]
        assert all(entry.chosen.logprob == -0.5 for delta in answer.deltas for entry in delta.logprobs)
        assert (answer.timings.prefill_queue_ns, answer.timings.prefill_compute_ns) == (1000, 2000)
        await mesh.until_whole()


async def test_commit_that_was_reported_as_failed_goes_on(model_folder: Path) -> None:
    async with running_mesh(model_folder, prefill=2) as mesh:
        mesh["p0"].prefill_plan = mesh["p1"].prefill_plan = ["committed_but_failed"]
        mesh["d0"].frames_mute = True  # so that only the next Submit can tell
        answering = asyncio.create_task(mesh.generate(request()))
        await eventually(lambda: len(mesh["d0"].submits) == 2)
        mesh["d0"].frames_mute = False
        assert (await answering).tokens() == expected(8)
        assert len({submit.request_id for submit in mesh["d0"].submits}) == 1
        await mesh.until_whole()


async def test_giving_up_while_a_new_attempt_is_refused_is_not_missed(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        mesh["p0"].prefill_plan = ["committed_but_failed"]
        mesh["d0"].frames_mute = mesh["d0"].give_up_while_refusing = True
        answer = await mesh.generate(request())
        assert (answer.tokens(), answer.timings.num_resubmissions) == (expected(8), 1)
        await mesh.until_whole()


async def test_repeated_index_with_another_token_is_counted_and_dropped(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        mesh["d0"].wrong_token_at = 0  # decode repeats the committed token, wrongly
        assert (await mesh.generate(request())).tokens() == expected(8)
        await mesh.until_whole()
        status = await mesh.stub.GetStatus(mesh_pb2.GetStatusRequest())
        assert status.num_token_mismatches == 1


async def test_workers_of_another_kind_are_not_paired(model_folder: Path) -> None:
    prefill, decode = StubWorker("p0", (PREFILL,)), StubWorker("d0", (DECODE,))
    foreign = prefill.info()
    foreign.identity.weights_hash = "other"
    prefill.info = lambda: foreign  # type: ignore[method-assign]
    for worker in (prefill, decode):
        await worker.start()
    async with running_router(config_for(model_folder, (prefill, decode))) as (router, stub):
        await eventually(lambda: _num_ready(router) == 2)
        answer: Answer = await Mesh(router, stub, {}).generate(request())
        assert answer.timings.mode == LOCAL
    for worker in (prefill, decode):
        await worker.kill()


def _num_ready(router: Router) -> int:
    return sum(view.decode or view.prefill for view in router.core.fleet.views())
