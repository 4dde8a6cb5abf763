"""Meshes of stub workers with HTTP that say what a test has written, and openai's client of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.router.mesh import Mesh, running_mesh
from tests.router.stub_texts import Say, model_with_template, sayer

TEMPLATE = (
    "{% if tools %}TOOLS {{ tools | tojson }} <tool_call>\n{% endif %}"
    "{% for m in messages %}[{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}] {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.id }} {{ c.function.name }} {{ c.function.arguments.city }}>{% endfor %}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}\n{% endfor %}"
    "{% if reasoning_effort %}effort {{ reasoning_effort }}\n{% endif %}{% if verbosity %}verbosity {{ verbosity }}\n{% endif %}"
    "{% if add_generation_prompt %}[assistant] {% if enable_thinking is not false %}<think>\n{% else %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)


def url(mesh: Mesh, path: str = "") -> str:
    assert mesh.router.http is not None
    return mesh.router.http.url + path


def client_of(mesh: Mesh, *, api_key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url(mesh, "/v1"), api_key=api_key, max_retries=0, timeout=20.0)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(model_folder: Path) -> AsyncIterator[Mesh]:
    """One prefill stub, one decode stub, a router with HTTP that keeps nothing."""
    async with running_mesh(model_folder, http_port=0) as mesh:
        yield mesh
        await mesh.until_whole()


@pytest_asyncio.fixture(loop_scope="module")
async def client(served: Mesh) -> AsyncIterator[Any]:
    async with client_of(served) as client:
        yield client


@pytest.fixture(scope="module")
def thinking_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template knows tools, and lets it think."""
    return model_with_template(tmp_path_factory.mktemp("thinking"), TEMPLATE)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def thinking(thinking_folder: Path) -> AsyncIterator[Mesh]:
    async with running_mesh(thinking_folder, http_port=0) as mesh:
        yield mesh
        await mesh.until_whole()


@pytest_asyncio.fixture(loop_scope="module")
async def thinker(thinking: Mesh) -> AsyncIterator[Any]:
    async with client_of(thinking) as client:
        yield client


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Say:
    """Sets what every answer says; returns the number of its tokens, at which a stub has to be stopped."""
    return sayer(monkeypatch)
