"""The mesh described as one engine, and its tokenizer files."""

import hashlib
import io
import json
import zipfile
from pathlib import Path

import grpc
import pytest

from pdmesh.text.tokenizer import Tokenizer
from pdmesh.third_party.vllm import smg_common_pb2 as common_pb
from pdmesh.third_party.vllm import vllm_engine_pb2 as pb
from router.api.vllm import service
from tests.router import stub_model
from tests.router.vllm_engine.test_generate import Answer, request, serving
from tests.support.waiting import eventually


async def test_model_and_server(model_folder: Path) -> None:
    async with serving(model_folder, decode=2) as (_, stub):
        assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
        model = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert model.served_model_name == model.model_path == model.tokenizer_path == "tiny"
        assert (model.is_generation, model.supports_vision) == (True, False)
        assert (model.max_context_length, model.vocab_size) == (stub_model.MAX_CONTEXT, stub_model.VOCAB_SIZE)
        assert list(model.eos_token_ids) == sorted(Tokenizer.load(model_folder).eos_token_ids)
        server = await stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (server.server_type, server.data_parallel_size) == ("pdmesh", 1)
        assert (server.max_num_seqs, server.block_size, server.kv_cache_dtype) == (128, stub_model.BLOCK_SIZE, "float32")
        assert server.uptime_seconds > 0 and server.last_receive_timestamp == 0


async def test_loads(model_folder: Path) -> None:
    async with serving(model_folder) as (mesh, stub):
        mesh["d0"].pause_at = 4
        call = stub.Generate(request())
        await eventually(lambda: mesh["d0"].held)
        server = await stub.GetServerInfo(pb.GetServerInfoRequest())
        assert server.active_requests == 1 and server.last_receive_timestamp > 0
        (load,) = (await stub.GetLoads(pb.GetLoadsRequest())).loads
        while not load.num_running_reqs:  # until the next report
            (load,) = (await stub.GetLoads(pb.GetLoadsRequest())).loads
        assert (load.num_running_reqs, load.num_total_reqs, load.max_running_requests) == (1, 1, 64)
        assert load.max_total_num_tokens == 1000 * stub_model.BLOCK_SIZE
        assert load.num_used_tokens == 10 * stub_model.BLOCK_SIZE and load.token_usage == 0.01
        call.cancel()
        await mesh.until_whole()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.GetLoads(pb.GetLoadsRequest(dp_rank=1))
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_tokenizer_files(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "CHUNK_BYTES", 1000)
    async with serving(model_folder) as (_, stub):
        chunks = [chunk async for chunk in stub.GetTokenizer(common_pb.GetTokenizerRequest())]
        again = [chunk async for chunk in stub.GetTokenizer(common_pb.GetTokenizerRequest())]
    data = b"".join(chunk.data for chunk in chunks)
    assert len(chunks) > 1 and [chunk.sha256 for chunk in chunks[:-1]] == [""] * (len(chunks) - 1)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    assert chunks == again
    zipfile.ZipFile(io.BytesIO(data)).extractall(tmp_path)
    assert Tokenizer.load(tmp_path).encode("Hallo") == Tokenizer.load(model_folder).encode("Hallo")


def test_archives_hold_no_weights_and_are_the_same_each_time(model_folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "config.json", "model.safetensors", "model.gguf", "chat_template.jinja", "notes.txt"):
        (tmp_path / name).write_text(json.dumps(name))
    packed = service.pack(tmp_path)
    (tmp_path / "config.json").touch()
    assert packed == service.pack(tmp_path)
    names = zipfile.ZipFile(io.BytesIO(packed)).namelist()
    assert names == ["chat_template.jinja", "config.json", "tokenizer.json"]


async def test_what_a_mesh_does_not_do(model_folder: Path) -> None:
    async with serving(model_folder) as (_, stub):
        for call in (stub.Embed(pb.EmbedRequest()), stub.FlushCache(common_pb.FlushCacheRequest())):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call
            assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED and raised.value.details()


async def test_a_router_of_two_models_says_what_to_do(model_folder: Path) -> None:
    async with serving(model_folder, models=(f"tiny={model_folder}", f"other={model_folder}")) as (_, stub):
        for call in (stub.GetModelInfo(pb.GetModelInfoRequest()), Answer().read(stub.Generate(request()))):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call
            assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "--models" in (raised.value.details() or "")


async def test_health_without_workers(model_folder: Path) -> None:
    async with serving(model_folder, prefill=0, decode=0) as (_, stub):
        health = await stub.HealthCheck(pb.HealthCheckRequest())
        assert not health.healthy and health.message
