"""Sessions over gRPC: what workers are told, where the next turn goes, and what is released. Stub workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from pdmesh.runtime.errors import Unavailable
from pdmesh.v1 import common_pb2, mesh_pb2
from router.api import frontend
from router.config import RouterConfig
from router.routing.decisions import KEEP_S, SessionMemory
from router.tokenization.prepared_request import PreparedRequest, ServedModel, load
from tests.router.api_keys import add_key
from tests.router.mesh import Mesh, mesh_of, request, running_mesh
from tests.router.stub_workers import DECODE, PREFILL, StubWorker
from tests.router.test_prefix_index import PROMPT, Clock, incarnation, info_of
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

        async def spy(prepared: PreparedRequest, outputs: list[list[int]], worker: object) -> None:
            told_outputs.append([len(output) for output in outputs])
            await remember(prepared, outputs, worker)  # type: ignore[arg-type]

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


@pytest.mark.parametrize("at_once", [1, 2, 1000])
async def test_an_output_is_hashed_in_slices_as_workers_hash_it_whole(model: ServedModel, at_once: int) -> None:
    prepared, info, output = turn(model), info_of(A), list(range(100, 250))
    whole = replace(prepared, prompt=(*PROMPT, *output), _chains={})
    slices = list(prepared.output_names(info.identity, "float32", 16, output, at_once))
    names = [*prepared.block_names(info.identity, "float32", 16), *(name for names in slices for name in names)]
    assert names == whole.block_names(info.identity, "float32", 16)
    assert all(len(names) <= at_once for names in slices)
    assert incarnation(info).info.address == A[0]


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
    monkeypatch.setattr(frontend, "RELEASE_TIMEOUT_S", 0.3)
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
