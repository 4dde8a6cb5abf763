"""Meshes with HTTP for a whole module, Anthropic's client of them, and stub workers that say what a test has written."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
import pytest_asyncio

from pdmesh.v1 import common_pb2
from tests.router.api_keys import add_key
from tests.router.mesh import Mesh, running_mesh
from tests.router.stub_texts import Say, model_with_template, sayer

TEMPLATE = (
    "{% if tools %}TOOLS {{ tools | tojson }} <tool_call>\n{% endif %}"
    "{% for m in messages %}[{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}] {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}\n{% endfor %}"
    "{% if reasoning_effort %}effort {{ reasoning_effort }}\n{% endif %}"
    "{% if thinking_budget %}budget {{ thinking_budget }}\n{% endif %}"
    "{% if add_generation_prompt %}[assistant] {% if enable_thinking is not false %}<think>\n{% else %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)


def url(mesh: Mesh, path: str = "") -> str:
    assert mesh.router.http is not None
    return mesh.router.http.url + path


def client_of(mesh: Mesh, *, api_key: str = "none", max_retries: int = 0) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=url(mesh), api_key=api_key, max_retries=max_retries, timeout=20.0)


@pytest.fixture(scope="module")
def thinking_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template knows tools, and lets it think."""
    return model_with_template(tmp_path_factory.mktemp("thinking"), TEMPLATE)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(thinking_folder: Path) -> AsyncIterator[Mesh]:
    """One prefill stub, one decode stub, a router with HTTP. Tests leave the stubs as they were."""
    async with running_mesh(thinking_folder, http_port=0) as mesh:
        yield mesh
        await mesh.until_whole()


@pytest_asyncio.fixture(loop_scope="module")
async def client(served: Mesh) -> AsyncIterator[Any]:
    """Anthropic's own. What the tests send and read is wider than its overloads: it is Any to mypy."""
    async with client_of(served) as client:
        yield client
        await served.until_whole()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def limited(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    """As `served`, with keys and small bodies."""
    keys = tmp_path_factory.mktemp("keys") / "keys.json"
    for number in (1, 2):
        add_key(keys, f"key-{number}", tenant=f"tenant-{number}")
    async with running_mesh(model_folder, http_port=0, api_keys=str(keys), http_max_body_bytes=1 << 16) as mesh:
        yield mesh
        await mesh.until_whole()


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Say:
    """Sets what every output says; returns the number of its tokens."""
    return sayer(monkeypatch)


def sampling_of(mesh: Mesh) -> common_pb2.SamplingParams:
    """The sampling parameters of the latest request, as workers get them."""
    return mesh["d0"].submits[-1].request.sampling


async def both(client: Any, **asked: Any) -> Any:
    """The message of a whole answer; that of the stream is the same but for its id."""
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    left, right = (each.model_dump(exclude={"id"}) for each in (whole, streamed))
    for each in (left, right):
        each["content"] = [{name: value for name, value in block.items() if name != "parsed_output"} for block in each["content"]]
    assert left == right
    return whole
