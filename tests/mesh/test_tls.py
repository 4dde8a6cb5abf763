"""A mesh in which everything is encrypted: the same tokens over every way, and nobody else is let in."""

import asyncio
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from pdmesh import cli
from pdmesh.client.client import AsyncClient, Client, ClientTlsConfig
from pdmesh.errors import Unavailable
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from pdmesh.runtime.config import to_env
from pdmesh.runtime.rpc.tls import open_tls
from pdmesh.sampling_params import SamplingParams
from pdmesh.v1 import worker_pb2
from pdmesh.v1.worker_pb2_grpc import WorkerControlStub
from tests.mesh import oracle
from tests.mesh.checks import Footprint, assert_whole
from tests.support.certificates import new_authority

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def encrypted(tiny: Path) -> AsyncIterator[LocalMesh]:
    """A prefill worker, a decode worker and a router; KV has to cross by tcp."""
    config = LocalMeshConfig(model=str(tiny), port=0, num_threads=1, throwaway_tls=True, worker_args=("--transports=tcp",))
    mesh = LocalMesh(config)
    async with mesh:
        footprint = Footprint.of(mesh)
        folder = Path(mesh.tls.tls_key).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        yield mesh
        footprint.grow(mesh)
    footprint.assert_gone()
    assert not folder.exists()


@pytest.mark.parametrize("mode", ["remote", "local"])
async def test_right_tokens(encrypted: LocalMesh, tiny: Path, mode: str) -> None:
    prompt = oracle.prompt_of(11, 300)
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True)
    async with AsyncClient(encrypted.router_addresses, tls=encrypted.tls) as client:
        result = await client.generate(
            prompt, temperature=0.8, seed=5, max_tokens=24, ignore_eos=True, mode=mode, timeout=60
        )  # fmt: skip
        status = await client.status(timeout=10)
    assert [list(choice.token_ids) for choice in result.choices] == oracle.answer(tiny, prompt, params)
    assert result.timings.transport == ("tcp" if mode == "remote" else "")
    assert sum(worker.load.num_handoff_failures for worker in status.workers) == 0
    await assert_whole(encrypted)


async def test_a_plain_client_is_refused(encrypted: LocalMesh) -> None:
    async with AsyncClient(encrypted.router_addresses, resume_timeout_s=0.2) as client:
        with pytest.raises(Unavailable):
            await client.generate([1, 2, 3], max_tokens=1, timeout=5)


async def test_a_client_without_a_certificate_is_refused(encrypted: LocalMesh) -> None:
    tls = ClientTlsConfig(tls_ca=encrypted.tls.tls_ca)
    async with AsyncClient(encrypted.router_addresses, resume_timeout_s=0.2, tls=tls) as client:
        with pytest.raises(Unavailable):
            await client.generate([1, 2, 3], max_tokens=1, timeout=5)


async def test_a_client_of_another_ca_is_refused(encrypted: LocalMesh, tmp_path: Path) -> None:
    other = new_authority(tmp_path / "other").config()
    async with AsyncClient(encrypted.router_addresses, resume_timeout_s=0.2, tls=other) as client:
        with pytest.raises(Unavailable):
            await client.generate([1, 2, 3], max_tokens=1, timeout=5)


async def test_workers_answer_members_only(encrypted: LocalMesh) -> None:
    address = encrypted.member("decode-0").address
    tls = open_tls(encrypted.tls)
    assert tls is not None
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await WorkerControlStub(channel).GetInfo(worker_pb2.GetInfoRequest(), timeout=5)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    async with grpc.aio.secure_channel(address, tls.channel_credentials(), options=tls.channel_options) as channel:
        info = await WorkerControlStub(channel).GetInfo(worker_pb2.GetInfoRequest(), timeout=5)
    assert info.worker_id == "decode-0"


async def test_the_commands_take_the_environment(
    encrypted: LocalMesh, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in to_env(encrypted.tls).items():
        monkeypatch.setenv(name, value)
    router = ("--router", encrypted.router_address)
    assert await asyncio.to_thread(cli.run, ("status", *router)) == 0
    assert "decode-0" in capsys.readouterr().out
    assert await asyncio.to_thread(cli.run, ("roles", "decode-0", "decode", *router)) == 0
    monkeypatch.delenv("PDMESH_TLS_KEY")
    with pytest.raises(SystemExit):
        await asyncio.to_thread(cli.run, ("status", *router))
    assert "--tls-key: is missing" in capsys.readouterr().err


async def test_the_blocking_client(encrypted: LocalMesh) -> None:
    def ask() -> int:
        with Client(encrypted.router_address, tls=encrypted.tls) as client:
            return len(client.generate([1, 2, 3], max_tokens=4, ignore_eos=True, temperature=0, timeout=30).choices[0].token_ids)

    assert await asyncio.to_thread(ask) == 4


async def test_a_worker_that_restarts_comes_back(encrypted: LocalMesh) -> None:
    await encrypted.restart("decode-0")
    await encrypted.wait_ready(30)
    async with AsyncClient(encrypted.router_addresses, tls=encrypted.tls) as client:
        result = await client.generate(oracle.prompt_of(12, 60), temperature=0, max_tokens=4, mode="remote", timeout=60)
    assert result.timings.transport == "tcp"


async def test_what_stands_on_the_ports_is_no_text(encrypted: LocalMesh) -> None:
    """Somebody who connects and says nothing in TLS hears nothing in the clear."""
    for member in (*encrypted.routers, *encrypted.workers):
        host, _, port = member.address.rpartition(":")
        heard = await asyncio.to_thread(_hear, host, int(port))
        assert b"PRI" not in heard and b"HTTP" not in heard


def _hear(host: str, port: int) -> bytes:
    with socket.create_connection((host, port), timeout=5) as sock:
        sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        try:
            return sock.recv(4096)
        except OSError:
            return b""
