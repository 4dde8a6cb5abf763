"""A mesh without TLS and with a secret: the same tokens, and an outsider is refused everywhere but by the router."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from google.protobuf.descriptor import MethodDescriptor
from redis.asyncio import Redis

from kvtransfer import framing
from pdmesh import cli
from pdmesh.client.client import AsyncClient
from pdmesh.errors import MeshError, Unavailable
from pdmesh.launcher.member import Member
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig, router_plans
from pdmesh.runtime.registry.registry import Registry
from pdmesh.runtime.rpc.channel import connect
from pdmesh.runtime.rpc.mesh_secret import VARIABLE, MeshSecret, open_secret, write_secret
from pdmesh.sampling_params import SamplingParams
from pdmesh.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, transfer_pb2, worker_pb2, worker_pb2_grpc
from router.main import Router
from tests.mesh import oracle
from tests.mesh.checks import Footprint, assert_whole
from tests.router.mesh import config_for
from tests.runtime.test_records import worker as record_of
from tests.support.waiting import eventually
from tests.support.worker_mesh import REMOTE

pytestmark = pytest.mark.asyncio(loop_scope="module")

CANARY = "canary-prompt-5e0c"
SERVICES: tuple[ModuleType, ...] = (decode_pb2, prefill_pb2, worker_pb2, transfer_pb2)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def guarded(tiny: Path) -> AsyncIterator[LocalMesh]:
    """As `pdmesh up` starts it; KV has to cross by tcp."""
    mesh = LocalMesh(
        LocalMeshConfig(
            model=str(tiny), port=0, http_port=0, num_threads=1, throwaway_secret=True, worker_args=("--transports=tcp,grpc",)
        )
    )
    async with mesh:
        footprint = Footprint.of(mesh)
        file = _file_of(mesh)
        assert (file.parent.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
        yield mesh
        footprint.grow(mesh)
    footprint.assert_gone()
    assert not file.exists()


def _file_of(mesh: LocalMesh) -> Path:
    return Path(mesh.config.mesh_secret.mesh_secret_file)


def methods() -> Iterator[tuple[str, MethodDescriptor]]:
    """Every method that a worker serves, so that a new one is among them."""
    for module in SERVICES:
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield f"/{service.full_name}/{method.name}", method


@pytest.mark.parametrize("mode", ["remote", "local"])
async def test_right_tokens(guarded: LocalMesh, tiny: Path, mode: str) -> None:
    prompt, params = oracle.prompt_of(11, 300), SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True)
    async with AsyncClient(guarded.router_addresses) as client:
        result = await client.generate(prompt, temperature=0.8, seed=5, max_tokens=24, ignore_eos=True, mode=mode, timeout=60)
    assert [list(choice.token_ids) for choice in result.choices] == oracle.answer(tiny, prompt, params)
    assert result.timings.transport == ("tcp" if mode == "remote" else "")
    await assert_whole(guarded)


@pytest.mark.parametrize("path", [path for path, _ in methods()])
async def test_an_outsiders_call_of_any_method_is_refused(guarded: LocalMesh, path: str, tmp_path: Path) -> None:
    for name in ("prefill-0", "decode-0"):
        for secret in (None, open_secret(write_secret(tmp_path / name))):
            async with connect(guarded.member(name).address, secret=secret) as channel:
                with pytest.raises(grpc.aio.AioRpcError, match="mesh") as refused:
                    await _called(channel, path)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert "--mesh-secret-file" in (refused.value.details() or "")
    await assert_whole(guarded)


async def test_those_methods_are_all_there_is_and_more_than_a_few() -> None:
    names = {path.rpartition("/")[2] for path, _ in methods()}
    assert {"Submit", "Attach", "Cancel", "Prefill", "SetRoles", "GetInfo", "Watch", "Push", "LoadAdapter"} <= names


async def _called(channel: grpc.aio.Channel, path: str) -> None:
    """Call with an empty message, whatever kind of call it is. A stream says nothing: see tests/runtime/echo.py."""
    if dict(methods())[path].client_streaming:
        stream: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(path)
        assert await anext(aiter(stream(_silence(), timeout=10)), None) is None
    else:
        unary: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(path)
        assert await anext(aiter(unary(b"", timeout=10)), None) is None


async def _silence() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def test_an_outsider_neither_runs_nor_cancels_a_request(guarded: LocalMesh) -> None:
    """The attack that was served before: Submit straight to the decode port, Attach under a router's id, Cancel of a request that
    runs. The client's answer stays whole."""
    async with AsyncClient(guarded.router_addresses) as client, connect(guarded.member("decode-0").address) as channel:
        decode: decode_pb2_grpc.DecodeServiceAsyncStub = decode_pb2_grpc.DecodeServiceStub(channel)
        running = asyncio.create_task(
            client.generate([1, 2, 3], max_tokens=200, ignore_eos=True, temperature=0, request_id="mine", timeout=60)
        )
        request = common_pb2.TokenRequest(model="tiny", prompt_token_ids=[1, 2, 3])
        for call in (
            decode.Submit(decode_pb2.SubmitRequest(request_id="theirs", request=request), timeout=5),
            decode.Cancel(decode_pb2.CancelRequest(request_id="mine"), timeout=5),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert len((await running).choices[0].token_ids) == 200
    await assert_whole(guarded)


async def test_an_outsiders_frames_to_the_kv_port_are_refused(guarded: LocalMesh) -> None:
    address = await _kv_address(guarded)
    reader, writer = await asyncio.open_connection(*address)
    hello = transfer_pb2.TransferHello(protocol_version=1, push_id=secrets.token_bytes(16), reservation_id="r", epoch=1)
    writer.write(framing.encode(transfer_pb2.TransferMessage(hello=hello)))
    header = await asyncio.wait_for(reader.readexactly(framing.HEADER.size), 5)
    reply = framing.decode(header, await reader.readexactly(framing.body_length(header))).hello_reply
    assert reply.code == grpc.StatusCode.UNAUTHENTICATED.value[0]
    assert "--mesh-secret-file" in reply.message
    writer.close()
    await writer.wait_closed()


async def _kv_address(mesh: LocalMesh) -> tuple[str, int]:
    """Where decode-0 takes KV over tcp: a member asks, as a router does."""
    async with connect(mesh.member("decode-0").address, secret=open_secret(mesh.config.mesh_secret)) as channel:
        decode: decode_pb2_grpc.DecodeServiceAsyncStub = decode_pb2_grpc.DecodeServiceStub(channel)
        control: worker_pb2_grpc.WorkerControlAsyncStub = worker_pb2_grpc.WorkerControlStub(channel)
        info = await control.GetInfo(worker_pb2.GetInfoRequest(), timeout=5)
        request = common_pb2.TokenRequest(
            model="tiny", prompt_token_ids=oracle.prompt_of(3, 40), sampling=common_pb2.SamplingParams(max_tokens=1, seed=1)
        )
        submitted = await decode.Submit(
            decode_pb2.SubmitRequest(
                request_id="probe", router_id="probe", epoch=info.epoch, attempt=1, mode=REMOTE, request=request
            ),
            timeout=5,
        )
        await decode.Cancel(decode_pb2.CancelRequest(request_id="probe"), timeout=5)
    host, _, port = next(each.address for each in submitted.reservation.endpoints if each.transport == "tcp").rpartition(":")
    return host, int(port)


async def test_a_worker_that_an_outsider_writes_into_redis_is_ignored(guarded: LocalMesh, tmp_path: Path) -> None:
    theirs = open_secret(write_secret(tmp_path / "theirs"))
    forgers = [Registry(guarded.redis_url, secret=secret) for secret in (None, theirs)]
    listening = await asyncio.start_server(lambda reader, writer: reached.append(1), "127.0.0.1", 0)
    reached: list[int] = []
    port = listening.sockets[0].getsockname()[1]
    for number, forger in enumerate(forgers):
        assert await forger.register(record_of(f"forged-{number}", address=f"127.0.0.1:{port}"))
    log = guarded.log_dir / "router-0.log"
    await eventually(lambda: all(f"forged-{number}" in log.read_text() for number in range(2)), timeout_s=10)
    async with AsyncClient(guarded.router_addresses) as client:
        assert {each.info.worker_id for each in (await client.status(timeout=5)).workers} == {"prefill-0", "decode-0"}
    assert not reached
    assert log.read_text().count("is ignored: it is not signed") == 1
    assert log.read_text().count("is ignored: it is signed with another mesh secret") == 1
    async with Redis.from_url(guarded.redis_url, protocol=2) as redis:
        await redis.delete("pdmesh:default:worker:forged-0", "pdmesh:default:worker:forged-1")
    for forger in forgers:
        await forger.stop()
    listening.close()
    await listening.wait_closed()


async def test_a_router_with_another_secret_says_so_once(
    guarded: LocalMesh, tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    config = config_for(tiny, mesh_secret=write_secret(tmp_path / "other"))
    router = Router(replace(config, workers=guarded.worker_addresses))
    await router.start()
    try:
        await eventually(lambda: sum("refuses this router" in each.message for each in caplog.records) == 2, timeout_s=10)
        await asyncio.sleep(1)  # several attempts
    finally:
        await router.stop()
    told = [each.message for each in caplog.records if "refuses this router" in each.message]
    assert len(told) == 2
    assert all("different mesh secrets; give both the same file with --mesh-secret-file" in text for text in told)
    assert "is lost" not in caplog.text


async def test_the_command_needs_the_secret(
    guarded: LocalMesh, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("roles", "decode-0", "decode", "--router", guarded.router_address)
    assert await asyncio.to_thread(cli.run, command) == 1
    assert "--mesh-secret-file" in capsys.readouterr().err
    monkeypatch.setenv(VARIABLE, guarded.config.mesh_secret.mesh_secret_file)
    assert await asyncio.to_thread(cli.run, command) == 0


async def test_a_secret_is_replaced_while_requests_run(guarded: LocalMesh) -> None:
    file = _file_of(guarded)
    former, new = file.read_text().strip(), secrets.token_hex(32)
    async with AsyncClient(guarded.router_addresses) as client:
        for lines in ((former, new), (new, former), (new,)):
            replacement = file.with_name("new")
            replacement.touch(0o600)
            replacement.write_text("\n".join(lines))
            replacement.replace(file)
            for number in range(4):
                result = await client.generate(
                    oracle.prompt_of(20 + number, 40), temperature=0, max_tokens=4, ignore_eos=True, mode="remote", timeout=60
                )
                assert (len(result.choices[0].token_ids), result.timings.transport) == (4, "tcp")
                await asyncio.sleep(0.5)  # until every process has looked at the file again
    async with connect(guarded.member("decode-0").address, secret=_secret_of(file.with_name("former"), former)) as channel:
        control: worker_pb2_grpc.WorkerControlAsyncStub = worker_pb2_grpc.WorkerControlStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="different mesh secrets"):
            await control.GetInfo(worker_pb2.GetInfoRequest(), timeout=5)


def _secret_of(path: Path, line: str) -> MeshSecret | None:
    config = write_secret(path)
    path.write_text(line)
    return open_secret(config)


async def test_no_log_holds_a_prompt_a_key_or_the_secret(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The logs of all processes of a mesh at level debug, after good requests, refused ones and wrong keys."""
    keys = tmp_path / "keys.json"
    assert await asyncio.to_thread(cli.run, ("keys", "new", "app", "--api-keys", str(keys))) == 0
    key = max(capsys.readouterr().out.split(), key=len)
    logs = tmp_path / "logs"
    mesh = LocalMesh(
        LocalMeshConfig(
            model=str(tiny), port=0, num_threads=1, throwaway_secret=True, log_dir=str(logs), env={"PDMESH_LOG": "debug"}
        )
    )
    async with mesh:
        secret = _file_of(mesh).read_text().strip()
        plan = router_plans(mesh.config, mesh.redis_url)[0]
        plan = replace(plan, name="router-keys", argv=(*plan.argv, f"--api-keys={keys}"))
        router = Member(plan, logs, lambda _: None, restart=False, start_timeout_s=60)
        await router.start()
        told = await _said_everywhere(router.address, key)
        async with connect(mesh.member("decode-0").address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await _called(channel, "/pdmesh.v1.DecodeService/Submit")
        await router.stop(3)
    told.append(str(refused.value))
    texts = {path.name: path.read_text() for path in logs.glob("*.log")}
    assert {"router-keys.log", "decode-0.log", "prefill-0.log"} <= set(texts)
    assert all(texts.values())
    for where, text in (*texts.items(), *(("error", each) for each in told)):
        for word in (CANARY, key, secret):
            assert word not in text, where


async def _said_everywhere(router: str, key: str) -> list[str]:
    """Send the canary in a request that runs, one that is refused and one with a wrong key; return the errors' texts."""
    told = []
    async with AsyncClient(router, api_key=key) as client:
        await eventually_answers(client)
        with pytest.raises(MeshError) as refused:
            await client.generate(CANARY, max_tokens=10**6, timeout=30)
        told.append(str(refused.value))
    async with AsyncClient(router, api_key=f"{key}{CANARY}") as client:
        with pytest.raises(MeshError) as refused:
            await client.generate(CANARY, max_tokens=4, timeout=30)
        told.append(str(refused.value))
    return told


async def eventually_answers(client: AsyncClient) -> None:
    """Ask until the router has found the workers."""
    async with asyncio.timeout(30):
        while True:
            try:
                result = await client.generate(CANARY, max_tokens=4, ignore_eos=True, timeout=30)
            except Unavailable:
                await asyncio.sleep(0.1)
                continue
            assert len(result.choices[0].token_ids) == 4
            return
