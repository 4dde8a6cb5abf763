"""HTTP and server-sent events: connections are kept, broken answers are errors, never silence."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.loadtest.record import Outcome
from pdmesh.loadtest.targets import openai
from pdmesh.loadtest.targets.http import BaseUrl, HttpClient, HttpError
from pdmesh.loadtest.targets.openai import OpenAiSettings, OpenAiTarget, SseParser
from pdmesh.loadtest.targets.target import Ask, Done, Event, Said, TargetError, Tokens
from pdmesh.loadtest.workload import Segment, TrafficClass
from pdmesh.runtime.rpc.tls import ClientTlsConfig
from tests.support.certificates import new_authority

SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
TOKEN = b'data: {"choices": [{"text": "a"}]}\n\n'
DONE = b"data: [DONE]\n\n"


class Scripted:
    """Answers each request with the same bytes; closes the connection after `per_connection` of them."""

    def __init__(self, answer: bytes, per_connection: int = 1_000_000) -> None:
        self._answer = answer
        self._per_connection = per_connection
        self.num_connections = 0
        self.bodies: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            for _ in range(self._per_connection):
                head = await reader.readuntil(b"\r\n\r\n")
                length = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b":0")
                self.bodies.append(await reader.readexactly(int(length.partition(b":")[2])))
                writer.write(self._answer)
                if b"connection: close" in self._answer.lower():
                    return
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(script: Scripted) -> AsyncIterator[str]:
    server = await asyncio.start_server(script, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        server.close()


def reply(status: str, body: bytes) -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


async def ask(url: str, settings: OpenAiSettings | None = None) -> list[Event]:
    target = OpenAiTarget(url, settings or OpenAiSettings(model="m"))
    prepared = target.prepare(Ask("id-0-0", 1, TrafficClass(), (Said((Segment("0", 3),)),), 5, 10.0))
    try:
        return [event async for event in target.stream(prepared)]
    finally:
        await target.close()


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1), max_size=8), st.data())
def test_events_survive_any_cut(texts: list[str], data: st.DataObject) -> None:
    newline = data.draw(st.sampled_from(["\n", "\r\n"]))
    stream = "".join(f": comment{newline}event: x{newline}data: {text}{newline}{newline}" for text in texts).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    parser = SseParser()
    assert [event.decode() for piece in pieces for event in parser.feed(piece)] == texts


def test_data_of_several_lines_is_one_event() -> None:
    assert SseParser().feed(b"data: a\ndata:b\n\n") == [b"a\nb"]


async def test_tokens_and_usage() -> None:
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 7}}\n\n'
    script = Scripted(SSE + TOKEN + TOKEN + usage + DONE)
    async with serving(script) as url:
        assert await ask(url) == [Tokens(1, (), "a"), Tokens(1, (), "a"), Done(3, 7)]
    body = json.loads(script.bodies[0])
    assert len(body["prompt"]) == 3 and body["max_tokens"] == 5 and body["stream"] is True and body["ignore_eos"] is True


@pytest.mark.parametrize(
    ("answer", "outcome", "message"),
    [
        (reply("429 Too Many", b'{"error": {"message": "no room"}}'), Outcome.REFUSED, "HTTP 429: no room"),
        (reply("503 Unavailable", b"busy"), Outcome.REFUSED, "HTTP 503: busy"),
        (reply("400 Bad", b'{"error": {"message": "prompt: too long"}}'), Outcome.ERROR, "HTTP 400: prompt: too long"),
        (reply("500 Oops", b""), Outcome.ERROR, "HTTP 500"),
        (SSE + TOKEN, Outcome.ERROR, "without \\[DONE\\]"),
        (SSE + TOKEN + b'data: {"error": {"message": "lost"}}\n\n' + DONE, Outcome.ERROR, "lost"),
        (SSE + b"data: nonsense\n\n", Outcome.ERROR, "malformed answer: not a JSON object"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\nConnection: close\r\n\r\n" + TOKEN, Outcome.ERROR, "broke off"),
        (b"SSH-2.0-nonsense\r\n\r\n", Outcome.ERROR, "illegal"),
        (b"Connection: close", Outcome.ERROR, "."),
    ],
)
async def test_what_is_no_answer_is_an_error(answer: bytes, outcome: Outcome, message: str) -> None:
    async with serving(Scripted(answer)) as url:
        with pytest.raises(TargetError, match=message) as caught:
            await ask(url)
    assert caught.value.outcome is outcome


async def test_nobody_listens() -> None:
    async with serving(Scripted(b"")) as url:
        pass
    with pytest.raises(TargetError, match="cannot connect"):
        await ask(url)


async def read_all(client: HttpClient) -> bytes:
    async with client.request("GET", "/x") as response:
        return await response.read(1 << 20)


async def test_a_connection_is_used_again() -> None:
    script = Scripted(reply("200 OK", b"hello"))
    async with serving(script) as url:
        client = HttpClient(BaseUrl.parse(url), {})
        assert [await read_all(client) for _ in range(5)] == [b"hello"] * 5
        await client.close()
    assert script.num_connections == 1


async def test_a_kept_connection_that_the_server_closed_is_replaced() -> None:
    script = Scripted(reply("200 OK", b"hello"), per_connection=1)
    async with serving(script) as url:
        client = HttpClient(BaseUrl.parse(url), {})
        for _ in range(3):
            assert await read_all(client) == b"hello"
        await client.close()
    assert script.num_connections == 3


async def test_leaving_an_answer_closes_its_connection() -> None:
    script = Scripted(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhello")
    async with serving(script) as url:
        client = HttpClient(BaseUrl.parse(url), {})
        for _ in range(2):
            async with client.request("GET", "/x") as response:
                async for piece in response.pieces():
                    assert piece == b"hello"
                    break
        await client.close()
    assert script.num_connections == 2


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://a/b", "http://", "https:///v1", "http://a:99999/v1", "http://[/v1"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ValueError, match="is not a URL"):
        BaseUrl.parse(url)


async def test_a_server_that_closes_at_once_is_an_error() -> None:
    async with serving(Scripted(b"", per_connection=0)) as url:
        with pytest.raises(HttpError):
            await read_all(HttpClient(BaseUrl.parse(url), {}))


async def test_a_silent_server_does_not_hold_the_check_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "_CHECK_TIMEOUT_S", 0.1)
    async with serving(Scripted(b"")) as url:
        target = OpenAiTarget(url, OpenAiSettings())
        with pytest.raises(TargetError, match="no answer within"):
            await target.check()


async def test_https_with_a_private_ca_and_a_client_certificate(tmp_path: Path) -> None:
    authority = new_authority(tmp_path / "ca")
    served, own = authority.config("server", name="localhost"), authority.config("client")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.ca)
    context.load_cert_chain(served.tls_cert, served.tls_key)
    context.verify_mode = ssl.CERT_REQUIRED
    server = await asyncio.start_server(Scripted(reply("200 OK", b"hello")), "127.0.0.1", 0, ssl=context)
    base = BaseUrl.parse(f"https://localhost:{server.sockets[0].getsockname()[1]}/v1")
    trusting = ClientTlsConfig(tls_ca=authority.ca)
    shown = replace(trusting, tls_cert=own.tls_cert, tls_key=own.tls_key)
    try:
        client = HttpClient(base, {}, shown)
        assert await read_all(client) == b"hello"
        await client.close()
        for unfit in (None, trusting):
            with pytest.raises(HttpError):
                await read_all(HttpClient(base, {}, unfit))
    finally:
        server.close()
