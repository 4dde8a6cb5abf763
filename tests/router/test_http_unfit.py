"""A request that fits no worker, over HTTP: 400 with the field to change, because clients send the same again after 429."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio

from pdmesh.runtime.errors import error_from_rpc
from tests.router.mesh import Mesh, mesh_of, request
from tests.router.stub_model import BLOCK_SIZE
from tests.router.stub_workers import DECODE, StubWorker
from tests.router.test_http_sessions import ENDPOINTS, url

pytestmark = pytest.mark.asyncio(loop_scope="module")
NUM_BLOCKS = 12
LONG = "word " * (NUM_BLOCKS * BLOCK_SIZE // 4)
MESSAGES = [{"role": "user", "content": LONG}]
TOO_LONG: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": ({"messages": MESSAGES}, "messages"),
    "/v1/completions": ({"prompt": LONG}, "prompt"),
    "/v1/responses": ({"input": LONG}, "input"),
    "/v1/messages": ({"messages": MESSAGES}, ""),
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def small(model_folder: Path) -> AsyncIterator[Mesh]:
    async with mesh_of(model_folder, [StubWorker("d0", (DECODE,), max_num_seqs=1, num_blocks=NUM_BLOCKS)], http_port=0) as mesh:
        yield mesh
        assert not mesh["d0"].submits
        await mesh.until_whole()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def http(small: Mesh) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url(small), timeout=20.0) as http:
        yield http


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_prompt_that_fits_no_worker(http: httpx.AsyncClient, path: str) -> None:
    body, param = TOO_LONG[path]
    answer = await http.post(path, json={**ENDPOINTS[path], **body})
    assert answer.status_code == 400 and "retry-after" not in answer.headers, answer.text
    _check(answer.json()["error"], param)


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_in_a_stream_the_error_says_the_same(http: httpx.AsyncClient, path: str) -> None:
    """Workers are chosen when the stream has begun, so there is no status any more."""
    body, param = TOO_LONG[path]
    answer = await http.post(path, json={**ENDPOINTS[path], **body, "stream": True})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    if path == "/v1/responses":
        assert (events[-2]["code"], events[-2]["param"]) == ("context_length_exceeded", param)
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["error"]["code"] == "context_length_exceeded"
    else:
        _check(events[-1]["error"], param)


def _check(error: dict[str, Any], param: str) -> None:
    assert "exceed the KV pool or context of every decode worker" in error["message"]
    assert error["type"] == "invalid_request_error"
    if param:
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    else:
        assert error["message"].startswith("prompt is too long: ")


async def test_more_choices_than_any_worker_runs(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json={"prompt": "hello", "n": 2, "max_tokens": 2})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "n", None), error
    assert "2 choices are more than any decode worker runs at a time" in error["message"]


async def test_over_grpc_it_is_exhausted_for_ever(small: Mesh) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await small.generate(request([70] * (NUM_BLOCKS * BLOCK_SIZE + 1)))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    found = error_from_rpc(refused.value)
    assert (found.retry_delay_s, found.reason) == (None, "context_length_exceeded")
