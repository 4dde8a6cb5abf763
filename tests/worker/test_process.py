"""Real processes: ready line, registration, SIGTERM, refusals at start."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pdmesh.runtime.registry.redis_server import EmbeddedRedis
from pdmesh.runtime.registry.registry import Registry
from pdmesh.runtime.rpc.channel import connect
from pdmesh.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, worker_pb2, worker_pb2_grpc
from tests.support.forked import run_worker
from tests.support.mini_router import MiniRouter
from tests.support.tiny_models import make_tiny_model
from tests.support.worker_mesh import LOCAL, Model, load_tiny, reference, running_worker, token_request

PROMPT = [10 + (7 * i) % 200 for i in range(60)]
ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def process(module: str, *flags: str, env: dict[str, str] | None = None) -> AsyncIterator[asyncio.subprocess.Process]:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *flags,
        cwd=ROOT,
        env={**os.environ, **(env or {}), "OMP_NUM_THREADS": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def ready(child: asyncio.subprocess.Process) -> dict[str, object]:
    assert child.stdout is not None
    async with asyncio.timeout(60):
        while line := await child.stdout.readline():
            message: dict[str, object] = json.loads(line)
            if message.get("ready"):
                return message
    assert child.stderr is not None
    raise AssertionError((await child.stderr.read()).decode())


def flags(folder: Path, *more: str) -> list[str]:
    return ["--model", str(folder), "--num-blocks", "64", "--model-name", "tiny", "--num-threads", "1", *more]


async def test_a_decode_process_serves_and_drains(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    async with process("decode_service", *flags(folder, "--worker-id", "d1")) as child:
        message = await ready(child)
        channel = connect(str(message["address"]))
        control: worker_pb2_grpc.WorkerControlAsyncStub = worker_pb2_grpc.WorkerControlStub(channel)
        info = await control.GetInfo(worker_pb2.GetInfoRequest())
        assert (info.worker_id, list(info.roles)) == ("d1", [worker_pb2.ROLE_DECODE])
        stub: decode_pb2_grpc.DecodeServiceAsyncStub = decode_pb2_grpc.DecodeServiceStub(channel)
        model = load_tiny(folder, "auto")  # as the process has it
        await _generate_through(model, stub, info)
        child.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            assert await child.wait() == 0
        await channel.close()


async def _generate_through(model: Model, stub: decode_pb2_grpc.DecodeServiceAsyncStub, info: worker_pb2.WorkerInfo) -> None:
    """A hand-off from this process into the other one, over shm."""
    request = token_request(PROMPT)
    async with running_worker(model, roles=("prefill",)) as prefiller:
        router, peer = MiniRouter(), _Remote(stub, info)
        await router.attach(peer)  # type: ignore[arg-type]
        reservation = await router.submit(peer, "r1", request)  # type: ignore[arg-type]
        _, outcome = await router.prefill(prefiller, peer, "r1", request, reservation)  # type: ignore[arg-type]
        assert (outcome.status, outcome.transport) == (prefill_pb2.HANDOFF_STATUS_COMMITTED, "shm"), outcome
        await router.until_finished("r1")
        assert router.of("r1").output() == reference(model, request)[0]
        await router.detach()


class _Remote:
    """What MiniRouter needs of a peer in another process."""

    def __init__(self, stub: decode_pb2_grpc.DecodeServiceAsyncStub, info: worker_pb2.WorkerInfo) -> None:
        self.decode = stub
        self.info = info


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--num-blocks", "0", "--kv-memory-mb", "1", "--block-size", "8192"], "blocks"),
        (["--roles", "cook"], "--roles"),
        (["--host", "0.0.0.0"], "--advertise"),
        (["--transports", "pigeon"], "--transports"),
        (["--lease-s", "0"], "--lease-s"),
        (["--worker-id", "a b"], "--worker-id"),
        (["--cpus", "100000"], "--cpus"),
        (["--backend", "torch", "--quantization", "int8"], "--quantization"),
        (["--redis", "nonsense"], "redis"),
        (["--model", "/nowhere"], "nowhere"),
        (["--speculation", "oracle"], "--speculation: 'oracle' is not known"),
        (["--max-draft-tokens", "65"], "--max-draft-tokens"),
        (["--speculation", "none", "--draft-length", "4"], "--draft-length: 4 is given, but speculation is none"),
        (["--speculation", "heads"], "--draft-heads: no draft_heads.safetensors"),
        (["--speculation", "heads", "--draft-heads", __file__], f"--draft-heads: {__file__}: it cannot be read"),
        (["--speculation", "auto", "--draft-model", "/nowhere"], "--draft-model: /nowhere does not exist"),
        (["--speculation", "self_draft", "--self-draft-layers", "9"], "--self-draft-layers: 9 is not allowed"),
        (["--tensor-parallel", "2"], "--tensor-parallel: 2 does not go with the native backend for now"),
        (["--tensor-parallel", "3", "--backend", "torch"], "--tensor-parallel: 3 does not divide the model's 2 KV heads"),
    ],
)
def test_wrong_settings_end_with_one_line(model: Model, more: list[str], named: str, tmp_path: Path) -> None:
    code, stderr = run_worker(flags(model.folder, *more), tmp_path)
    assert code == 2, stderr
    assert named in stderr.splitlines()[-1], stderr


async def test_without_a_compiler_torch_serves_with_a_warning(model: Model, tmp_path: Path) -> None:
    env = {"CXX": "no-such-compiler", "PDMESH_CACHE": str(tmp_path), "PDMESH_KERNELS_DIR": ""}
    async with process("pdmesh.worker", *flags(model.folder), env=env) as child:
        message = await ready(child)
        channel = connect(str(message["address"]))
        control: worker_pb2_grpc.WorkerControlAsyncStub = worker_pb2_grpc.WorkerControlStub(channel)
        info = await control.GetInfo(worker_pb2.GetInfoRequest())
        assert "native" not in info.identity.numeric_mode
        assert info.layout.kv_dtype == "float32"
        await channel.close()
        child.send_signal(signal.SIGTERM)
        _, stderr = await asyncio.wait_for(child.communicate(), 20)
        assert "the slower torch backend" in stderr.decode() and "no-such-compiler" in stderr.decode()


async def test_a_variable_at_fault_is_named(model: Model) -> None:
    async with process("pdmesh.worker", *flags(model.folder), env={"PDMESH_CPU_ISA": "quantum"}) as child:
        _, stderr = await asyncio.wait_for(child.communicate(), 60)
        assert child.returncode == 2, stderr.decode()
        assert "PDMESH_CPU_ISA: " in stderr.decode().splitlines()[-1], stderr.decode()


async def test_a_taken_port_is_named(model: Model) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for flag in ("--port", "--transfer-port"):
            async with process("pdmesh.worker", *flags(model.folder, flag, port)) as child:
                _, stderr = await asyncio.wait_for(child.communicate(), 60)
                assert child.returncode == 2, stderr.decode()
                assert port in stderr.decode().splitlines()[-1], stderr.decode()


async def test_a_dead_engine_ends_the_process(model: Model) -> None:
    """Code 1, at once, with the reason."""
    path = f"{Path(__file__).parent / 'broken_engine'}{os.pathsep}{ROOT}"
    async with process("pdmesh.worker", *flags(model.folder), env={"PYTHONPATH": path}) as child:
        message = await ready(child)
        channel = connect(str(message["address"]))
        stub: decode_pb2_grpc.DecodeServiceAsyncStub = decode_pb2_grpc.DecodeServiceStub(channel)
        request = token_request(PROMPT)
        submit = decode_pb2.SubmitRequest(request_id="r", router_id="a", attempt=1, mode=LOCAL, request=request)
        await asyncio.gather(stub.Submit(submit), return_exceptions=True)
        _, stderr = await asyncio.wait_for(child.communicate(), 20)
        assert child.returncode == 1
        assert "the engine is broken on purpose" in stderr.decode()
        await channel.close()


async def until_registered(registry: Registry) -> list[worker_pb2.WorkerInfo]:
    for _ in range(200):
        if workers := await registry.list_workers():
            return workers
        await asyncio.sleep(0.05)
    raise AssertionError("nobody registered")


async def test_registers_and_withdraws(model: Model) -> None:
    settings = flags(model.folder, "--worker-id", "w1")
    async with EmbeddedRedis() as redis, process("pdmesh.worker", *settings, env={"PDMESH_REDIS": redis.url}) as child:
        await ready(child)
        registry = Registry(redis.url)
        workers = await until_registered(registry)
        assert [worker.worker_id for worker in workers] == ["w1"]
        child.send_signal(signal.SIGTERM)
        await asyncio.wait_for(child.wait(), 20)
        assert child.returncode == 0
        assert await registry.list_workers() == []
        await registry.stop()
