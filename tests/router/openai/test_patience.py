"""Raw sockets that send nothing, half a head, half a body or too many connections: each is cut off, and others are served."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from router.api.http import body, server
from tests.router.mesh import Mesh, running_mesh
from tests.router.openai.conftest import url
from tests.support.waiting import eventually

HALF_BODY = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"
DEADLINE_S = 0.4


@pytest_asyncio.fixture
async def mesh(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Mesh]:
    for owner, name in ((server, "HEAD_S"), (server, "REST_S"), (body, "READ_TIMEOUT_S")):
        monkeypatch.setattr(owner, name, DEADLINE_S)
    async with running_mesh(model_folder, http_port=0, http_max_connections=6) as mesh:
        yield mesh


async def connect(mesh: Mesh) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = url(mesh).removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


def num_connections(mesh: Mesh) -> int:
    assert mesh.router.http is not None
    return len(mesh.router.http._server.server_state.connections)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", 408),
        (b"GET /health/live HT", 408),
        (b"GET /health/live HTTP/1.1\r\nhost: x\r\nx-a: ", 408),
        (HALF_BODY, 408),
    ],
)
async def test_who_stops_half_way_is_cut_off(mesh: Mesh, sent: bytes, status: int) -> None:
    reader, writer = await connect(mesh)
    began = time.monotonic()
    writer.write(sent)
    answer = await asyncio.wait_for(reader.read(), 5)
    assert time.monotonic() - began >= DEADLINE_S * 0.9
    head, _, content = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status) and b"x-request-id: " in head.lower()
    assert json.loads(content)["error"]["type"] == "invalid_request_error"
    writer.close()
    await eventually(lambda: num_connections(mesh) == 0)


@pytest.mark.parametrize("first", [b"", b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"], ids=["new", "kept alive"])
async def test_a_byte_now_and_then_buys_no_time(mesh: Mesh, first: bytes) -> None:
    reader, writer = await connect(mesh)
    if first:
        writer.write(first)
        assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b'live"}'), 5)
    began, piece = time.monotonic(), b"GET /health/live HTTP/1.1\r\nx: " + b"y" * 1000
    reading = asyncio.create_task(reader.read())
    for byte in piece:
        if reading.done():
            break
        writer.write(bytes([byte]))
        await asyncio.sleep(0.05)
    assert b" 408 " in await asyncio.wait_for(reading, 5)
    assert time.monotonic() - began < DEADLINE_S + 3
    writer.close()


async def test_what_is_left_of_a_refused_body_has_an_end(mesh: Mesh) -> None:
    """Answered before its body has come: who keeps sending it is cut off."""
    reader, writer = await connect(mesh)
    writer.write(HALF_BODY.replace(b"application/json", b"text/plain").replace(b"99", b"9999999"))
    reading, began = asyncio.create_task(reader.read()), time.monotonic()
    while not reading.done() and time.monotonic() - began < 5:
        writer.write(b"a")
        await asyncio.sleep(0.05)
    assert reading.done()
    assert isinstance(reading.exception(), ConnectionError) or b" 415 " in reading.result()
    writer.close()
    await eventually(lambda: num_connections(mesh) == 0)


async def test_idle_between_requests_is_no_fault(mesh: Mesh) -> None:
    async with httpx.AsyncClient() as http:
        assert (await http.get(url(mesh, "/health/live"))).status_code == 200
        await asyncio.sleep(DEADLINE_S * 1.5)
        assert num_connections(mesh) == 1
        assert (await http.get(url(mesh, "/health/live"))).status_code == 200
        assert num_connections(mesh) == 1


async def test_a_long_answer_is_not_cut_off(mesh: Mesh) -> None:
    mesh["d0"].pause_at = 3
    async with httpx.AsyncClient() as http:
        asking = asyncio.create_task(
            http.post(url(mesh, "/v1/completions"), json={"model": "tiny", "prompt": "abc" * 20, "max_tokens": 9})
        )
        await asyncio.sleep(DEADLINE_S * 2)
        assert not asking.done()
        mesh["d0"].resume.set()
        assert (await asking).status_code == 200


async def test_more_connections_than_allowed_are_refused(mesh: Mesh) -> None:
    held = [await connect(mesh) for _ in range(6)]
    await eventually(lambda: num_connections(mesh) == 6)
    reader, writer = await connect(mesh)
    answer = await asyncio.wait_for(reader.read(), 5)
    assert answer.startswith(b"HTTP/1.1 503 ") and b"http_max_connections" in answer and b"x-request-id" in answer.lower()
    writer.close()
    for _, other in held:
        other.close()
    await eventually(lambda: num_connections(mesh) == 0)
    async with httpx.AsyncClient() as http:
        assert (await http.get(url(mesh, "/health/live"))).status_code == 200
