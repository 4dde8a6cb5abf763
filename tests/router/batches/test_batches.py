"""Files and batches by openai's own client, against a router with stub workers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest
import pytest_asyncio

from pdmesh.v1 import common_pb2
from tests.router.api_keys import add_key
from tests.router.batches.conftest import batch_mesh, batch_when, begin, ended, jsonl, line, lines_of, settings, text_for, upload
from tests.router.mesh import Mesh, running_mesh
from tests.router.openai.conftest import client_of, url
from tests.support.waiting import eventually

Served = tuple[Mesh, openai.AsyncOpenAI]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with batch_mesh(model_folder, tmp_path_factory.mktemp("batches")) as (mesh, client):
        yield mesh, client
        await mesh.until_whole()


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_batch_from_its_file_to_its_results(served: Served) -> None:
    mesh, client = served
    batch = await begin(client, [line(number) for number in range(20)], metadata={"run": "7"})
    assert batch.id.startswith("batch_") and batch.status == "validating" and batch.metadata == {"run": "7"}
    done = await ended(client, batch.id)
    assert done.status == "completed" and done.error_file_id is None and done.errors is None
    assert done.request_counts is not None and done.request_counts.model_dump() == {"total": 20, "completed": 20, "failed": 0}
    assert done.usage is not None and (done.usage.input_tokens, done.usage.output_tokens) == (20 * 40, 20 * 4)
    assert done.created_at <= (done.in_progress_at or 0) <= (done.finalizing_at or 0) <= (done.completed_at or 0)
    assert done.expires_at == done.created_at + 24 * 3600
    results = await lines_of(client, done.output_file_id)
    assert set(results) == {f"line-{number}" for number in range(20)}
    for number in range(20):
        result = results[f"line-{number}"]
        assert result["error"] is None and result["response"]["status_code"] == 200 and result["response"]["request_id"]
        assert result["response"]["body"]["choices"][0]["text"] == text_for(number)
    file = await client.files.retrieve(done.output_file_id or "")
    assert file.purpose == "batch_output" and file.filename == f"{batch.id}_output.jsonl"
    priorities = {submit.request.priority for submit in mesh["d0"].submits if submit.request.HasField("sampling")}
    assert priorities == {common_pb2.PRIORITY_BATCH}


async def test_chat_lines_run_too(served: Served) -> None:
    _, client = served
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    lines = [{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat}]
    done = await ended(client, (await begin(client, lines, endpoint="/v1/chat/completions")).id)
    results = await lines_of(client, done.output_file_id)
    assert results["a"]["response"]["body"]["object"] == "chat.completion"


async def test_a_line_may_be_of_a_session(served: Served) -> None:
    mesh, client = served
    before = len(mesh["d0"].submits)
    lines = [line(0, session_id="agent", kv_retention_s=30), line(1, nvext={"agent_hints": {"priority": 2}})]
    done = await ended(client, (await begin(client, lines)).id)
    assert done.request_counts is not None and done.request_counts.completed == 2
    told = sorted((each.request.session_id, each.request.kv_retention_s) for each in mesh["d0"].submits[before:])
    assert told == [("", 0), ("agent", 30)]


async def test_embeddings_run_too(served: Served) -> None:
    _, client = served
    lines = [{"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"model": "tiny", "input": "hello"}}]
    done = await ended(client, (await begin(client, lines, endpoint="/v1/embeddings")).id)
    results = await lines_of(client, done.output_file_id)
    assert len(results["a"]["response"]["body"]["data"][0]["embedding"]) == 4
    assert done.usage is not None and (done.usage.input_tokens, done.usage.output_tokens) == (5, 0)


async def test_lines_that_fail_are_in_the_error_file(served: Served) -> None:
    _, client = served
    done = await ended(client, (await begin(client, [line(0), line(1, top_p=7), line(2, model="other")])).id)
    assert done.status == "completed" and done.request_counts is not None
    assert done.request_counts.model_dump() == {"total": 3, "completed": 1, "failed": 2}
    assert set(await lines_of(client, done.output_file_id)) == {"line-0"}
    errors = await lines_of(client, done.error_file_id)
    assert errors["line-1"]["response"]["status_code"] == 400
    assert errors["line-1"]["response"]["body"]["error"]["param"] == "top_p"
    assert errors["line-2"]["response"]["body"]["error"]["code"] == "model_not_found"


BAD = {
    "not json": (b'{"custom_id": "a"', "invalid_json_line", None),
    "no object": (b"[1]", "invalid_json_line", None),
    "no id": (json.dumps({**line(1), "custom_id": None}).encode(), "invalid_request", "custom_id"),
    "other method": (json.dumps({**line(1), "method": "GET"}).encode(), "invalid_request", "method"),
    "other url": (json.dumps({**line(1), "url": "/v1/chat/completions"}).encode(), "mismatched_endpoint", "url"),
    "no body": (json.dumps({**line(1), "body": "text"}).encode(), "invalid_request", "body"),
    "a stream": (json.dumps(line(1, stream=True)).encode(), "invalid_request", "body.stream"),
    "unknown field": (json.dumps({**line(1), "priority": 1}).encode(), "invalid_request", "priority"),
    "the same id": (json.dumps(line(0)).encode(), "duplicate_custom_id", "custom_id"),
    "too long": (json.dumps(line(1, prompt="x" * (4 << 20))).encode() + b" " * 9000, "line_too_long", None),
}


@pytest.mark.parametrize("case", BAD)
async def test_a_bad_line_fails_the_batch_before_anything_runs(served: Served, case: str) -> None:
    mesh, client = served
    content, code, param = BAD[case]
    num_submits = len(mesh["d0"].submits)
    file = await upload(client, jsonl([line(0)]) + b"\n" + content + b"\n")
    batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    done = await ended(client, batch.id)
    assert done.status == "failed" and done.failed_at and done.output_file_id is None
    assert done.errors is not None and done.errors.data is not None
    problem = done.errors.data[0]
    assert (problem.line, problem.code, problem.param) == (3, code, param), problem
    assert len(mesh["d0"].submits) == num_submits


async def test_an_empty_file_fails(served: Served) -> None:
    _, client = served
    done = await ended(client, (await begin(client, [])).id)
    assert done.errors is not None and done.errors.data is not None and done.errors.data[0].code == "empty_file"


async def test_a_running_batch_is_cancelled(served: Served) -> None:
    mesh, client = served
    mesh["d0"].pause_at = 5
    lines = [line(number) for number in range(4)] + [line(number, max_tokens=9) for number in range(4, 30)]
    batch = await begin(client, lines)
    await batch_when(client, batch.id, lambda found: found.request_counts and found.request_counts.completed == 4)
    await eventually(lambda: any(held.is_paused for held in mesh["d0"].held.values()))
    assert (await client.batches.cancel(batch.id)).status == "cancelling"
    done = await ended(client, batch.id)
    mesh["d0"].pause_at = None
    assert done.status == "cancelled" and done.cancelling_at and done.cancelled_at
    assert set(await lines_of(client, done.output_file_id)) == {f"line-{number}" for number in range(4)}
    errors = await lines_of(client, done.error_file_id)
    assert set(errors) == {f"line-{number}" for number in range(4, 30)}
    assert {each["error"]["code"] for each in errors.values()} == {"batch_cancelled"}
    with pytest.raises(openai.ConflictError):
        await client.batches.cancel(batch.id)
    await mesh.until_whole()


async def test_what_has_not_run_when_the_window_ends_expires(served: Served) -> None:
    mesh, client = served
    mesh["d0"].pause_at = 5
    batch = await begin(client, [line(0), line(1, max_tokens=9)], completion_window="1s")
    done = await ended(client, batch.id)
    mesh["d0"].pause_at = None
    assert done.status == "expired" and done.expired_at
    errors = await lines_of(client, done.error_file_id)
    assert errors["line-1"]["error"]["code"] == "batch_expired" and errors["line-1"]["response"] is None


async def test_lists_have_pages(served: Served) -> None:
    _, client = served
    made = [(await upload(client, b"%d" % number)).id for number in range(3)]
    assert [file.id for file in (await client.files.list(limit=2)).data] == [made[2], made[1]]
    assert [file.id for file in (await client.files.list(after=made[2], limit=2)).data] == [made[1], made[0]]
    ascending = (await client.files.list(order="asc", purpose="batch", after=made[0])).data
    assert [file.id for file in ascending] == made[1:]
    for file_id in made:
        assert (await client.files.delete(file_id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(made[0])
    batches = [batch.id async for batch in client.batches.list(limit=2)]
    assert batches == sorted(batches, reverse=True) and len(batches) == len(set(batches))


async def test_a_file_that_a_batch_reads_stays(served: Served) -> None:
    mesh, client = served
    mesh["d0"].pause_at = 5
    batch = await begin(client, [line(1, max_tokens=9)])
    with pytest.raises(openai.ConflictError, match="still reads it"):
        await client.files.delete(batch.input_file_id)
    mesh["d0"].pause_at = None
    mesh["d0"].resume.set()
    await ended(client, batch.id)
    mesh["d0"].resume.clear()
    assert (await client.files.delete(batch.input_file_id)).deleted


WRONG = [
    ({"endpoint": "/v1/images/generations"}, "endpoint"),
    ({"completion_window": "soon"}, "completion_window"),
    ({"completion_window": "31d"}, "completion_window"),
    ({"metadata": {"k" * 65: "v"}}, "metadata"),
    ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after.seconds"),
]


@pytest.mark.parametrize(("wrong", "param"), WRONG)
async def test_a_wrong_field_is_named(served: Served, wrong: dict[str, object], param: str) -> None:
    _, client = served
    file = await upload(client, jsonl([line(0)]))
    body = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h", **wrong}
    with pytest.raises(openai.BadRequestError) as refused:
        await client.post("/batches", body=body, cast_to=object)
    assert (refused.value.param or "").startswith(param)


@pytest.mark.parametrize("file_id", ["file-unknown", "../../etc/passwd", "batch_" + "0" * 24, "file-" + "0" * 24])
async def test_an_unknown_id_is_404(served: Served, file_id: str) -> None:
    mesh, client = served
    with pytest.raises(openai.NotFoundError):
        await client.batches.create(input_file_id=file_id, endpoint="/v1/completions", completion_window="24h")
    async with httpx.AsyncClient() as http:
        for path in ("/v1/files/{}", "/v1/files/{}/content", "/v1/batches/{}"):
            asked = path.format(file_id.replace("/", "%2f"))
            assert (await http.get(url(mesh, asked))).status_code == 404


async def test_uploads_are_bounded_and_checked(model_folder: Path, tmp_path: Path) -> None:
    limits = {"http_batch_file_bytes": 1000, "http_batch_files": 2, "http_batch_lines": 2, "http_batch_unfinished": 1}
    async with batch_mesh(model_folder, tmp_path, **limits) as (_, client):
        with pytest.raises(openai.APIStatusError, match="http_batch_file_bytes") as large:
            await upload(client, b"x" * 1001)
        assert large.value.status_code == 413
        with pytest.raises(openai.BadRequestError, match="purpose"):
            await client.files.create(file=b"{}", purpose="fine-tune")
        with pytest.raises(openai.BadRequestError, match="expires_after"):
            await upload(client, b"{}", expires_after={"anchor": "created_at", "seconds": 5})
        kept = await upload(client, b"\n\n\n", expires_after={"anchor": "created_at", "seconds": 7200})
        assert kept.expires_at == kept.created_at + 7200 and kept.bytes == 3
        assert (await client.files.content(kept.id)).content == b"\n\n\n"
        many = await begin(client, [{"a": 1}, {"a": 2}, {"a": 3}])
        done = await ended(client, many.id)
        assert done.errors is not None and [each.code for each in done.errors.data or ()][-1] == "too_many_lines"
        with pytest.raises(openai.RateLimitError, match="http_batch_files"):
            await upload(client, b"{}")
        assert not list((tmp_path / "uploads").iterdir())


async def test_unfinished_batches_of_a_tenant_are_bounded(model_folder: Path, tmp_path: Path) -> None:
    async with batch_mesh(model_folder, tmp_path, http_batch_unfinished=1) as (mesh, client):
        mesh["d0"].pause_at = 5
        batch = await begin(client, [line(1, max_tokens=9)])
        with pytest.raises(openai.RateLimitError, match="http_batch_unfinished"):
            await begin(client, [line(2)])
        await client.batches.cancel(batch.id)
        await ended(client, batch.id)
        assert (await ended(client, (await begin(client, [line(2)])).id)).status == "completed"


async def test_tenants_see_only_their_own(model_folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    for number in (1, 2):
        add_key(keys, f"key-{number}", tenant=f"tenant-{number}")
    async with running_mesh(model_folder, api_keys=str(keys), **settings(tmp_path / "batches")) as mesh:
        async with client_of(mesh, api_key="key-1") as owner, client_of(mesh, api_key="key-2") as other:
            done = await ended(owner, (await begin(owner, [line(0)])).id)
            assert await lines_of(owner, done.output_file_id)
            assert {submit.request.tenant for submit in mesh["d0"].submits} == {"tenant-1"}
            for file_id in (done.input_file_id, done.output_file_id or ""):
                for call in (other.files.retrieve, other.files.content, other.files.delete):
                    with pytest.raises(openai.NotFoundError):
                        await call(file_id)
            for ask in (other.batches.retrieve, other.batches.cancel):
                with pytest.raises(openai.NotFoundError):
                    await ask(done.id)
            with pytest.raises(openai.NotFoundError):
                await other.batches.create(input_file_id=done.input_file_id, endpoint="/v1/completions", completion_window="24h")
            assert not (await other.files.list()).data and not (await other.batches.list()).data
        async with client_of(mesh, api_key="wrong") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.files.list()
