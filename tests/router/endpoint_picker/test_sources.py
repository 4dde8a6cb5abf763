"""Pods of an InferencePool, what becomes of endpoints when the API server says nothing, and how their metrics are read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import h11
import pytest

from router.endpoint_picker import sources
from router.endpoint_picker.sources import KeptConnection, PoolFollower, get, is_ready, ports_of, selector_of
from tests.support.waiting import eventually

POOL = {
    "spec": {
        "selector": {"matchLabels": {"pdmesh-pool": "blue", "app.kubernetes.io/name": "pdmesh-decode"}},
        "targetPorts": [{"number": 8000}, {"number": 8001}],
    }
}


def pod(ip: str = "10.0.0.1", *, ready: str = "True", ends: str | None = None) -> Any:
    conditions = [SimpleNamespace(type="PodScheduled", status="True"), SimpleNamespace(type="Ready", status=ready)]
    return SimpleNamespace(
        metadata=SimpleNamespace(deletion_timestamp=ends), status=SimpleNamespace(pod_ip=ip, conditions=conditions)
    )


def test_selector_and_ports() -> None:
    assert selector_of(POOL) == "app.kubernetes.io/name=pdmesh-decode,pdmesh-pool=blue"
    assert ports_of(POOL) == [8000, 8001]


@pytest.mark.parametrize("spec", [{}, {"selector": {}}, {"selector": {"matchLabels": {}}}, {"selector": {"matchLabels": "x"}}])
def test_a_pool_that_selects_everything_is_refused(spec: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="matchLabels"):
        selector_of({"spec": spec})


@pytest.mark.parametrize("ports", [[], [{}], [{"number": "http"}], [{"number": 0}], [{"number": 70000}]])
def test_ports_that_are_none_are_refused(ports: list[object]) -> None:
    with pytest.raises(ValueError, match="targetPorts"):
        ports_of({"spec": {"targetPorts": ports}})


def test_only_ready_pods_that_stay_take_requests() -> None:
    assert is_ready(pod())
    assert not is_ready(pod(ready="False"))
    assert not is_ready(pod(ip=""))
    assert not is_ready(pod(ends="2026-01-01T00:00:00Z"))
    assert not is_ready(SimpleNamespace(metadata=SimpleNamespace(deletion_timestamp=None), status=None))


async def test_an_api_server_that_fails_changes_nothing() -> None:
    answers: list[list[str] | None] = [["10.0.0.2:80", "10.0.0.1:80"], None, None, ["10.0.0.1:80"]]
    found: list[list[str]] = []
    asked = 0

    def listed() -> list[str]:
        nonlocal asked
        answer = answers[min(asked, len(answers) - 1)]
        asked += 1
        if answer is None:
            raise RuntimeError("no route to host")
        return answer

    follower = PoolFollower(listed, found.append, 0.01)
    follower.start()
    await eventually(lambda: asked >= 6)
    await follower.stop()
    assert found == [["10.0.0.1:80", "10.0.0.2:80"], ["10.0.0.1:80"]], "told once each, in order"


async def answer_of(said: bytes) -> tuple[int, bytes]:
    """Ask a server that says this, whatever it is asked, and closes."""

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)
        writer.close()

    async with await asyncio.start_server(say, "127.0.0.1", 0) as server:
        return await get(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", "/metrics")


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", (200, b"abc")),
        (b"HTTP/1.0 200 OK\r\n\r\nuntil it closes", (200, b"until it closes")),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n2\r\nde\r\n0\r\na: b\r\n\r\n", (200, b"abcde")),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", (503, b"")),
    ],
)
async def test_metrics_are_read_however_http_frames_them(said: bytes, answer: tuple[int, bytes]) -> None:
    assert await answer_of(said) == answer


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 30\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nno number\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"HTTP/1.1 200 OK\r\n" + b"a: " + b"b" * (1 << 18),
    ],
)
async def test_what_is_no_whole_answer_is_an_error(said: bytes) -> None:
    with pytest.raises(h11.RemoteProtocolError):
        await answer_of(said)


async def test_an_answer_without_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_ANSWER_BYTES", 1000)
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        await answer_of(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 1001)


WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"
LAST = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 3\r\n\r\nabc"
CUT = b"HTTP/1.1 200 OK\r\nContent-Length: 30\r\n\r\nabc"


@asynccontextmanager
async def kept(*connections: Sequence[bytes]) -> AsyncIterator[tuple[KeptConnection, list[int]]]:
    """One to a server that says this on its first, second … connection, and closes each then; how many requests each had."""
    requests: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(requests)
        requests.append(0)
        for said in connections[number]:
            await reader.readuntil(b"\r\n\r\n")
            requests[number] += 1
            writer.write(said)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        connection = KeptConnection(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        try:
            yield connection, requests
        finally:
            connection.close()


async def test_readings_share_a_connection() -> None:
    async with kept([WHOLE] * 3) as (connection, requests):
        assert [await connection.get("/metrics") for _ in range(3)] == [(200, b"abc")] * 3
        assert requests == [3]


async def test_a_server_that_has_closed_meanwhile_is_asked_again() -> None:
    async with kept([WHOLE], [WHOLE, LAST], [WHOLE]) as (connection, requests):
        assert [await connection.get("/metrics") for _ in range(4)] == [(200, b"abc")] * 4
        assert requests == [1, 2, 1]


async def test_after_half_an_answer_the_next_one_is_that_of_its_own_request() -> None:
    async with kept([WHOLE, CUT], [CUT], [WHOLE]) as (connection, requests):
        await connection.get("/metrics")
        with pytest.raises(h11.RemoteProtocolError):
            await connection.get("/metrics")
        assert await connection.get("/metrics") == (200, b"abc")
        assert requests == [2, 1, 1]


async def test_after_a_timeout_the_next_reading_has_a_connection_of_its_own() -> None:
    nothing, never = b"", b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nlate"
    async with kept([WHOLE, nothing, never], [WHOLE]) as (connection, _):
        await connection.get("/metrics")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await connection.get("/metrics")
        assert await connection.get("/metrics") == (200, b"abc")
