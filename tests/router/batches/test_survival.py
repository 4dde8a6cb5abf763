"""What batches survive: a killed router, a full disk, overload, damaged state; and two routers on one folder."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest

from pdmesh.runtime.config import ConfigError
from router.api.batches import records
from router.api.batches.results import Results
from router.config import BatchConfig
from router.main import Router
from tests.router.batches.conftest import batch_mesh, batch_when, begin, ended, jsonl, line, lines_of, settings, text_for, upload
from tests.router.batches.test_parts import on_a_full_disk
from tests.router.mesh import config_for, running_router
from tests.router.stub_workers import DECODE, PREFILL, StubWorker
from tests.support.waiting import eventually


@asynccontextmanager
async def workers() -> AsyncIterator[tuple[StubWorker, StubWorker]]:
    both = StubWorker("p0", (PREFILL,)), StubWorker("d0", (DECODE,))
    for worker in both:
        await worker.start()
    try:
        yield both
    finally:
        for worker in both:
            await worker.kill()


def client_of_router(router: Router) -> openai.AsyncOpenAI:
    assert router.http is not None
    return openai.AsyncOpenAI(base_url=f"{router.http.url}/v1", api_key="none", timeout=20.0)


@asynccontextmanager
async def router_process(
    model: Path, folder: Path, both: tuple[StubWorker, ...]
) -> AsyncIterator[tuple[subprocess.Popen[str], openai.AsyncOpenAI]]:
    command = [
        sys.executable, "-m", "router", "--port", "0", "--http-port", "0", "--models", f"tiny={model}", "--exit-with-parent",
        "--workers", ",".join(worker.address for worker in both), "--http-batch-folder", str(folder),
        "--http-batch-concurrency", "3", "--policy", "least-loaded",
    ]  # fmt: skip
    process = await asyncio.to_thread(subprocess.Popen, command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready = json.loads(await asyncio.to_thread(process.stdout.readline))
        async with openai.AsyncOpenAI(base_url=f"{ready['http_url']}/v1", api_key="none", timeout=20.0) as client:
            yield process, client
    finally:
        process.kill()
        process.communicate()


def the_only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


async def test_a_killed_router_loses_what_was_in_flight_and_repeats_nothing(model_folder: Path, tmp_path: Path) -> None:
    lines = [line(number) for number in range(12)] + [line(number, max_tokens=9) for number in range(12, 30)]
    async with workers() as both:
        decode = both[1]
        decode.pause_at = 5  # the first twelve end before it
        async with router_process(model_folder, tmp_path, both) as (process, client):
            batch = await begin(client, lines)
            await batch_when(client, batch.id, lambda found: found.request_counts and found.request_counts.completed == 12)
            await eventually(lambda: sum(held.is_paused for held in decode.held.values()) == 3)
            process.kill()
            process.wait()
        first = Counter(submit.request.sampling.seed for submit in decode.submits)
        decode.pause_at = None
        async with router_process(model_folder, tmp_path, both) as (_, client):
            done = await ended(client, batch.id)
            results = await lines_of(client, done.output_file_id)
        assert done.status == "completed" and done.request_counts is not None and done.request_counts.completed == 30
        assert set(results) == {f"line-{number}" for number in range(30)}
        assert results["line-3"]["response"]["body"]["choices"][0]["text"] == text_for(3)
        assert results["line-29"]["response"]["body"]["choices"][0]["text"] == text_for(29, 9)
        submits = Counter(submit.request.sampling.seed for submit in decode.submits)
        assert all(submits[number] == 1 for number in range(12)) and sum(first[number] for number in range(12, 15)) == 3
        assert sum(submits.values()) == 30 + 3


async def test_two_routers_share_a_folder_and_each_batch_is_worked_once(model_folder: Path, tmp_path: Path) -> None:
    async with workers() as those_of_one, workers() as those_of_two:
        decoding = (those_of_one[1], those_of_two[1])
        for decode in decoding:
            decode.pause_at = 5
        configs = [config_for(model_folder, each, **settings(tmp_path)) for each in (those_of_one, those_of_two)]
        async with running_router(configs[0]) as (one, _), running_router(configs[1]) as (two, _):
            assert one.batches is not None and two.batches is not None
            async with client_of_router(one) as first, client_of_router(two) as second:
                batch = await begin(first, [line(0), line(1, max_tokens=9)])
                await batch_when(second, batch.id, lambda found: found.request_counts and found.request_counts.completed == 1)
                assert len(one.batches._works) + len(two.batches._works) == 1
                by_other = second if one.batches._works else first
                assert (await by_other.batches.cancel(batch.id)).status == "cancelling"
                done = await ended(by_other, batch.id)
                assert done.status == "cancelled" and set(await lines_of(second, done.output_file_id)) == {"line-0"}
                many = [await begin(client, [line(number) for number in range(5)]) for client in (first, second) * 3]
                for each in many:
                    done = await ended(second, each.id)
                    assert len(await lines_of(first, done.output_file_id)) == 5
        submits = Counter(submit.request.sampling.seed for decode in decoding for submit in decode.submits)
        assert submits[4] == len(many)


async def test_a_router_that_stops_leaves_its_batch_to_the_next(model_folder: Path, tmp_path: Path) -> None:
    async with workers() as both:
        config = config_for(model_folder, both, **settings(tmp_path))
        both[1].pause_at = 5
        async with running_router(config) as (one, _), client_of_router(one) as client:
            batch = await begin(client, [line(0), line(1, max_tokens=9)])
            await batch_when(client, batch.id, lambda found: found.request_counts and found.request_counts.completed == 1)
        both[1].pause_at = None
        async with running_router(config) as (two, _), client_of_router(two) as client:
            done = await ended(client, batch.id)
            assert done.error_file_id is None and len(await lines_of(client, done.output_file_id)) == 2


async def test_overload_is_waited_for(model_folder: Path, tmp_path: Path) -> None:
    async with workers() as both:
        config = config_for(model_folder, both, max_inflight=1, max_queued=0, **settings(tmp_path))
        async with running_router(config) as (router, _), client_of_router(router) as client:
            both[1].pause_at = 2
            batch = await begin(client, [line(number) for number in range(10)])
            await eventually(lambda: any(held.is_paused for held in both[1].held.values()))
            both[1].pause_at = None
            both[1].resume.set()
            done = await ended(client, batch.id)
            assert done.request_counts is not None and done.request_counts.completed == 10


async def test_overload_ends_as_an_error_when_the_time_for_retries_is_over(model_folder: Path, tmp_path: Path) -> None:
    async with workers() as both:
        config = config_for(model_folder, both, max_inflight=1, max_queued=0, **settings(tmp_path, http_batch_retry_s=0.0))
        async with running_router(config) as (router, _), client_of_router(router) as client:
            both[1].pause_at = 2
            batch = await begin(client, [line(0), line(1)])
            await batch_when(client, batch.id, lambda found: found.request_counts and found.request_counts.failed == 1)
            both[1].resume.set()
            done = await ended(client, batch.id)
            (error,) = (await lines_of(client, done.error_file_id)).values()
            assert error["response"]["status_code"] == 429 and len(await lines_of(client, done.output_file_id)) == 1


async def test_a_full_disk_fails_the_batch_in_words_and_the_router_goes_on(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with batch_mesh(model_folder, tmp_path) as (_, client):
        with monkeypatch.context() as patched:
            patched.setattr(Results, "_recovered", lambda self, path: (0, on_a_full_disk()))
            done = await ended(client, (await begin(client, [line(0)])).id)
        assert done.status == "failed" and done.errors is not None and done.errors.data is not None
        assert done.errors.data[0].code == "storage_error" and "No space left" in (done.errors.data[0].message or "")
        assert (await ended(client, (await begin(client, [line(1)])).id)).status == "completed"


async def test_an_upload_that_cannot_be_written_is_507(model_folder: Path, tmp_path: Path) -> None:
    async with batch_mesh(model_folder, tmp_path) as (_, client):
        os.rmdir(tmp_path / "uploads")
        with pytest.raises(openai.InternalServerError, match="batch folder") as refused:
            await upload(client, jsonl([line(0)]))
        assert refused.value.status_code == 507 and refused.value.code == "storage_error"
        os.mkdir(tmp_path / "uploads")
        assert (await ended(client, (await begin(client, [line(1)])).id)).status == "completed"


async def test_a_folder_that_cannot_be_written_stops_the_start(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    router = Router(config_for(model_folder, **settings(tmp_path / "file")))
    with pytest.raises(ConfigError, match="--http-batch-folder"):
        await router.start()
    await router.stop()


def test_batches_need_http(model_folder: Path) -> None:
    with pytest.raises(ValueError, match="http_batch_folder: needs HTTP"):
        config_for(model_folder, batches=BatchConfig(http_batch_folder="x"))
    with pytest.raises(ValueError, match="http_batch_lines: must be at least 1"):
        BatchConfig(http_batch_lines=0).validate()


async def test_a_broken_state_file_names_itself_and_hides_no_other(model_folder: Path, tmp_path: Path) -> None:
    async with batch_mesh(model_folder, tmp_path) as (_, client):
        bad, good = [await ended(client, (await begin(client, [line(number)])).id) for number in (0, 1)]
        state = the_only(tmp_path, f"*/batches/{bad.id}.json")
        for content in (
            b"{",
            b"[]",
            state.read_bytes().replace(b"completed", b"done"),
            state.read_bytes().replace(b'"format":1', b'"format":2'),
        ):
            state.write_bytes(content)
            with pytest.raises(openai.InternalServerError, match=f"{bad.id}.json of the batch folder is broken .*move it away"):
                await client.batches.retrieve(bad.id)
            assert [each.id for each in (await client.batches.list()).data] == [good.id]


async def test_an_input_that_is_gone_or_changed_fails_the_batch(model_folder: Path, tmp_path: Path) -> None:
    async with batch_mesh(model_folder, tmp_path, http_batch_running=1) as (mesh, client):
        mesh["d0"].pause_at = 5
        running = await begin(client, [line(0, max_tokens=9)])
        waiting = await begin(client, [line(1)])
        the_only(tmp_path, f"*/files/{waiting.input_file_id}.jsonl").unlink()
        await client.batches.cancel(running.id)
        done = await ended(client, waiting.id)
        assert done.status == "failed" and done.errors is not None and done.errors.data is not None
        assert done.errors.data[0].message == f"a file of the batch is missing: {waiting.input_file_id}.jsonl"


def test_ids_sort_by_time() -> None:
    made = [records.new_id("file-") for _ in range(100)]
    assert made == sorted(made) and len(set(made)) == 100 and all(len(each) == len("file-") + 24 for each in made)
