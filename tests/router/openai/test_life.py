"""Clients that leave or read slowly, connections, drain, TLS: nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import httpx2
import openai
import pytest

from pdmesh.platform.capabilities import USER_TIMEOUT
from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.rpc.certificates import make_certificates
from pdmesh.runtime.rpc.tls import TlsConfig
from router.api.http import connection
from router.api.http.server import HttpServer
from router.config import RouterConfig
from router.main import Router
from tests.router import stub_model
from tests.router.mesh import PROMPT, Mesh, config_for, expected, running_mesh, running_router
from tests.router.openai.conftest import client_of, url
from tests.support.certificates import copied
from tests.support.waiting import eventually

BODY: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 20, "seed": 5}


async def _post(mesh: Mesh, body: dict[str, Any], *, window: int = 0) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request whose answer the caller may read, or not. `window`: bytes of the socket's receive buffer."""
    assert mesh.router.http is not None
    host, port = mesh.router.http.url.removeprefix("http://").split(":")
    sock = socket.socket()
    if window:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
    content = json.dumps(body).encode()
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    return reader, writer


@pytest.mark.parametrize("stage", ["prefill", "decode", "whole"])
async def test_a_client_that_leaves_frees_both_legs_at_once(model_folder: Path, stage: str) -> None:
    async with running_mesh(model_folder, http_port=0) as mesh:
        mesh["d0"].pause_at = 5
        if stage == "prefill":
            mesh["p0"].prefill_plan = ["mute"]
        reader, writer = await _post(mesh, {**BODY, "stream": stage != "whole"})
        if stage == "decode":
            await reader.readuntil(b"data: ")
        await eventually(lambda: mesh["p0"].prefills and mesh["d0"].held)
        writer.close()
        await eventually(lambda: mesh["d0"].cancels, timeout_s=2)
        assert mesh["p0"].num_cancelled_prefills == (stage == "prefill")
        await mesh.until_whole()


async def test_openais_client_can_close_a_stream(model_folder: Path) -> None:
    async with running_mesh(model_folder, http_port=0) as mesh, client_of(mesh) as client:
        mesh["d0"].pause_at = 5
        stream = await client.completions.create(**BODY, stream=True)
        await anext(aiter(stream))
        await stream.close()
        await eventually(lambda: mesh["d0"].cancels, timeout_s=2)
        await mesh.until_whole()


async def test_one_of_several_prompts_that_fails_ends_the_others(model_folder: Path) -> None:
    async with running_mesh(model_folder, http_port=0, max_inflight=2, max_queued=0) as mesh, client_of(mesh) as client:
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model="tiny", prompt=["a", "b", "c"], max_tokens=20)
        await mesh.until_whole()


LARGE: Any = {  # tens of megabytes as events
    "model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1900, "n": 8, "stream": True,
    "logprobs": True, "top_logprobs": 20,
}  # fmt: skip


async def test_a_slow_reader_is_bounded_by_the_routers_buffer(model_folder: Path) -> None:
    async with running_mesh(model_folder, http_port=0, max_buffered_tokens=500) as mesh, client_of(mesh) as client:
        reader, writer = await _post(mesh, LARGE, window=4096)
        assert (await client.completions.create(**BODY)).choices[0].text == stub_model.text_of(expected(20))
        await eventually(lambda: mesh["d0"].cancels)
        got = b""
        while piece := await reader.read(1 << 20):
            got += piece
            if b"0\r\n\r\n" in piece[-5:]:
                break
        last = got.rpartition(b"data: ")[2]
        assert b"reads too slowly" in last and b"rate_limit_exceeded" in last and b"[DONE]" not in last
        writer.close()
        await mesh.until_whole()


async def test_who_reads_nothing_is_cut_off(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "STALLED_S", 0.3)
    async with running_mesh(model_folder, http_port=0) as mesh:
        _, writer = await _post(mesh, LARGE, window=4096)
        await eventually(lambda: mesh["d0"].submits)
        await mesh.until_whole()
        assert mesh.router.http is not None
        await eventually(lambda: not _connections(mesh))
        writer.close()


def _connections(mesh: Mesh) -> list[Any]:
    assert mesh.router.http is not None
    return list(mesh.router.http._server.server_state.connections)


@pytest.mark.skipif(not USER_TIMEOUT.is_there, reason="the kernel does not end such a connection")
async def test_a_whole_answer_that_nobody_takes_is_dropped(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "STALLED_S", 0.5)
    async with running_mesh(model_folder, http_port=0) as mesh:
        _, writer = await _post(mesh, {**LARGE, "stream": False, "max_tokens": 1000}, window=4096)
        await eventually(lambda: any(one.transport.get_write_buffer_size() for one in _connections(mesh)))
        await eventually(lambda: not _connections(mesh))
        writer.close()


async def test_events_do_not_wait_for_acknowledgements(model_folder: Path) -> None:
    async with running_mesh(model_folder, http_port=0) as mesh:
        _, writer = await _post(mesh, BODY)
        await eventually(lambda: _connections(mesh))
        for connected in _connections(mesh):
            sock = connected.transport.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()


async def test_drain_lets_streams_finish_and_refuses_new_ones(model_folder: Path) -> None:
    async with running_mesh(model_folder, http_port=0) as mesh, client_of(mesh) as client:
        mesh["d0"].pause_at = 5
        stream = await client.completions.create(**BODY, stream=True)
        state = asyncio.create_task(client.completions.create(**BODY))
        await eventually(lambda: len(mesh["d0"].held) == 2)
        draining = asyncio.create_task(mesh.router.frontend.drain(5.0))
        await asyncio.sleep(0)
        with pytest.raises(openai.InternalServerError) as refused:
            await client.completions.create(**BODY, stream=True)
        assert refused.value.status_code == 503
        assert refused.value.response.headers["connection"] == "close"
        async with httpx.AsyncClient() as http:
            assert (await http.get(url(mesh, "/health"))).status_code == 503
        mesh["d0"].resume.set()
        assert "".join([chunk.choices[0].text async for chunk in stream]) == stub_model.text_of(expected(20))
        assert (await state).choices[0].text == stub_model.text_of(expected(20))
        await draining
        await mesh.until_whole()


async def test_what_a_drain_cannot_wait_for_ends_with_an_error(model_folder: Path) -> None:
    async with running_mesh(model_folder, http_port=0) as mesh, client_of(mesh) as client:
        mesh["d0"].pause_at = 5
        stream = await client.completions.create(**BODY, stream=True)
        texts: list[str] = []
        reading = asyncio.create_task(_read(stream, texts))
        await eventually(lambda: len("".join(texts)) == 5)
        await mesh.router.frontend.drain(0.05)
        with pytest.raises(openai.APIError) as broken:
            await reading
        assert broken.value.code == "service_unavailable"
        await mesh.until_whole()


async def _read(stream: AsyncIterator[Any], texts: list[str]) -> None:
    async for chunk in stream:
        texts += [chunk.choices[0].text]


async def test_nothing_is_left_after_stop(model_folder: Path) -> None:
    """Not of idle connections, half requests, uploads that stall or readers that do not read."""
    tasks, descriptors = len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))
    async with running_mesh(model_folder, http_port=0) as mesh:
        address = url(mesh)
        writers = [(await _post(mesh, LARGE, window=4096))[1]]
        host, port = address.removeprefix("http://").split(":")
        for sent in (
            b"",
            b"POST /v1/comp",
            b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\nhost: x\r\ncontent-length: 9\r\n\r\n{",
        ):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            writers.append(writer)
        async with httpx.AsyncClient() as http:
            await http.get(f"{address}/health")
            await eventually(lambda: len(_connections(mesh)) == 5)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(host, int(port))
    for writer in writers:
        writer.close()
    await eventually(lambda: len(asyncio.all_tasks()) <= tasks, timeout_s=5)
    await eventually(lambda: len(os.listdir("/proc/self/fd")) <= descriptors + 2, timeout_s=5)


async def test_a_port_in_use_is_a_setting_to_change(model_folder: Path) -> None:
    async with running_router(config_for(model_folder, http_port=0)) as (router, _):
        assert router.http is not None
        taken = int(router.http.url.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"port {taken} for HTTP: Address already in use"):
            await HttpServer(lambda *_: asyncio.sleep(0), "127.0.0.1", taken).start()
    again = HttpServer(lambda *_: asyncio.sleep(0), "127.0.0.1", taken)
    await again.start()  # at once: a router that comes back is found where it was
    await again.stop()


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"http_port": 70000}, "http_port"),
        ({"http_port": 50051, "port": 50051}, "http_port"),
    ],
)
def test_settings_are_checked(model_folder: Path, wrong: Any, field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        config_for(model_folder, **wrong)


@pytest.mark.parametrize("clients", ["require", "none"])
async def test_https(model_folder: Path, tmp_path: Path, clients: str) -> None:
    """With the mesh's certificates; who has none is refused where gRPC refuses him; rotated files count at once."""
    ours, other = (make_certificates(tmp_path / name) for name in ("ours", "other"))
    (tmp_path / "files").mkdir()
    files = copied(ours, tmp_path / "files")
    config = config_for(model_folder, http_port=0, tls=files, tls_client_auth=clients)
    async with _running(config) as address:
        assert address.startswith("https://")
        assert await _models(address, ours) == ["tiny"]
        if clients == "none":
            assert await _models(address, ours, show=False) == ["tiny"]
        else:
            with pytest.raises(openai.APIConnectionError):
                await _models(address, ours, show=False)
            with pytest.raises(openai.APIConnectionError):
                await _models(address, other, accuracy=ours.tls_ca)
        with pytest.raises(openai.APIConnectionError):
            await _models(address.replace("https", "http"), ours)
        copied(other, tmp_path / "files")
        assert await _models(address, other) == ["tiny"]


@asynccontextmanager
async def _running(config: RouterConfig) -> AsyncIterator[str]:
    """The router alone: the test's gRPC client speaks no TLS."""
    router = Router(config)
    await router.start()
    try:
        assert router.http is not None
        yield router.http.url
    finally:
        await router.stop()


async def _models(address: str, tls: TlsConfig, *, show: bool = True, accuracy: str = "") -> list[str]:
    context = ssl.create_default_context(cafile=accuracy or tls.tls_ca)
    if show:
        context.load_cert_chain(tls.tls_cert, tls.tls_key)
    http = httpx2.AsyncClient(verify=context)
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, http_client=http) as client:
        return [model.id async for model in client.models.list()]


SLOWLY_S = 0.3
PARTS = ("route", "admission_queue", "reserve", "prefill_queue", "prefill_compute", "first_token_return", "retry")


async def test_time_counts_from_when_a_request_is_whole(model_folder: Path) -> None:
    """A body that comes slowly, and behind it on the same connection another request, which waits for its turn."""
    async with running_mesh(model_folder, http_port=0) as mesh:
        assert mesh.router.http is not None
        host, port = mesh.router.http.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        content = json.dumps(BODY).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        message = head % len(content) + content
        writer.write(message[:-10])
        await asyncio.sleep(SLOWLY_S)
        writer.write(message[-10:] + message)
        for _ in range(2):
            answer = await _answer(reader)
            timings = answer["pdmesh"][0]["timings"]
            assert 0 < timings["ttft_ns"] <= timings["total_ns"] < SLOWLY_S * 1e9
            parts = sum(timings[f"{part}_ns"] for part in PARTS)
            assert parts == pytest.approx(timings["ttft_ns"], abs=5e6)
        writer.close()


async def _answer(reader: asyncio.StreamReader) -> dict[str, Any]:
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)).decode().lower()
    assert head.startswith("http/1.1 200")
    length = int(head.split("content-length: ")[1].split("\r\n")[0])
    state: dict[str, Any] = json.loads(await reader.readexactly(length))
    return state
