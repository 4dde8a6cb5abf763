"""API keys: records, tables, the file, the store, and what a router does with them on all its gRPC protocols."""

from __future__ import annotations

import json
import stat
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.errors import Unavailable
from pdmesh.runtime.rpc.channel import connect
from pdmesh.third_party.kserve import grpc_service_pb2, grpc_service_pb2_grpc
from pdmesh.third_party.vllm import vllm_engine_pb2, vllm_engine_pb2_grpc
from pdmesh.v1 import mesh_pb2
from router.auth import api_keys
from router.auth.api_keys import ApiKey, KeyProblem, KeyTable, hash_of, new_key, open_store
from tests.router.api_keys import add_key, bearer
from tests.router.mesh import Mesh, request, running_mesh

GOOD = ApiKey(hash_of("k"), "name", "tenant", created=1)
CODE = grpc.StatusCode


def test_new_keys_are_long_and_different() -> None:
    made = {new_key() for _ in range(100)}
    assert len(made) == 100 and all(len(key) == len("pdm_") + 43 for key in made)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hash", "00"), ("hash", 7), ("name", ""), ("name", "a b"), ("name", "n" * 65), ("tenant", "t" * 129),
        ("tenant", "a\nb"), ("created", -1), ("created", "now"), ("created", True), ("expires", 1.5), ("admin", 1),
    ],
)  # fmt: skip
def test_a_wrong_record_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(KeyProblem, match=f"^{field}: "):
        ApiKey.from_value({**json.loads(GOOD.to_json()), field: value})


@pytest.mark.parametrize("value", [7, [], {"hash": GOOD.hash}, {**json.loads(GOOD.to_json()), "secret": "x"}])
def test_what_is_no_record(value: Any) -> None:
    with pytest.raises(KeyProblem):
        ApiKey.from_value(value)


def test_a_record_says_the_same_after_a_round_trip_and_never_the_key() -> None:
    key = replace(GOOD, hash=hash_of("pdm_secret"), expires=9, admin=True)
    assert ApiKey.from_value(json.loads(key.to_json())) == key
    assert "pdm_secret" not in key.to_json()


def test_expiry() -> None:
    key = replace(GOOD, expires=100)
    assert key.is_good(99.9) and not key.is_good(100) and GOOD.is_good(1e12)


def test_a_table_finds_by_the_key_and_takes_a_name_once() -> None:
    table = KeyTable([GOOD])
    assert table.find("k") is not None and table.find("K") is None and table.find(GOOD.hash) is None
    assert table.find("\udc80") is None
    with pytest.raises(KeyProblem, match=r"^name: "):
        KeyTable([GOOD, replace(GOOD, hash=hash_of("other"))])


def test_the_file_is_private_and_survives_concurrent_writers(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: add_key(path, f"k{number}"), range(24)))
    assert len(api_keys.read_key_file(path)) == 24
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(file.name for file in tmp_path.iterdir()) == [".keys.json.lock", "keys.json"]


def test_a_change_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add_key(path, "k")
    before = path.read_bytes()
    with pytest.raises(KeyProblem):
        add_key(path, "k")
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"keys": 1}', '{"keys": [{"hash": "x"}]}'])
def test_a_router_does_not_start_with_a_wrong_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--api-keys"):
        open_store(str(path), "default")
    with pytest.raises(ConfigError, match="--api-keys"):
        open_store(str(tmp_path / "missing"), "default")


async def test_the_store_follows_the_file_and_keeps_what_it_knows(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add_key(path, "one", tenant="a")
    add_key(path, "old", expires=2)
    store = open_store(str(path), "default")
    assert store is not None
    with pytest.raises(Unavailable):
        store.find("one")
    await store.refresh()
    assert (store.find("one"), store.find("two"), store.find("old")) == (api_keys.read_key_file(path).find("one"), None, None)
    add_key(path, "two")
    await store.refresh()
    assert store.find("two") is not None
    path.write_text("{ half")
    await store.refresh()
    assert store.find("two") is not None
    path.unlink()
    await store.refresh()
    assert store.find("two") is not None


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def mesh(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    keys = tmp_path_factory.mktemp("keys") / "keys.json"
    add_key(keys, "alice", tenant="a")
    add_key(keys, "bob", tenant="b")
    add_key(keys, "root", admin=True)
    add_key(keys, "late", tenant="a", expires=2)
    async with running_mesh(model_folder, api_keys=str(keys)) as mesh:
        yield mesh


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def channel(mesh: Mesh) -> AsyncIterator[grpc.aio.Channel]:
    async with connect(mesh.router.server.address) as channel:
        yield channel


async def _refused(call: Any, code: grpc.StatusCode) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await (call.read() if hasattr(call, "read") else call)
    assert refused.value.code() is code
    return refused.value.details() or ""


BAD = [(), (("authorization", "alice"),), (("authorization", "Basic alice"),), *map(bearer, ("mallory", "late", "", "x" * 600))]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("metadata", BAD)
async def test_without_a_good_key_no_protocol_answers(mesh: Mesh, channel: grpc.aio.Channel, metadata: Any) -> None:
    kserve: Any = grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel)
    vllm: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    stub: Any = mesh.stub
    infer = grpc_service_pb2.ModelInferRequest(model_name="tiny")
    for call in (
        stub.Generate(request(), metadata=metadata),
        stub.Chat(mesh_pb2.ChatRequest(), metadata=metadata),
        stub.ListModels(mesh_pb2.ListModelsRequest(), metadata=metadata),
        stub.GetStatus(mesh_pb2.GetStatusRequest(), metadata=metadata),
        stub.Tokenize(mesh_pb2.TokenizeRequest(), metadata=metadata),
        kserve.ModelInfer(infer, metadata=metadata),
        kserve.ModelStreamInfer(iter([infer]), metadata=metadata),
        vllm.Generate(vllm_engine_pb2.GenerateRequest(), metadata=metadata),
        vllm.Abort(vllm_engine_pb2.AbortRequest(), metadata=metadata),
    ):
        problem = await _refused(call, CODE.UNAUTHENTICATED)
        assert "API key" in problem and "alice" not in problem


@pytest.mark.asyncio(loop_scope="module")
async def test_probes_need_no_key(mesh: Mesh, channel: grpc.aio.Channel) -> None:
    health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    assert (
        await grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel).ServerReady(grpc_service_pb2.ServerReadyRequest())
    ).ready
    assert (await vllm_engine_pb2_grpc.VllmEngineStub(channel).HealthCheck(vllm_engine_pb2.HealthCheckRequest())).healthy


@pytest.mark.asyncio(loop_scope="module")
async def test_a_request_runs_for_the_tenant_of_its_key(mesh: Mesh) -> None:
    for named in ("", "a"):
        wanted = request()
        wanted.options.tenant = named
        call = mesh.stub.Generate(wanted, metadata=bearer("alice"))
        assert [message async for message in call]
    assert {submit.request.tenant for submit in mesh["d0"].submits} == {"a"}
    wanted = request()
    wanted.options.tenant = "b"
    problem = await _refused(mesh.stub.Generate(wanted, metadata=bearer("alice")), CODE.PERMISSION_DENIED)
    assert "options.tenant" in problem
    aside = (*bearer("alice"), ("x-pdmesh-tenant", "b"))
    await _refused(mesh.stub.Generate(request(), metadata=aside), CODE.PERMISSION_DENIED)


@pytest.mark.asyncio(loop_scope="module")
async def test_only_admins_see_all_tenants(mesh: Mesh, channel: grpc.aio.Channel) -> None:
    vllm: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    await _refused(mesh.stub.GetStatus(mesh_pb2.GetStatusRequest(), metadata=bearer("alice")), CODE.PERMISSION_DENIED)
    await _refused(mesh.stub.Explain(mesh_pb2.ExplainRequest(), metadata=bearer("alice")), CODE.PERMISSION_DENIED)
    await _refused(vllm.GetLoads(vllm_engine_pb2.GetLoadsRequest(), metadata=bearer("alice")), CODE.PERMISSION_DENIED)
    info = vllm_engine_pb2.GetServerInfoRequest()
    await _refused(vllm.GetServerInfo(info, metadata=bearer("alice")), CODE.PERMISSION_DENIED)
    assert (await vllm.GetServerInfo(info, metadata=bearer("root"))).server_type == "pdmesh"
    assert (await mesh.stub.GetStatus(mesh_pb2.GetStatusRequest(), metadata=bearer("root"))).workers


@pytest.mark.asyncio(loop_scope="module")
async def test_nobody_aborts_the_requests_of_another_tenant(mesh: Mesh, channel: grpc.aio.Channel) -> None:
    vllm: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    tokens = vllm_engine_pb2.TokenizedInput(input_ids=range(64, 100))
    wanted = vllm_engine_pb2.GenerateRequest(request_id="mine", tokenized=tokens, stream=True)
    wanted.sampling_params.max_tokens = 12
    mesh["d0"].pause_at = 4
    call = aiter(vllm.Generate(wanted, metadata=bearer("alice")))
    await anext(call)
    await vllm.Abort(vllm_engine_pb2.AbortRequest(request_ids=["mine"]), metadata=bearer("bob"))
    mesh["d0"].pause_at = None
    mesh["d0"].resume.set()
    rest = [message async for message in call]
    assert rest[-1].complete.finish_reason == "length"
