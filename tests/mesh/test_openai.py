"""The real model over HTTP, by the real `openai` client: the answers of gRPC, token for token; nothing stays behind."""

import asyncio
import signal
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
import torch

from pdmesh.client.client import AsyncClient
from pdmesh.client.types import Choice, Pooling
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from pdmesh.models.registry import ensure_model
from tests.mesh.checks import Footprint, assert_whole
from tests.support.waiting import eventually

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.real_model, pytest.mark.timeout(300)]
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name three colours of a rainbow."}]
SAMPLED: Any = {"temperature": 0.8, "top_p": 0.95, "seed": 11, "max_tokens": 24}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def mesh() -> AsyncIterator[LocalMesh]:
    folder = ensure_model("smollm2-135m-instruct", print)
    config = LocalMeshConfig(model=str(folder), model_name="smollm2", port=0, http_port=0, num_threads=1)
    mesh = LocalMesh(config)
    async with mesh:
        footprint = Footprint.of(mesh)
        yield mesh
        footprint.grow(mesh)
    footprint.assert_gone()


@pytest_asyncio.fixture(loop_scope="module")
async def client(mesh: LocalMesh) -> AsyncIterator[Any]:
    async with openai.AsyncOpenAI(base_url=f"{mesh.http_urls[0]}/v1", api_key="none", timeout=60) as client:
        yield client


@pytest.mark.parametrize("mode", ["remote", "local"])
async def test_the_same_text_as_over_grpc(mesh: LocalMesh, client: Any, mode: str) -> None:
    headers = {"X-Prefill-Mode": mode}
    async with AsyncClient(mesh.router_addresses) as grpc:
        turns = [(one["role"], one["content"]) for one in MESSAGES]
        chat = await grpc.chat(turns, **SAMPLED, n=2, logprobs=1, mode=mode, timeout=60)
        text = await grpc.generate("Once upon a time", **SAMPLED, mode=mode, timeout=60)
    asked = {"model": "smollm2", "messages": MESSAGES, **SAMPLED, "n": 2, "logprobs": True, "top_logprobs": 1}
    answer = await client.chat.completions.create(**asked, extra_headers=headers)
    assert [choice.message.content for choice in answer.choices] == [choice.text for choice in chat.choices]
    assert [choice.finish_reason for choice in answer.choices] == [_reason(choice) for choice in chat.choices]
    for ours, theirs in zip(answer.choices, chat.choices, strict=True):
        shown = [(entry.token, entry.top_logprobs[0].token) for entry in ours.logprobs.content]
        assert shown == [(entry.chosen.text, entry.top[0].text) for entry in theirs.logprobs]
        values = [entry.logprob for entry in ours.logprobs.content]
        assert values == pytest.approx([entry.chosen.logprob for entry in theirs.logprobs], abs=1e-6)
    assert answer.usage.completion_tokens == chat.usage.completion_tokens
    assert answer.usage.prompt_tokens == chat.usage.prompt_tokens
    assert answer.model_extra["pdmesh"][0]["timings"]["mode"] == mode

    streamed, fingerprints = ["", ""], set()
    stream = await client.chat.completions.create(**asked, stream=True, extra_headers=headers)
    async for chunk in stream:
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        fingerprints.add(chunk.system_fingerprint)
    assert streamed == [choice.text for choice in chat.choices]
    plain = await client.completions.create(model="smollm2", prompt="Once upon a time", **SAMPLED, extra_headers=headers)
    assert plain.choices[0].text == text.text
    assert answer.system_fingerprint.startswith("fp_")
    assert fingerprints | {plain.system_fingerprint} == {answer.system_fingerprint}
    await assert_whole(mesh)


def _reason(choice: Choice) -> str:
    return "" if choice.finish_reason is None else choice.finish_reason.name.lower()


@pytest.mark.parametrize("mode", ["remote", "local"])
async def test_what_lm_eval_asks_is_what_transformers_answers(client: Any, mode: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder = ensure_model("smollm2-135m-instruct", print)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = "The capital of France is Paris, and that of Italy is Rome."
    ids = tokenizer(text)["input_ids"]
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    answer = await client.completions.create(
        model="smollm2", prompt=text, echo=True, logprobs=1, max_tokens=0, temperature=0, extra_headers={"X-Prefill-Mode": mode}
    )
    shown = answer.choices[0].logprobs
    assert (answer.choices[0].text, "".join(shown.tokens), answer.usage.completion_tokens) == (text, text, 0)
    assert shown.token_logprobs[0] is None and shown.top_logprobs[0] is None
    values = [float(row[token]) for row, token in zip(expected, ids[1:], strict=False)]
    assert shown.token_logprobs[1:] == pytest.approx(values, abs=0.25)  # workers choose narrower weights
    is_greedy = [max(top.values()) == value for top, value in zip(shown.top_logprobs[1:], shown.token_logprobs[1:], strict=True)]
    agreed = sum(said == (int(row.argmax()) == token) for said, row, token in zip(is_greedy, expected, ids[1:], strict=False))
    assert agreed >= len(ids) - 2


async def test_a_stream_that_is_closed_frees_its_worker(mesh: LocalMesh, client: Any) -> None:
    stream = await client.completions.create(model="smollm2", prompt="Count:", max_tokens=4000, stream=True)
    await anext(aiter(stream))
    await stream.close()
    await assert_whole(mesh)


async def test_a_router_that_comes_back_is_found_where_it_was(mesh: LocalMesh, client: Any) -> None:
    pid, url = mesh.pids["router-0"], mesh.http_urls[0]
    mesh.kill("router-0", signal.SIGKILL)
    await eventually(lambda: mesh.pids.get("router-0", pid) != pid)
    async with httpx.AsyncClient() as http:
        while not await _ready(http, url):  # noqa: ASYNC110  # the event happens in another process
            await asyncio.sleep(0.1)
    assert mesh.http_urls == (url,)
    assert (await client.completions.create(model="smollm2", prompt="Once", max_tokens=2)).choices[0].text


async def _ready(http: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await http.get(f"{url}/health/ready")).status_code == 200
    except httpx.TransportError:
        return False


async def test_embeddings_over_both_protocols_are_those_of_transformers(mesh: LocalMesh, client: Any) -> None:
    """Workers pack the weights as they choose, so the direction is compared; tests/engine compares the values in float32."""
    transformers = pytest.importorskip("transformers")
    folder = ensure_model("smollm2-135m-instruct", print)
    texts = ["The capital of France is Paris.", "A cat sat on the mat. " * 50]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    async with AsyncClient(mesh.router_addresses) as grpc:
        for pooling in Pooling:
            answer = await client.embeddings.create(model="smollm2", input=texts, extra_body={"pooling": pooling.value})
            same = await grpc.embed(texts, pooling=pooling)
            for text, ours, theirs in zip(texts, answer.data, same, strict=True):
                with torch.inference_mode():
                    states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
                expected = states.mean(0) if pooling is Pooling.MEAN else states[-1]
                found = torch.tensor(ours.embedding)
                assert found.norm() == pytest.approx(1.0, abs=1e-5) and theirs.num_tokens == len(states)
                torch.testing.assert_close(torch.tensor(theirs.values), found, atol=1e-5, rtol=1e-4)
                assert torch.cosine_similarity(found, expected, dim=0) > 0.99
    await assert_whole(mesh)
