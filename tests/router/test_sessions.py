"""Sessions over gRPC: what workers are told, where the next turn goes, and what is released. Stub workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from random import Random

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from pdmesh.runtime.errors import ResourceExhausted, Unavailable
from pdmesh.v1 import common_pb2, mesh_pb2, worker_pb2
from router import context
from router.config import RouterConfig
from router.routing.decisions import KEEP_S, SessionMemory
from router.tokenization.prepared_request import PreparedRequest, ServedModel, SessionState, load
from tests.router.api_keys import add_key
from tests.router.mesh import Mesh, mesh_of, request, running_mesh
from tests.router.stub_workers import DECODE, PREFILL, StubWorker
from tests.router.test_prefix_index import PROMPT, Clock, info_of
from tests.support.waiting import eventually

LOCAL, REMOTE = mesh_pb2.PREFILL_MODE_LOCAL, mesh_pb2.PREFILL_MODE_REMOTE


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def mesh(model_folder: Path) -> AsyncIterator[Mesh]:
    """A prefill stub and two decode stubs, the second of which has no retention."""
    async with running_mesh(model_folder, decode=2) as mesh:
        mesh["d0"].retained = {}
        yield mesh
        await mesh.until_whole()


def asked(session_id: str = "s", *, mode: mesh_pb2.PrefillMode.ValueType = REMOTE, **options: object) -> mesh_pb2.GenerateRequest:
    made = request(mode=mode)
    made.options.MergeFrom(mesh_pb2.RequestOptions(session_id=session_id, **options))  # type: ignore[arg-type]
    return made


def told(mesh: Mesh) -> list[common_pb2.TokenRequest]:
    """The requests that workers got, of decode and prefill."""
    decode = [submit.request for name in ("d0", "d1") for submit in mesh[name].submits]
    return [*decode, *(prefill.request for prefill in mesh["p0"].prefills)]


def forget(mesh: Mesh) -> None:
    for worker in mesh.workers.values():
        worker.submits.clear()
        worker.prefills.clear()


@pytest.mark.asyncio(loop_scope="module")
async def test_workers_of_both_roles_are_told_session_and_retention(mesh: Mesh) -> None:
    forget(mesh)
    await mesh.generate(asked(kv_retention_s=60))
    requests = told(mesh)
    assert [(each.session_id, each.kv_retention_s, each.session_final) for each in requests] == [("s", 60, False)] * 2


@pytest.mark.asyncio(loop_scope="module")
async def test_the_last_request_of_a_session_leaves_nothing_to_keep(mesh: Mesh) -> None:
    forget(mesh)
    await mesh.generate(asked(kv_retention_s=60, session_final=True))
    assert {(each.kv_retention_s, each.session_final) for each in told(mesh)} == {(0, True)}


@pytest.mark.asyncio(loop_scope="module")
async def test_metadata_fill_what_the_message_leaves_open(mesh: Mesh) -> None:
    forget(mesh)
    metadata = (
        ("x-pdmesh-session-id", "from-metadata"), ("x-pdmesh-kv-retention-s", "7"), ("x-pdmesh-session-final", "false"),
        ("x-pdmesh-priority-hint", "-3"),
    )  # fmt: skip
    async for _ in mesh.stub.Generate(request(mode=LOCAL), metadata=metadata):
        pass
    async for _ in mesh.stub.Generate(asked("own", mode=LOCAL, kv_retention_s=9), metadata=metadata):
        pass
    assert sorted((each.session_id, each.kv_retention_s) for each in told(mesh)) == [("from-metadata", 7), ("own", 9)]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("x-pdmesh-session-id", "two words"),
        ("x-pdmesh-kv-retention-s", "-1"),
        ("x-pdmesh-kv-retention-s", "86401"),
        ("x-pdmesh-session-final", "maybe"),
        ("x-pdmesh-priority-hint", "1001"),
        ("x-pdmesh-priority-hint", "high"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_nonsense_in_metadata_is_refused_by_its_key(mesh: Mesh, key: str, value: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in mesh.stub.Generate(request(), metadata=((key, value),)):
            pass
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (refused.value.details() or "").startswith(f"{key}: ") and value not in (refused.value.details() or "").split("'")[0]


async def test_the_default_counts_for_requests_with_a_session_that_do_not_say(model_folder: Path) -> None:
    async with running_mesh(model_folder, session_kv_retention_s=30) as mesh:
        for options in ({}, {"kv_retention_s": 5}, {"session_final": True}):
            await mesh.generate(asked(mode=LOCAL, **options))
        await mesh.generate(request(mode=LOCAL))
        kept = [submit.request.kv_retention_s for submit in mesh["d0"].submits]
    assert kept == [30, 5, 0, 0]


@pytest.mark.parametrize("seconds", [-1, 86_401])
def test_the_default_has_bounds(model_folder: Path, seconds: int) -> None:
    config = RouterConfig(models=(f"tiny={model_folder}",), session_kv_retention_s=seconds)
    with pytest.raises(ValueError, match=r"^session_kv_retention_s: must be between 0 and 86400"):
        config.validate()


async def test_a_resubmitted_request_keeps_its_session(model_folder: Path) -> None:
    async with running_mesh(model_folder, decode=2) as mesh:
        preferred, other = sorted(("d0", "d1"), key=lambda name: mesh[name].address)
        mesh[preferred].submit_errors.append(Unavailable("gone for a moment"))
        answer = await mesh.generate(asked(mode=LOCAL, kv_retention_s=4))
        assert answer.timings.decode_worker == other
        assert [each.session_id for each in told(mesh)] == ["s", "s"] and {each.kv_retention_s for each in told(mesh)} == {4}
        (decision, *_) = (await mesh.stub.Explain(mesh_pb2.ExplainRequest(generate=asked(mode=LOCAL)))).decisions
    assert [each.decode_worker_id for each in decision.candidates if "the session's last worker" in each.note] == [other]


# Where the next turn goes.


async def test_the_next_turn_goes_where_the_session_was_among_equals(model_folder: Path) -> None:
    """Idle workers are taken in the order of their addresses; the first turn could not have that one."""
    async with running_mesh(model_folder, decode=2, report_period_ms=20) as mesh:
        preferred, other = sorted(("d0", "d1"), key=lambda name: mesh[name].address)
        mesh[preferred].submit_errors.append(Unavailable("busy with itself"))
        assert (await mesh.generate(asked(mode=LOCAL))).timings.decode_worker == other
        core = mesh.router.core
        await eventually(lambda: all(view.num_seqs + view.dispatched_seqs == 0 for view in core.fleet.views()))
        core.prefixes = type(core.prefixes)(1000)  # as if nothing were known of caches
        dry = mesh_pb2.ExplainRequest(generate=asked(mode=LOCAL))
        (with_session,) = (await mesh.stub.Explain(dry)).decisions
        dry.generate.options.session_id = "another"
        (without,) = (await mesh.stub.Explain(dry)).decisions
        dry.generate.options.session_id, dry.generate.options.tenant = "s", "another"
        (of_another,) = (await mesh.stub.Explain(dry)).decisions
        await mesh.generate(asked(mode=LOCAL, session_final=True))
        dry.generate.options.tenant = ""
        (ended,) = (await mesh.stub.Explain(dry)).decisions
    chosen = [decision.candidates[0] for decision in (with_session, without, of_another, ended)]
    assert [each.decode_worker_id for each in chosen] == [other, preferred, preferred, preferred]
    assert [each.note.split(", ")[0] == "the session's last worker" for each in chosen] == [True, False, False, False]


async def test_the_blocks_of_an_output_are_known_when_the_next_turn_comes(model_folder: Path) -> None:
    """The stubs send no KV events and list no blocks: what is known, the router remembers."""
    async with running_mesh(model_folder, decode=2, policy="prefix") as mesh:
        await eventually(lambda: len(mesh.router.core.prefixes._alive) == 3)  # the index looks for workers now and then
        first = request(mode=LOCAL, max_tokens=40)
        first.options.session_id = "s"
        answer = await mesh.generate(first)
        longer = [*first.tokens.ids, *answer.tokens(), 70, 71]
        assert len(answer.tokens()) == 40
        await eventually(lambda: len(mesh.router.core.background) == 0)
        dry = mesh_pb2.ExplainRequest(generate=request(longer, mode=LOCAL))
        (decision,) = (await mesh.stub.Explain(dry)).decisions
        plain = request([90, *first.tokens.ids[1:]], mode=LOCAL, max_tokens=40)
        beyond = [*plain.tokens.ids, *(await mesh.generate(plain)).tokens(), 70, 71]
        (unknown,) = (await mesh.stub.Explain(mesh_pb2.ExplainRequest(generate=request(beyond, mode=LOCAL)))).decisions
    cached = {each.decode_worker_id: each.decode_cached_tokens for each in decision.candidates}
    assert cached[answer.timings.decode_worker] == (50 + 40 - 1) // 16 * 16  # the last token has no KV
    assert max(each.decode_cached_tokens for each in unknown.candidates) == 50 // 16 * 16


async def test_a_chat_without_a_session_is_remembered_too_where_that_is_cheap(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        told_outputs = []
        remember = mesh.router.core.prefixes.remember_output

        async def spy(prepared: PreparedRequest, outputs: list[list[int]], info: worker_pb2.WorkerInfo) -> None:
            told_outputs.append([len(output) for output in outputs])
            await remember(prepared, outputs, info)

        mesh.router.core.prefixes.remember_output = spy  # type: ignore[assignment,method-assign]
        for max_tokens, n in ((20, 1), (20, 3), (600, 1)):
            chat = mesh_pb2.ChatRequest(
                messages=[mesh_pb2.ChatMessage(role="user", content="hello")],
                sampling=common_pb2.SamplingParams(max_tokens=max_tokens, n=n),
            )
            async for _ in mesh.stub.Chat(chat):
                pass
        await mesh.generate(request())
        await mesh.until_whole()
    assert told_outputs == [[19], [19, 19, 19]]


# The memory itself.


@pytest.fixture(scope="module")
def model(model_folder: Path) -> ServedModel:
    return load({"tiny": str(model_folder)})["tiny"]


def turn(model: ServedModel, session_id: str = "s", tenant: str = "", retention_s: int = 0) -> PreparedRequest:
    return PreparedRequest(
        "id", model, PROMPT, common_pb2.SamplingParams(n=1), (), tenant=tenant, session_id=session_id, kv_retention_s=retention_s
    )


A, B = ("a:1", 1), ("b:1", 2)


def there(_: object) -> bool:
    return False


def test_a_session_is_remembered_by_tenant_and_model_until_it_expires(model: ServedModel) -> None:
    clock = Clock()
    memory = SessionMemory(clock=clock)
    memory.note(turn(model), (A, B))
    memory.note(turn(model, "long", retention_s=3 * int(KEEP_S)), (B,))
    memory.note(turn(model, ""), (A,))
    assert memory.workers_of(turn(model), there) == (A, B) and len(memory) == 2
    assert memory.workers_of(turn(model, tenant="t"), there) == ()
    assert memory.workers_of(replace(turn(model), model=replace(model, name="other")), there) == ()
    clock.now += KEEP_S + 1
    assert memory.workers_of(turn(model), there) == ()
    assert memory.workers_of(turn(model, "long"), there) == (B,) and len(memory) == 1


def test_a_worker_that_is_gone_is_forgotten(model: ServedModel) -> None:
    memory = SessionMemory()
    memory.note(turn(model), (A,))
    assert memory.workers_of(turn(model), lambda key: key == A) == ()
    assert len(memory) == 0 and memory.workers_of(turn(model), there) == ()


def test_the_memory_is_bounded_and_a_flood_of_one_tenant_costs_itself(model: ServedModel) -> None:
    memory = SessionMemory(max_sessions=10)
    for number in range(3):
        memory.note(turn(model, f"calm-{number}", "calm"), (A,))
    for number in range(100):
        memory.note(turn(model, f"flood-{number}", "flood"), (B,))
    assert len(memory) == 10
    assert all(memory.workers_of(turn(model, f"calm-{number}", "calm"), there) == (A,) for number in range(3))
    kept = [number for number in range(100) if memory.workers_of(turn(model, f"flood-{number}", "flood"), there)]
    assert kept == list(range(93, 100))


class CountedTenant(str):
    """A name that counts how often it is looked up."""

    __slots__ = ()
    num_lookups = 0

    def __hash__(self) -> int:
        CountedTenant.num_lookups += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other)


def test_a_new_session_in_a_full_memory_costs_the_same_with_few_tenants_and_many(model: ServedModel) -> None:
    lookups = []
    for num_tenants in (20, 2000):
        memory = SessionMemory(max_sessions=num_tenants)
        for number in range(num_tenants):
            memory.note(turn(model, "s", CountedTenant(number)), (A,))
        before = CountedTenant.num_lookups
        for number in range(num_tenants, num_tenants + 20):
            memory.note(turn(model, "s", CountedTenant(number)), (A,))
        lookups.append(CountedTenant.num_lookups - before)
        assert len(memory) == num_tenants
        assert memory.workers_of(turn(model, "s", str(num_tenants + 19)), there) == (A,)
    assert lookups[0] == lookups[1] < 20 * 20


def test_sessions_that_have_expired_go_before_others(model: ServedModel) -> None:
    clock = Clock()
    memory = SessionMemory(max_sessions=4, clock=clock)
    memory.note(turn(model, "long", retention_s=5 * int(KEEP_S)), (A,))
    for number in range(3):
        memory.note(turn(model, f"short-{number}"), (A,))
    memory.note(turn(model, "short-2", retention_s=3 * int(KEEP_S)), (B,))  # it was used again
    clock.now += 2 * KEEP_S
    for number in range(2):
        memory.note(turn(model, f"new-{number}"), (A,))
    assert len(memory) == 4
    kept = [name for name in ("long", "short-0", "short-1", "short-2") if memory.workers_of(turn(model, name), there)]
    assert kept == ["long", "short-2"]


@pytest.mark.parametrize("seed", range(3))
def test_the_memory_finds_the_largest_tenant_after_any_changes(model: ServedModel, seed: int) -> None:
    """Against the definition; and what is kept in order of expiry stays in proportion."""
    random, clock = Random(seed), Clock()
    memory = SessionMemory(max_sessions=30, clock=clock)
    for _ in range(2000):
        tenant, name = random.choice("aaabcd"), str(random.randrange(40))
        if random.random() < 0.3:
            memory.forget(tenant, name)
        else:
            memory.note(turn(model, name, tenant, random.choice((0, 5000))), (A,))
        clock.now += random.choice((0.0, 1.0, 60.0))
        sizes = {tenant: len(sessions) for tenant, sessions in memory._tenants.items()}
        assert len(memory) == sum(sizes.values()) <= 30 and all(sizes.values())
        assert not sizes or sizes[memory._sizes.largest] == max(sizes.values())
        assert len(memory._expiries) <= 2 * len(memory) + 65


def test_what_was_released_is_not_remembered_again_and_a_model_is_forgotten_alone(model: ServedModel) -> None:
    memory, state = SessionMemory(), SessionState("", "s", "tiny")
    prepared, other = replace(turn(model), session_state=state), replace(turn(model), model=replace(model, name="other"))
    memory.note(prepared, (A,))
    memory.note(other, (B,))
    memory.forget("", "s", "tiny")
    assert memory.workers_of(prepared, there) == () and memory.workers_of(other, there) == (B,)
    state.is_released = True
    memory.note(prepared, (A,))
    assert memory.workers_of(prepared, there) == () and prepared.token_request([]).kv_retention_s == 0
    memory.forget("", "s", "other")
    assert len(memory) == 0


@pytest.mark.parametrize("at_once", [1, 2, 1000])
async def test_an_output_is_hashed_in_slices_as_workers_hash_it_whole(model: ServedModel, at_once: int) -> None:
    prepared, info, output = turn(model), info_of(A), list(range(100, 250))
    whole = replace(prepared, prompt=(*PROMPT, *output), _chains={})
    slices = list(prepared.output_names(info.identity, "float32", 16, output, at_once))
    names = [*prepared.block_names(info.identity, "float32", 16), *(name for names in slices for name in names)]
    assert names == whole.block_names(info.identity, "float32", 16)
    assert all(len(names) <= at_once for names in slices)


# The release.


def release(session_id: str = "s", **fields: str) -> mesh_pb2.ReleaseSessionRequest:
    return mesh_pb2.ReleaseSessionRequest(session_id=session_id, **fields)


async def test_all_workers_are_asked_and_what_they_released_is_summed(model_folder: Path) -> None:
    workers = [StubWorker("p0", (PREFILL,)), *(StubWorker(f"d{number}", (DECODE,)) for number in range(3))]
    workers[0].retained, workers[1].retained, workers[2].retained = {("", "s"): 4}, {("", "s"): 3, ("t", "s"): 9}, {}
    async with mesh_of(model_folder, workers) as mesh:
        first = await mesh.stub.ReleaseSession(release())
        again = await mesh.stub.ReleaseSession(release(model="tiny"))
        theirs = await mesh.stub.ReleaseSession(release(tenant="t"))
        assert all(worker.released == [("", "s"), ("", "s"), ("t", "s")] for worker in workers)
    assert [(each.num_blocks, each.num_workers, each.num_unreachable) for each in (first, again, theirs)] == [
        (7, 2, 0),
        (0, 0, 0),
        (9, 1, 0),
    ]


async def test_a_worker_that_is_lost_or_silent_is_counted_and_not_waited_for(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "RELEASE_TIMEOUT_S", 0.3)
    async with running_mesh(model_folder, prefill=0, decode=3) as mesh:
        mesh["d0"].retained, mesh["d1"].release_mute = {("", "s"): 2}, True
        await mesh["d2"].kill()
        await eventually(lambda: len(mesh.router.core.fleet.views()) == 2)
        released = await mesh.stub.ReleaseSession(release(), timeout=5)
    assert (released.num_blocks, released.num_workers, released.num_unreachable) == (2, 1, 2)


@pytest.mark.parametrize(
    ("asked_for", "code", "field"),
    [
        (release(""), grpc.StatusCode.INVALID_ARGUMENT, "session_id"),
        (release("two words"), grpc.StatusCode.INVALID_ARGUMENT, "session_id"),
        (release(tenant="x" * 129), grpc.StatusCode.INVALID_ARGUMENT, "tenant"),
        (release(model="unknown"), grpc.StatusCode.NOT_FOUND, "model"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_wrong_release_is_refused_by_its_field(
    mesh: Mesh, asked_for: mesh_pb2.ReleaseSessionRequest, code: grpc.StatusCode, field: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await mesh.stub.ReleaseSession(asked_for)
    assert refused.value.code() is code and (refused.value.details() or "").startswith(f"{field}: ")


async def test_a_key_releases_its_own_tenants_sessions_alone(model_folder: Path, tmp_path: Path) -> None:
    add_key(tmp_path / "keys.json", "key-1", tenant="tenant-1")
    async with running_mesh(model_folder, prefill=0, api_keys=str(tmp_path / "keys.json")) as mesh:
        mesh["d0"].retained = {("tenant-1", "s"): 1, ("tenant-2", "s"): 1}
        metadata = (("authorization", "Bearer key-1"),)
        assert (await mesh.stub.ReleaseSession(release(), metadata=metadata)).num_blocks == 1
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await mesh.stub.ReleaseSession(release(tenant="tenant-2"), metadata=metadata)
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await mesh.stub.ReleaseSession(release())
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert mesh["d0"].retained == {("tenant-2", "s"): 1}


async def test_a_worker_that_has_said_that_it_ends_is_asked_and_counted_no_more(model_folder: Path) -> None:
    async with running_mesh(model_folder, prefill=0, decode=3) as mesh:
        fleet = mesh.router.core.fleet
        mesh["d0"].retained, mesh["d1"].draining = {("", "s"): 2}, True
        await eventually(lambda: len(fleet.views()) == 2)
        assert (await mesh.stub.ReleaseSession(release("another"))).num_unreachable == 0
        assert len(mesh["d1"].released) == 1  # it ends soon, and has its blocks until then
        for name in ("d1", "d2"):
            await mesh[name].kill()
        await eventually(lambda: sum(worker.current is not None for worker in fleet.workers.values()) == 1)
        assert (await mesh.stub.ReleaseSession(release())).num_unreachable == 1  # d2 has said nothing: it may be out of reach
        fleet.workers[mesh["d2"].address].static = False  # nor has the registry a worker there
        assert (await mesh.stub.ReleaseSession(release())).num_unreachable == 0


async def test_workers_that_cannot_retain_are_not_asked(model_folder: Path) -> None:
    workers = [StubWorker("d0", (DECODE,)), StubWorker("d1", (DECODE,), lacks=(worker_pb2.ENGINE_LACK_RETENTION,))]
    async with mesh_of(model_folder, workers) as mesh:
        await mesh.stub.ReleaseSession(release())
        assert [len(worker.released) for worker in workers] == [1, 0]


async def test_few_releases_ask_workers_at_a_time_and_few_of_one_tenant_wait(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_mesh(model_folder, prefill=0) as mesh:
        monkeypatch.setattr(context, "RELEASE_TIMEOUT_S", 30.0)
        worker, releases = mesh["d0"], mesh.router.core.releases
        worker.release_mute = True
        tasks = [asyncio.ensure_future(mesh.stub.ReleaseSession(release(tenant="flood"))) for _ in range(40)]
        places = context.MAX_RELEASES + context.MAX_WAITING_OF_TENANT
        await eventually(lambda: sum(task.done() for task in tasks) == 40 - places)
        tasks.append(asyncio.ensure_future(mesh.stub.ReleaseSession(release(tenant="calm"))))
        await eventually(lambda: releases._asked._num_waiting == context.MAX_WAITING_OF_TENANT + 1)
        assert worker.released == [("flood", "s")] * context.MAX_RELEASES
        refusals = [task.exception() for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await eventually(lambda: not releases._asked._num_waiting and not releases._asked._places.locked())
        worker.release_mute, worker.retained = False, {("flood", "s"): 1}
        assert (await mesh.stub.ReleaseSession(release(tenant="flood"))).num_blocks == 1
    codes = [refusal.code() for refusal in refusals if isinstance(refusal, grpc.aio.AioRpcError)]
    assert codes == [grpc.StatusCode.RESOURCE_EXHAUSTED] * (40 - places)


async def test_turns_are_bounded_over_all_tenants() -> None:
    turns = context.ReleaseTurns(3, 2)
    entered: list[str] = []
    leave = asyncio.Event()

    async def take(tenant: str) -> None:
        async with turns.turn(tenant):
            entered.append(tenant)
            await leave.wait()

    names = ["a"] * (context.MAX_RELEASES + 2) + ["b", "c"]
    tasks = [asyncio.create_task(take(name)) for name in names]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert entered == ["a"] * context.MAX_RELEASES
    assert [task.done() for task in tasks[-2:]] == [False, True]  # two of a and one of b wait
    leave.set()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(each) for each in done if each is not None] == [ResourceExhausted] and entered[-1] == "b"


# The last request of a session: all workers release it.


def three_workers() -> list[StubWorker]:
    """The first two hold blocks of turns before, the last is no part of anything."""
    workers = [StubWorker("p0", (PREFILL,)), StubWorker("d0", (DECODE,)), StubWorker("d1", (DECODE,))]
    workers[0].retained, workers[1].retained, workers[2].retained = {("", "s"): 15}, {("", "s"): 3}, {}
    return workers


async def test_all_workers_release_a_session_when_its_last_request_has_ended(model_folder: Path) -> None:
    workers = three_workers()
    async with mesh_of(model_folder, workers) as mesh:
        await mesh.generate(asked(mode=LOCAL, kv_retention_s=60))
        await mesh.until_whole()
        assert [worker.released for worker in workers] == [[], [], []]
        await mesh.generate(asked(mode=LOCAL, session_final=True))
        await mesh.until_whole()
        assert [worker.released for worker in workers] == [[("", "s")]] * 3
    assert [worker.retained for worker in workers] == [{}, {}, {}]


async def test_a_last_request_that_is_cancelled_or_fails_releases_its_session(model_folder: Path) -> None:
    workers = three_workers()
    for worker in workers:
        worker.pause_at = 2
    async with mesh_of(model_folder, workers, max_resubmissions=0) as mesh:
        call = mesh.stub.Generate(asked(mode=LOCAL, session_final=True))
        await eventually(lambda: any(held.is_paused for worker in workers for held in worker.held.values()))
        call.cancel()
        await mesh.until_whole()
        assert [worker.released for worker in workers] == [[("", "s")]] * 3
        failing = asyncio.create_task(mesh.generate(asked("t", mode=LOCAL, session_final=True)))
        await eventually(lambda: any(held.is_paused for worker in workers for held in worker.held.values()))
        (busy,) = [worker for worker in workers if worker.held]
        busy.fail(next(iter(busy.held)), grpc.StatusCode.UNAVAILABLE)
        with pytest.raises(grpc.aio.AioRpcError):
            await failing
        await mesh.until_whole()
        assert [worker.released for worker in workers] == [[("", "s"), ("", "t")]] * 3
        assert len(mesh.router.core.releases) == 0


async def test_a_last_request_that_no_worker_had_releases_nothing_since_it_comes_again(model_folder: Path) -> None:
    worker = StubWorker("d0", (DECODE,), pause_at=2, retained={("", "s"): 1})
    async with mesh_of(model_folder, [worker], max_inflight=1, max_queued=0) as mesh:
        running = asyncio.create_task(mesh.generate(request(mode=LOCAL)))
        await eventually(lambda: any(held.is_paused for held in worker.held.values()))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await mesh.generate(asked(mode=LOCAL, session_final=True))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        worker.resume.set()
        await running
        await mesh.until_whole()
        assert worker.released == []


async def test_a_router_that_ends_releases_what_has_ended_before(model_folder: Path) -> None:
    workers = three_workers()
    async with mesh_of(model_folder, workers) as mesh:
        await mesh.generate(asked(mode=LOCAL, session_final=True))
    assert [worker.released for worker in workers] == [[("", "s")]] * 3


async def test_an_ended_session_that_waits_is_released_once_and_others_are_bounded(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_mesh(model_folder, prefill=0) as mesh:
        monkeypatch.setattr(context, "RELEASE_TIMEOUT_S", 30.0)
        releases, worker = mesh.router.core.releases, mesh["d0"]
        releases._ended = context.ReleaseTurns(2, 2)
        worker.release_mute = True
        names = [str(number) for number in range(context.MAX_RELEASES)]
        for name in names:
            releases.release_ended("", name, "tiny")
        await eventually(lambda: len(worker.released) == len(names))
        for name in ("x", "x", "y", "x", "z"):
            releases.release_ended("", name, "tiny")
        await eventually(lambda: len(mesh.router.core.background) == len(names) + 2)
        assert releases._waiting == {("", "x", "tiny"), ("", "y", "tiny")}
        assert (await asyncio.wait_for(asyncio.shield(_release_elsewhere(mesh)), 10)).num_unreachable == 0
        await mesh.router.core.background.finish(0.0)
    assert releases._waiting == set()


async def _release_elsewhere(mesh: Mesh) -> mesh_pb2.ReleaseSessionResponse:
    """A client's release has places of its own."""
    mesh["d0"].release_mute = False
    return await mesh.stub.ReleaseSession(release("asked"))


# A release reaches the requests that the router still has.


async def test_a_request_that_waits_retains_nothing_once_its_session_is_released(model_folder: Path) -> None:
    worker = StubWorker("d0", (DECODE,), pause_at=2, retained={})
    async with mesh_of(model_folder, [worker], max_inflight=1) as mesh:
        core = mesh.router.core
        running = asyncio.create_task(mesh.generate(request(mode=LOCAL)))
        await eventually(lambda: any(held.is_paused for held in worker.held.values()))
        ours = asyncio.create_task(mesh.generate(asked(mode=LOCAL, kv_retention_s=60)))
        theirs = asyncio.create_task(mesh.generate(asked("t", mode=LOCAL, kv_retention_s=60)))
        tenants = asyncio.create_task(mesh.generate(asked(mode=LOCAL, kv_retention_s=60, tenant="another")))
        await eventually(lambda: core.flow_control.admission.num_queued == 3)
        await mesh.stub.ReleaseSession(release())
        worker.resume.set()
        await asyncio.gather(running, ours, theirs, tenants)
        assert sorted((each.tenant, each.session_id, each.kv_retention_s) for each in told_by(worker)) == [
            ("", "", 0), ("", "s", 0), ("", "t", 60), ("another", "s", 60),
        ]  # fmt: skip
        await mesh.until_whole()
        assert len(core.sessions) == 2 and len(core.releases) == 0
        await mesh.generate(asked(mode=LOCAL, kv_retention_s=60))  # it goes on after all
        assert told_by(worker)[-1].kv_retention_s == 60 and len(core.sessions) == 3


def told_by(worker: StubWorker) -> list[common_pb2.TokenRequest]:
    return [submit.request for submit in worker.submits]


async def test_a_request_that_is_sent_again_retains_nothing_once_its_session_is_released(model_folder: Path) -> None:
    async with running_mesh(model_folder, prefill=0, decode=2) as mesh:
        workers = [mesh["d0"], mesh["d1"]]
        for worker in workers:
            worker.pause_at = 2
        running = asyncio.create_task(mesh.generate(asked(mode=LOCAL, kv_retention_s=60)))
        await eventually(lambda: any(held.is_paused for worker in workers for held in worker.held.values()))
        (first,) = [worker for worker in workers if worker.held]
        (second,) = [worker for worker in workers if worker is not first]
        second.pause_at = None
        await mesh.stub.ReleaseSession(release(model="tiny"))
        first.fail(next(iter(first.held)), grpc.StatusCode.UNAVAILABLE)
        assert (await running).timings.num_resubmissions == 1
        assert [each.kv_retention_s for each in (*told_by(first), *told_by(second))] == [60, 0]
        await mesh.until_whole()
        assert len(mesh.router.core.sessions) == 0


async def test_a_release_for_another_model_leaves_open_requests_alone(model_folder: Path) -> None:
    async with running_mesh(model_folder, prefill=0) as mesh:
        core, state = mesh.router.core, SessionState("", "s", "tiny")
        core.releases.enter(state)
        await core.releases.release("", "s", "other")
        assert not state.is_released
        await core.releases.release("", "s", "tiny")
        assert state.is_released
        core.releases.leave(state)
        core.releases.leave(state)
        assert len(core.releases) == 0


@pytest.mark.parametrize(
    "key",
    [
        "x-pdmesh-session-id", "x-pdmesh-kv-retention-s", "x-pdmesh-session-final", "x-pdmesh-priority-hint", "x-pdmesh-tenant",
        "x-pdmesh-slo-ttft-ms", "x-llm-d-slo-tpot-ms",
    ],
)  # fmt: skip
@pytest.mark.asyncio(loop_scope="module")
async def test_two_values_of_one_key_are_refused_by_it(mesh: Mesh, key: str) -> None:
    same = mesh.stub.Generate(request(mode=LOCAL), metadata=((key, "1"), (key, "1"), ("x-pdmesh-session-id", "1")))
    assert [message async for message in same]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in mesh.stub.Generate(request(), metadata=((key, "1"), (key, "0"))):
            pass
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (refused.value.details() or "").startswith(f"{key}: is there twice")
