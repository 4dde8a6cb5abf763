"""API keys over HTTP: every route that needs one takes it in both headers, and refuses a request without one or with another."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import pytest_asyncio

from router.api.http.body import HttpSettings
from router.api.http.openapi import Endpoint
from router.api.protocols import all_routes
from router.config import BatchConfig, RouterConfig
from tests.router.api_keys import add_key
from tests.router.mesh import Mesh, running_mesh

pytestmark = pytest.mark.asyncio(loop_scope="module")
FRONTEND: Any = SimpleNamespace(core=SimpleNamespace(config=RouterConfig()), closing=[])
BATCHES: Any = SimpleNamespace(store=None, config=RouterConfig().batches)


def _with_keys() -> Iterator[Any]:
    """Yield method, path, the header that the route demands and the key that it takes, of each route that needs a key."""
    for route in all_routes(FRONTEND, BATCHES, HttpSettings(1)):
        assert isinstance(route, Endpoint)
        path = re.sub(r"{(\w+)(:\w+)?}", "some", route.path)
        for method in sorted((route.methods or set()) - {"HEAD"} if route.operation.needs_key else ()):
            header = route.operation.header
            demanded, key = {header: "any"} if header else {}, "admin" if route.operation.needs_admin else "good"
            yield pytest.param(method, path, demanded, key, id=f"{method} {route.path} {header}".strip())


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def http(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    folder = tmp_path_factory.mktemp("router")
    add_key(folder / "keys.json", "good", tenant="t")
    add_key(folder / "keys.json", "admin", tenant="t", admin=True)
    batches = BatchConfig(http_batch_folder=str(folder / "batches"))
    async with (
        running_mesh(model_folder, http_port=0, api_keys=str(folder / "keys.json"), batches=batches) as mesh,
        httpx.AsyncClient(base_url=_url(mesh), timeout=20.0) as http,
    ):
        yield http


def _url(mesh: Mesh) -> str:
    assert mesh.router.http is not None
    return mesh.router.http.url


@pytest.mark.parametrize(("method", "path", "demanded", "key"), _with_keys())
async def test_each_route_takes_a_key_in_both_headers(
    http: httpx.AsyncClient, method: str, path: str, demanded: dict[str, str], key: str
) -> None:
    async def status(**headers: str) -> int:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        body: Any = {} if method == "POST" else None
        return (await http.request(method, path, json=body, headers={**demanded, **named})).status_code

    refused = (401, 403, 405)  # with a key it is the body, or the name in the path, that is refused, if anything is
    assert await status(authorization=f"Bearer {key}") not in refused
    assert await status(x_api_key=key) not in refused
    assert await status(authorization=f"Bearer {key}", x_api_key="other") not in refused
    assert await status(authorization="Basic other", x_api_key=key) not in refused
    assert (await status(x_api_key="good") == 403) == (key == "admin")
    assert await status() == await status(authorization="Bearer other") == await status(x_api_key="other") == 401
    assert await status(authorization="Bearer other", x_api_key=key) == 401


async def test_both_ways_are_described(http: httpx.AsyncClient) -> None:
    described = (await http.get("/openapi.json")).json()
    schemes = described["components"]["securitySchemes"]
    found = [(each["type"], each.get("scheme") or (each["in"], each["name"])) for each in schemes.values()]
    assert found == [("http", "bearer"), ("apiKey", ("header", "X-Api-Key"))]
    needing = [each for of in described["paths"].values() for each in of.values() if "security" in each]
    assert needing and all(each["security"] == [{}, *({name: []} for name in schemes)] for each in needing)
