"""Headers of requests: each is described for the endpoints where it changes something, and for no other one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from router.api.http.headers import AGENT_HEADERS, GENERATION_HEADERS
from router.flow_control.slo_admission import FlowItem
from tests.router.mesh import Mesh, running_mesh
from tests.router.test_http_sessions import ENDPOINTS, url

pytestmark = pytest.mark.asyncio(loop_scope="module")
Json = dict[str, Any]
PATHS: dict[str, tuple[str, Json | None]] = {
    **{path: ("POST", body) for path, body in ENDPOINTS.items()},
    "/v1/embeddings": ("POST", {"input": "hello"}),
    "/v1/sessions/{session_id}": ("DELETE", None),
}
SESSION = {"x-pdmesh-session-id": "s"}
PROBES: dict[str, tuple[str, dict[str, str]]] = {
    "X-Request-Id": ("mine", {}),
    "X-Tenant": ("t", {}),
    "x-pdmesh-tenant": ("t", {}),
    "X-Request-Timeout-Ms": ("60000", {}),
    "X-Priority": ("batch", {}),
    "x-pdmesh-priority": ("batch", {}),
    "x-pdmesh-priority-hint": ("7", {}),
    "x-pdmesh-slo-ttft-ms": ("90000", {}),
    "x-pdmesh-slo-tpot-ms": ("9000", {}),
    "x-pdmesh-session-id": ("s", {}),
    "x-pdmesh-kv-retention-s": ("5", {}),
    "x-pdmesh-session-final": ("true", SESSION),
    "X-Dynamo-Session-ID": ("s", {}),
    "X-Dynamo-Session-Final": ("true", SESSION),
    "X-Prefill-Mode": ("remote", {}),
    **{name: ("s", {}) for name in AGENT_HEADERS},
}
"""A value of each header, and what else has to be there for it to mean something."""


class Seen:
    """What the router and its workers make of a request, without what differs each time."""

    def __init__(self, mesh: Mesh, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
        self._mesh = mesh
        self._http = http
        self._items: list[FlowItem] = []
        controller = mesh.router.core.flow_control
        enter = controller.enter

        async def spy(item: FlowItem) -> Any:
            self._items.append(item)
            return await enter(item)

        monkeypatch.setattr(controller, "enter", spy)

    async def of(self, path: str, headers: dict[str, str]) -> list[object]:
        method, body = PATHS[path]
        d0, p0 = self._mesh["d0"], self._mesh["p0"]
        all_seen: list[list[Any]] = [self._items, d0.submits, p0.embeds, d0.released]
        before = [len(each) for each in all_seen]
        answer = await self._http.request(method, path.replace("{session_id}", "s"), json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        items, submits, embeds, released = (each[start:] for each, start in zip(all_seen, before, strict=True))
        told = [(each.mode, each.tpot_goal_ms, *_of_token_request(each.request)) for each in submits]
        asked = [_of_token_request(each.request) for each in embeds]
        is_named = answer.headers["x-request-id"] == headers.get("X-Request-Id")
        return [is_named, list(map(_of_item, items)), told, asked, released]


def _of_item(item: FlowItem) -> list[object]:
    differing = ("foresee", "deadline", "num_bytes")  # a seed that the router draws has more digits, or fewer
    values = [getattr(item, field.name) for field in fields(item) if field.name not in differing]
    return [item.deadline is not None, *values]


def _of_token_request(request: Any) -> tuple[object, ...]:
    return request.session_id, request.kv_retention_s, request.session_final, request.cache_salt


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(model_folder: Path) -> AsyncIterator[Mesh]:
    async with running_mesh(model_folder, http_port=0) as mesh:
        for worker in mesh.workers.values():
            worker.retained = {}
        yield mesh
        await mesh.until_whole()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def http(served: Mesh) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url(served), timeout=20.0) as http:
        yield http


async def test_every_header_has_a_probe() -> None:
    assert set(PROBES) == {"X-Request-Id", *GENERATION_HEADERS}


@pytest.mark.parametrize("path", PATHS)
async def test_a_header_is_described_where_it_changes_something(
    served: Mesh, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    seen = Seen(served, http, monkeypatch)
    operation = (await http.get("/openapi.json")).json()["paths"][path][PATHS[path][0].lower()]
    described = {each["name"] for each in operation["parameters"] if each["in"] == "header"}
    assert await seen.of(path, {}) == await seen.of(path, {})
    changing = {
        name
        for name, (value, others) in PROBES.items()
        if await seen.of(path, others) != await seen.of(path, {**others, name: value})
    }
    assert changing == described
