"""Embeddings by openai's own client and over gRPC, against a router with stub workers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from pdmesh.client import wire
from pdmesh.client.types import Pooling
from pdmesh.v1 import common_pb2, worker_pb2
from tests.router.mesh import Mesh, mesh_of, running_mesh
from tests.router.openai.conftest import client_of
from tests.router.stub_prefill import stub_embedding
from tests.router.stub_workers import DECODE, PREFILL, StubWorker
from tests.support.waiting import eventually

MEAN, LAST = common_pb2.POOLING_MEAN, common_pb2.POOLING_LAST
pytestmark = pytest.mark.asyncio(loop_scope="module")


def unit(values: Sequence[float]) -> list[float]:
    length = math.sqrt(sum(value * value for value in values))
    return [value / length for value in values]


def tokens_of(mesh: Mesh, text: str) -> list[int]:
    return list(mesh.router.frontend.model_of("").tokenizer.encode(text))


async def test_a_text_and_its_usage(served: Mesh, client: openai.AsyncOpenAI) -> None:
    answer = await client.embeddings.create(model="tiny", input="hello")
    prompt = tokens_of(served, "hello")
    assert answer.object == "list" and answer.model == "tiny" and answer.data[0].index == 0
    assert answer.data[0].embedding == pytest.approx(unit(stub_embedding(prompt, MEAN)))
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (len(prompt), len(prompt))
    assert served["p0"].embeds[-1].request.sampling.max_tokens == 1
    await served.until_whole()


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
async def test_several_inputs_come_in_their_order(client: openai.AsyncOpenAI, encoding_format: Any) -> None:
    inputs = [[70 + number, 64, 65 + number] for number in range(20)]
    answer = await client.embeddings.create(model="tiny", input=inputs, encoding_format=encoding_format)
    assert [each.index for each in answer.data] == list(range(20))
    if encoding_format == "float":
        for each, prompt in zip(answer.data, inputs, strict=True):
            assert each.embedding == pytest.approx(unit(stub_embedding(prompt, MEAN)))
    assert answer.usage.prompt_tokens == 60


async def test_token_ids_pooling_dimensions_and_length(client: openai.AsyncOpenAI) -> None:
    prompt = [64, 70, 65]
    raw = await client.embeddings.create(model="tiny", input=prompt, extra_body={"pooling": "last", "normalize": False})
    assert raw.data[0].embedding == stub_embedding(prompt, LAST)
    short = await client.embeddings.create(model="tiny", input=prompt, dimensions=2)
    assert short.data[0].embedding == pytest.approx(unit(stub_embedding(prompt, MEAN)[:2]))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": ""}, "input[0]"),
    ({"input": ["a", ""]}, "input[1]"),
    ({"input": [[64], []]}, "input[1]"),
    ({"input": [64, 100_000]}, "input[0][1]"),
    ({"input": [True]}, "input"),
    ({"input": {"a": 1}}, "input"),
    ({"input": list(range(64, 89)) * 200}, "input[0]"),
    ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "dimensions": 5}, "dimensions"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ({"input": "a", "pooling": "cls"}, "pooling"),
    ({"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ({"input": "a", "dimension": 5}, "dimension"),
    ({}, "input"),
]


@pytest.mark.parametrize(("wrong", "param"), WRONG)
async def test_a_wrong_field_is_named(served: Mesh, client: openai.AsyncOpenAI, wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.post("/embeddings", body={"model": "tiny", **wrong}, cast_to=object)
    assert (refused.value.param or "").startswith(param), refused.value
    await served.until_whole()


async def test_an_unknown_model_is_404(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        await client.embeddings.create(model="other", input="a")
    assert refused.value.code == "model_not_found"


async def test_over_grpc_in_the_client_librarys_form(served: Mesh) -> None:
    request = wire.embed_request(["hello", [64, 65]], "", Pooling.LAST, 0, normalize=True)
    text, ids = wire.embeddings(await served.stub.Embed(request))
    assert text.values == pytest.approx(unit(stub_embedding(tokens_of(served, "hello"), LAST)))
    assert ids.values == pytest.approx(unit(stub_embedding([64, 65], LAST))) and ids.num_tokens == 2


async def test_another_worker_is_asked_when_one_refuses_or_is_lost(model_folder: Path) -> None:
    async with running_mesh(model_folder, prefill=2, http_port=0) as mesh, client_of(mesh) as client:
        for plan in ("reject", "break"):
            for number in range(2):
                mesh[f"p{number}"].prefill_plan = [plan]
                answer = await client.embeddings.create(model="tiny", input=[64, 65])
                assert answer.data[0].embedding == pytest.approx(unit(stub_embedding([64, 65], MEAN)))
        await mesh.until_whole()


async def test_logits_that_are_not_finite_are_no_reason_to_ask_another(model_folder: Path) -> None:
    async with running_mesh(model_folder, prefill=2, http_port=0) as mesh, client_of(mesh) as client:
        for number in range(2):
            mesh[f"p{number}"].prefill_plan = ["not_finite"]
        with pytest.raises(openai.InternalServerError):
            await client.embeddings.create(model="tiny", input=[64, 65])
        assert sum(len(mesh[f"p{number}"].embeds) for number in range(2)) == 1


async def test_full_workers_are_429_when_patience_is_over(model_folder: Path) -> None:
    async with running_mesh(model_folder, http_port=0, place_timeout_s=0.3) as mesh, client_of(mesh) as client:
        mesh["p0"].prefill_plan = ["reject"] * 20
        with pytest.raises(openai.RateLimitError) as refused:
            await client.embeddings.create(model="tiny", input=[64, 65])
        assert refused.value.response.headers["retry-after"] == "1"
        await mesh.until_whole()


async def test_an_engine_that_cannot_is_named(model_folder: Path) -> None:
    lacks = (worker_pb2.ENGINE_LACK_EMBEDDINGS,)
    both = [StubWorker("p0", (PREFILL,), engine="other", lacks=lacks), StubWorker("d0", (DECODE,))]
    async with mesh_of(model_folder, both, http_port=0) as mesh, client_of(mesh) as client:
        with pytest.raises(openai.APIStatusError, match=r"engines \(other\) give no hidden states") as refused:
            await client.embeddings.create(model="tiny", input=[64, 65])
        assert refused.value.status_code == 501 and not mesh["p0"].embeds


async def test_a_deadline_and_a_client_that_leaves_cancel_the_call(model_folder: Path) -> None:
    async with running_mesh(model_folder, http_port=0) as mesh, client_of(mesh) as client:
        mesh["p0"].prefill_plan = ["mute", "mute"]
        with pytest.raises(openai.APIStatusError) as late:
            await client.embeddings.create(model="tiny", input=[64], extra_headers={"X-Request-Timeout-Ms": "200"})
        assert late.value.status_code == 504
        leaving = asyncio.create_task(client.embeddings.create(model="tiny", input=[64]))
        await eventually(lambda: len(mesh["p0"].embeds) == 2)
        leaving.cancel()
        await eventually(lambda: mesh["p0"].num_cancelled_prefills == 2)
        await mesh.until_whole()


async def test_the_first_error_ends_the_other_inputs(model_folder: Path) -> None:
    async with running_mesh(model_folder, http_port=0, max_inflight=2, max_queued=0) as mesh, client_of(mesh) as client:
        mesh["p0"].prefill_plan = ["mute"] * 8
        with pytest.raises(openai.RateLimitError):
            await client.embeddings.create(model="tiny", input=["a", "b", "c"])
        await mesh.until_whole()
        assert mesh["p0"].num_cancelled_prefills <= 2


async def test_keys_and_tenants_hold(limited: Mesh) -> None:
    async with client_of(limited, api_key="key-1") as owner, client_of(limited, api_key="wrong") as stranger:
        await owner.embeddings.create(model="tiny", input="hello")
        assert limited["p0"].embeds[-1].request.tenant == "tenant-1"
        with pytest.raises(openai.AuthenticationError):
            await stranger.embeddings.create(model="tiny", input="hello")
