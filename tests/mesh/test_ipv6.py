"""A mesh on IPv6: every address that it writes can be used."""

import asyncio
import json
import socket
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from pdmesh.client.client import AsyncClient
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from pdmesh.runtime.addresses import split_address
from tests.mesh.checks import Footprint, assert_whole
from tests.mesh.test_faults import ask, expected

pytestmark = pytest.mark.asyncio(loop_scope="module")


def has_loopback() -> bool:
    """Return whether this machine has an IPv6 loopback."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=["::1", "[::1]"])
async def mesh(request: pytest.FixtureRequest, tiny: Path) -> AsyncIterator[LocalMesh]:
    """One worker of each kind, HTTP and metrics, KV over tcp alone. The host may be given with brackets."""
    if not has_loopback():
        pytest.skip("this machine has no IPv6 loopback")
    config = LocalMeshConfig(
        model=str(tiny),
        host=request.param,
        port=0,
        http_port=0,
        metrics_port=0,
        console_port=0,
        console_host=request.param,
        num_threads=1,
        worker_args=("--transports", "tcp"),
    )
    async with LocalMesh(config) as mesh:
        footprint = Footprint.of(mesh)
        yield mesh
        footprint.grow(mesh)
    footprint.assert_gone()


async def test_every_address_names_the_host_in_brackets(mesh: LocalMesh) -> None:
    urls = [*mesh.http_urls, mesh.console_url, *(url for target in mesh.metrics_targets for url in target.urls)]
    addresses = [mesh.router_address, *mesh.worker_addresses, *(url.removeprefix("http://").partition("/")[0] for url in urls)]
    assert [split_address(address)[0] for address in addresses] == ["::1"] * len(addresses)
    async with AsyncClient(mesh.router_address) as client:
        status = await client.status(timeout=30)
    assert {view.info.address for view in status.workers} == set(mesh.worker_addresses)


async def test_a_hand_off_over_tcp(mesh: LocalMesh, tiny: Path) -> None:
    async with AsyncClient(mesh.router_address) as client:
        assert await ask(client, 1) == expected(tiny, 1)
        answer = await client.generate("a prompt of its own, " * 4, max_tokens=4, ignore_eos=True, mode="remote", timeout=60)
    assert answer.timings.transport == "tcp"
    assert answer.timings.kv_bytes
    await assert_whole(mesh)


async def test_a_chat_over_grpc_and_over_http(mesh: LocalMesh) -> None:
    async with AsyncClient(mesh.router_address) as client:
        told = await client.chat([("user", "hello")], temperature=0, max_tokens=8, ignore_eos=True, timeout=60)
    body = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{mesh.http_urls[0]}/v1/chat/completions", json.dumps(body).encode(), headers)
    answer = json.loads(await asyncio.to_thread(_read, request))
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["choices"][0]["message"]["content"] == told.text


async def test_console_and_metrics_answer(mesh: LocalMesh) -> None:
    for url in (mesh.console_url, *(url for target in mesh.metrics_targets for url in target.urls)):
        assert await asyncio.to_thread(_read, urllib.request.Request(url))


def _read(request: urllib.request.Request) -> bytes:
    with urllib.request.urlopen(request, timeout=60) as response:
        return bytes(response.read())
