"""The sampling defaults of a model's generation_config.json: for requests that leave parameters out, in every protocol."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from pdmesh.client.client import AsyncClient
from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.rpc.channel import connect
from pdmesh.third_party.kserve.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from pdmesh.third_party.vllm import vllm_engine_pb2
from pdmesh.third_party.vllm.vllm_engine_pb2_grpc import VllmEngineStub
from pdmesh.v1 import common_pb2
from router.tokenization import prepared_request
from tests.router.kserve import calls as kserve_calls
from tests.router.mesh import Mesh, request, running_mesh, write_model

pytestmark = pytest.mark.asyncio(loop_scope="module")
PUBLISHED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05, "presence_penalty": 1.5, "min_p": 0.01}
FILE = {**PUBLISHED, "do_sample": True, "eos_token_id": [258, 256], "max_new_tokens": 40, "transformers_version": "4.51.0"}
EXPLICIT = {"temperature": 1, "top_p": 1, "top_k": 0, "repetition_penalty": 1, "presence_penalty": 0, "min_p": 0}


def write(folder: Path, **changes: object) -> Path:
    write_model(folder)
    (folder / "generation_config.json").write_text(json.dumps({**FILE, **changes}))
    return folder


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    async with running_mesh(write(tmp_path_factory.mktemp("model")), http_port=0) as mesh:
        yield mesh


def sampled(mesh: Mesh) -> dict[str, float]:
    """What the decode worker was told of the published parameters in its latest request."""
    params = mesh["d0"].submits[-1].request.sampling
    return {name: getattr(params, name) for name in PUBLISHED if params.HasField(name)}  # type: ignore[arg-type]


async def test_a_request_that_says_nothing_gets_what_the_publisher_set(mesh: Mesh) -> None:
    await mesh.generate(request())
    assert sampled(mesh) == PUBLISHED
    assert mesh["d0"].submits[-1].request.sampling.max_tokens == 8


@pytest.mark.parametrize("name", PUBLISHED)
async def test_what_a_request_says_wins_also_where_that_changes_nothing(mesh: Mesh, name: str) -> None:
    await mesh.generate(request(**{name: EXPLICIT[name]}))  # type: ignore[arg-type]
    assert sampled(mesh) == {**PUBLISHED, name: EXPLICIT[name]}


async def test_openai(mesh: Mesh) -> None:
    assert mesh.router.http is not None
    async with httpx.AsyncClient(base_url=mesh.router.http.url, timeout=20) as http:
        plain = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        (await http.post("/v1/chat/completions", json=plain)).raise_for_status()
        assert sampled(mesh) == PUBLISHED
        (await http.post("/v1/chat/completions", json={**plain, **EXPLICIT, "top_k": -1})).raise_for_status()
        assert sampled(mesh) == EXPLICIT
        (model,) = (await http.get("/v1/models")).json()["data"]
    assert model["sampling_defaults"] == PUBLISHED


async def test_kserve(mesh: Mesh) -> None:
    channel = connect(mesh.router.server.address)
    stub = GRPCInferenceServiceStub(channel)
    await stub.ModelInfer(kserve_calls.request())
    assert sampled(mesh) == PUBLISHED
    await stub.ModelInfer(kserve_calls.request(id="r2", **EXPLICIT))  # type: ignore[arg-type]
    assert sampled(mesh) == EXPLICIT
    await channel.close()


async def test_the_engine_protocol_whose_zeros_say_nothing(mesh: Mesh) -> None:
    channel = connect(mesh.router.server.address)
    stub = VllmEngineStub(channel)
    tokens = vllm_engine_pb2.TokenizedInput(input_ids=range(64, 80))
    params = vllm_engine_pb2.SamplingParams(max_tokens=4, temperature=0, top_p=0.5)
    async for _ in stub.Generate(vllm_engine_pb2.GenerateRequest(request_id="a", tokenized=tokens, sampling_params=params)):
        pass
    assert sampled(mesh) == {**PUBLISHED, "temperature": 0, "top_p": 0.5}
    info = await stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest())
    assert json.loads(info.default_sampling_params_json) == PUBLISHED
    await channel.close()


async def test_list_models_and_the_client_say_them(mesh: Mesh) -> None:
    async with AsyncClient(mesh.router.server.address) as client:
        (model,) = await client.list_models()
    assert model.sampling_defaults == PUBLISHED


async def test_none_ignores_the_file_but_not_its_end_tokens(tmp_path: Path) -> None:
    folder = write(tmp_path, temperature="hot")  # nor is it refused for what is ignored
    async with running_mesh(folder, generation_config="none") as mesh:
        await mesh.generate(request())
        assert sampled(mesh) == {}
        (model,) = mesh.router.frontend.models().models
        assert model.sampling_defaults == common_pb2.SamplingParams()
        assert mesh.router.core.models["tiny"].eos_token_ids == {256, 258}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"temperature": "hot"}, "temperature is 'hot', not a number"),
        ({"temperature": -1}, "temperature: -1.0 is neither 0 (greedy) nor"),
        ({"top_k": 2.5}, "top_k is 2.5, not a whole number"),
        ({"top_p": 1.5}, "top_p: 1.5 is not in (0, 1]"),
        ({"repetition_penalty": True}, "repetition_penalty is True, not a number"),
    ],
)
async def test_a_value_that_cannot_be_is_named(tmp_path: Path, changes: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        prepared_request.load({"tiny": str(write(tmp_path, **changes))})
    assert f"generation_config.json: {problem}" in str(raised.value)
    assert "--generation-config none" in str(raised.value)


@pytest.mark.parametrize(("value", "read"), [(-1, 0), (50.0, 50), (None, None)])
async def test_spellings_of_top_k(tmp_path: Path, value: object, read: int | None) -> None:
    model = prepared_request.load({"tiny": str(write(tmp_path, top_k=value))})["tiny"]
    assert model.sampling_defaults.get("top_k") == read


async def test_a_temperature_next_to_nothing_is_greedy(tmp_path: Path) -> None:
    model = prepared_request.load({"tiny": str(write(tmp_path, temperature=1e-9))})["tiny"]
    assert model.sampling_defaults["temperature"] == 0
