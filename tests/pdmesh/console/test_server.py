"""The page and what it asks for, over real sockets; and who is sent away."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from importlib import resources
from typing import Any

import httpx
import pytest

from pdmesh.console import server
from pdmesh.console.server import MAX_BODY_BYTES
from pdmesh.console.state import MAX_CLIENTS
from pdmesh.runtime.telemetry.propagation import parse
from tests.pdmesh.console.conftest import Running, running_console
from tests.pdmesh.console.made import MODEL, Made, Script, made_router

PROMPT = {"prompt": "a secret question", "max_tokens": 5}


def now() -> Made:
    made = Made(0, goals=(150, 16))
    return replace(made, start_ns=time.time_ns() - round(made.total * 1e6))


async def state(console: Running) -> Any:
    return (await console.http.get("/api/state")).json()


async def until(console: Running, condition: Any) -> Any:
    """The first state that is so."""
    async with asyncio.timeout(15):
        while not condition(seen := await state(console)):  # noqa: ASYNC110  # the event happens behind the socket
            await asyncio.sleep(0.02)
    return seen


async def test_the_page_comes_with_all_its_parts_and_a_strict_policy(console: Running) -> None:
    page = await console.http.get("/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    named = set(re.findall(r'"(/page/[^"]+)"', page.text))
    for path in sorted(named):
        part = await console.http.get(path)
        assert part.status_code == 200 and part.headers["x-content-type-options"] == "nosniff"
        named |= {f"/page/{name}" for name in re.findall(r'from "\./([^"]+)"', part.text)}
    assert {"/page/app.js", "/page/base.css", "/page/dom.js"} <= named
    for path in named:
        assert (await console.http.get(path)).status_code == 200


def test_no_part_of_the_page_comes_from_elsewhere_or_reads_text_as_html() -> None:
    for entry in (resources.files("pdmesh.console") / "page").iterdir():
        text = entry.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(
            r"https?://|//[a-z]+\.|@import|url\(|innerHTML|outerHTML|insertAdjacentHTML|eval\(| style=\"", text
        ), entry.name
        assert len(text.splitlines()) < 300, entry.name


@pytest.mark.parametrize("path", ["/page/none.js", "/page/../server.py", "/page/%2e%2e%2fserver.py", "/other", "/api/traces/xyz"])
async def test_nothing_else_is_served(console: Running, path: str) -> None:
    assert (await console.http.get(path)).status_code == 404


@pytest.mark.parametrize(("host", "status"), [
    ("localhost:1", 200), ("127.0.0.1", 200), ("[::1]:9", 200), ("192.0.2.7:8200", 200), ("friend.example", 200),
    ("evil.example", 403), ("127.0.0.1.evil.example", 403), ("localhost.evil.example:80", 403),
    ("", 403), ("a b", 403), ("[", 403),
])  # fmt: skip
async def test_names_that_were_made_to_point_here_are_sent_away(host: str, status: int) -> None:
    async with made_router() as router, running_console(router, Script(), allowed_hosts=("Friend.example",)) as console:
        for path in ("/", "/api/state"):
            assert (await console.http.get(path, headers={"host": host})).status_code == status


@pytest.mark.parametrize(("headers", "status"), [
    ({}, 200), ({"origin": "SELF"}, 200), ({"sec-fetch-site": "same-origin", "origin": "SELF"}, 200),
    ({"origin": "http://evil.example"}, 403), ({"origin": "null"}, 403), ({"sec-fetch-site": "cross-site"}, 403),
    ({"sec-fetch-site": "same-site", "origin": "SELF"}, 403), ({"content-type": "text/plain"}, 415),
    ({"origin": "http://["}, 403),
])  # fmt: skip
async def test_only_our_own_page_may_ask_for_something(console: Running, headers: dict[str, str], status: int) -> None:
    given = {key: value.replace("SELF", console.url) for key, value in headers.items()}
    answer = await console.http.post(
        "/api/generate", content=json.dumps(PROMPT), headers={"content-type": "application/json", **given}
    )
    assert answer.status_code == status and len(console.script.requests) == (status == 200)
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 100_000, b"\xff", b"[]", b'{"prompt": 1}'])
async def test_a_body_that_is_no_prompt_is_the_callers_mistake(console: Running, body: bytes) -> None:
    answer = await console.http.post("/api/generate", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_other_sites_may_link_to_the_page_but_not_keep_us_busy(console: Running, site: str) -> None:
    headers = {"sec-fetch-site": site}
    assert (await console.http.get("/", headers=headers)).status_code == 200
    for path in ("/api/state", "/api/events"):
        assert (await console.http.get(path, headers=headers)).status_code == 403


async def test_who_leaves_takes_the_request_along(console: Running) -> None:
    console.script.hangs = True
    async with console.http.stream("POST", "/api/generate", json=PROMPT) as answer:
        async for line in answer.aiter_lines():
            if "Paris" in line:
                break
    async with asyncio.timeout(15):
        await console.script.left.wait()


@pytest.mark.parametrize(("body", "status"), [
    ("no json", 400), ("[]", 400), ("{}", 400), ('{"prompt": "  "}', 400), ('{"prompt": 7}', 400),
    (json.dumps({"prompt": "x" * 20_000}), 400), (json.dumps({"prompt": "x" * MAX_BODY_BYTES}), 413),
    ('{"prompt": "x", "max_tokens": 0}', 400), ('{"prompt": "x", "max_tokens": true}', 400),
    ('{"prompt": "x", "temperature": 9}', 400), ('{"prompt": "x", "model": 1}', 400),
])  # fmt: skip
async def test_a_wrong_prompt_is_refused_with_words(console: Running, body: str, status: int) -> None:
    answer = await console.http.post("/api/generate", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status and answer.json()["error"] and not console.script.requests


async def test_a_prompt_is_answered_and_the_mesh_hears_of_its_trace(console: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    answer = await console.http.post("/api/generate", json=PROMPT)
    first, *texts, last = [json.loads(line) for line in answer.text.splitlines()]
    assert "".join(line["text"] for line in texts) == "Paris is it."
    assert last["done"]["ttft_ms"] == 50 and last["done"]["output_tokens"] == 3
    (request,), (metadata,) = console.script.requests, console.script.metadata
    assert request.messages[0].content == PROMPT["prompt"] and request.sampling.max_tokens == 5
    context = parse(metadata["traceparent"])
    assert context is not None and context.trace_name == first["trace_id"] and context.is_sampled
    assert not any("secret" in record.getMessage() for record in caplog.records)


async def test_a_mesh_that_is_away_is_an_answer_too() -> None:
    async with made_router() as router:
        pass
    async with running_console(router, Script()) as console:
        answer = await console.http.post("/api/generate", json=PROMPT)
        assert json.loads(answer.text.splitlines()[-1])["error"]
        seen = await until(console, lambda seen: seen["routers"][0]["problem"] != "has not been asked yet")
        assert seen["routers"][0]["problem"] and seen["workers"] == []


async def test_the_state_holds_what_was_sent_and_what_routers_say(console: Running) -> None:
    made = now()
    await console.take(made)
    seen = await until(console, lambda seen: seen["workers"])
    assert (
        [each["request_id"] for each in seen["recent"]] == [made.request_id] == [each["request_id"] for each in seen["slowest"]]
    )
    assert [flow["per_s"] > 0 for flow in seen["flows"]] == [True]
    assert seen["objectives"][MODEL] == {"ttft_ms": 150, "tpot_ms": 16, "quantile": 0.95}
    assert {worker["id"]: worker["roles"] for worker in seen["workers"]}["prefill-1"] == ["prefill"]
    assert seen["workers"][0]["blocks"] == {"total": 2048, "free": 1000, "cached": 540}
    (model,) = seen["models"]
    (bar,) = [each for each in model["ttft_ms"]["classes"] if each["count"]]
    query = {"model": MODEL, "metric": "ttft_ms", "from_ms": bar["from_ms"], "to_ms": bar["to_ms"]}
    found = (await console.http.get("/api/requests", params=query)).json()
    assert found["total"] == 1 and found["requests"][0]["span_id"] == seen["recent"][0]["span_id"]
    trace = (await console.http.get(f"/api/traces/{found['requests'][0]['trace_id']}")).json()
    assert {"route", "prefill.compute", "kv.push", "decode"} <= {span["name"] for span in trace["spans"]}
    assert trace["requests"] == found["requests"]


@pytest.mark.parametrize("query", ["metric=other", "from_ms=x", "to_ms=nan"])
async def test_a_bar_that_is_none_is_refused(console: Running, query: str) -> None:
    assert (await console.http.get(f"/api/requests?{query}")).status_code == 400


async def test_a_trace_that_may_still_come_is_empty_until_then(console: Running) -> None:
    path = f"/api/traces/{7:032x}"
    assert (await console.http.get(path)).status_code == 404
    assert (await console.http.get(f"{path}?soon=1")).json()["spans"] == []


async def events(response: httpx.Response) -> AsyncIterator[Any]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


async def test_pages_that_look_hear_of_what_is_new(console: Running) -> None:
    async with console.http.stream("GET", "/api/events") as response, asyncio.timeout(20):
        assert response.headers["content-type"].startswith("text/event-stream")
        states = events(response)
        assert (await anext(states))["recent"] == []
        await console.take(now())
        assert len([True async for seen in _until_recent(states)]) == 1
        # Decisions are asked for only while somebody looks.
        async for seen in states:
            if seen["policy"]:
                assert seen["policy"][0]["candidates"][0]["chosen"]
                break


async def _until_recent(states: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for seen in states:
        if seen["recent"]:
            yield seen
            return


async def test_so_many_pages_may_look_and_no_more(console: Running) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=console.url, limits=limits, timeout=20, trust_env=False) as http:
        looking = [await http.send(http.build_request("GET", "/api/events"), stream=True) for _ in range(MAX_CLIENTS)]
        firsts = await asyncio.gather(*(anext(events(each)) for each in looking))
        assert len(firsts) == MAX_CLIENTS
        assert (await http.get("/api/events")).status_code == 503
        for each in looking:
            await each.aclose()
        async with asyncio.timeout(15):
            while True:
                async with http.stream("GET", "/api/events") as response:
                    if response.status_code == 200:
                        break
                await asyncio.sleep(0.02)


def test_numbers_that_are_none_are_no_json_but_null() -> None:
    from pdmesh.console.state import _json

    assert json.loads(_json({"a": [1.5, float("inf")], "b": float("nan")})) == {"a": [1.5, None], "b": None}
    assert server.MAX_BODY_BYTES < 1 << 20
