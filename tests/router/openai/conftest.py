"""A mesh with HTTP for a whole module, and openai's client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio

from tests.router.api_keys import add_key
from tests.router.mesh import Mesh, running_mesh


def url(mesh: Mesh, path: str = "") -> str:
    assert mesh.router.http is not None
    return mesh.router.http.url + path


def client_of(mesh: Mesh, *, api_key: str = "none", max_retries: int = 0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url(mesh, "/v1"), api_key=api_key, max_retries=max_retries, timeout=20.0)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(model_folder: Path) -> AsyncIterator[Mesh]:
    """One prefill stub, one decode stub, a router with HTTP. Tests leave the stubs as they were."""
    async with running_mesh(model_folder, http_port=0) as mesh:
        yield mesh
        await mesh.until_whole()


@pytest_asyncio.fixture(loop_scope="module")
async def client(served: Mesh) -> AsyncIterator[openai.AsyncOpenAI]:
    """openai's own."""
    async with client_of(served) as client:
        yield client
        await served.until_whole()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def limited(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    """As `served`, with keys and small bodies."""
    keys = tmp_path_factory.mktemp("keys") / "keys.json"
    for number in (1, 2):
        add_key(keys, f"key-{number}", tenant=f"tenant-{number}")
    async with running_mesh(model_folder, http_port=0, api_keys=str(keys), http_max_body_bytes=1 << 19) as mesh:
        yield mesh
        await mesh.until_whole()
