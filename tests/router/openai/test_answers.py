"""What the real `openai` client makes of our answers: text, chunks, choices, logprobs, usage, stop, seed."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest

from pdmesh.v1 import mesh_pb2
from tests.router import stub_model
from tests.router.mesh import PROMPT, Mesh, expected
from tests.router.openai.conftest import url

pytestmark = pytest.mark.asyncio(loop_scope="module")
# What the tests send and read is wider than the overloads of `create`: the client is Any to mypy.
HELLO: Any = [{"role": "user", "content": "hello"}]


def text(num_tokens: int, **which: object) -> str:
    return stub_model.text_of(expected(num_tokens, **which))  # type: ignore[arg-type]


def rendered(mesh: Mesh, messages: list[dict[str, str]] = HELLO) -> list[int]:
    model = mesh.router.core.models["tiny"]
    return model.tokenizer.encode(
        "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages) + "<|im_start|>assistant\n",
        add_special_tokens=False,
    )


async def test_chat(served: Mesh, client: Any) -> None:
    answer = await client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=8, seed=5)
    prompt = rendered(served)
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion" and answer.model == "tiny"
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
    assert choice.message.content == text(8, prompt=prompt)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 8)
    assert answer.usage.total_tokens == len(prompt) + 8
    assert answer.usage.prompt_tokens_details.cached_tokens == 16
    report = answer.model_extra["pdmesh"][0]
    assert report["seed"] == 5 and answer.id == f"chatcmpl-{report['request_id']}"
    assert report["timings"]["ttft_ns"] > 0 and report["timings"]["decode_worker"] == "d0"
    assert answer._request_id == report["request_id"]


async def test_chat_streams(served: Mesh, client: Any) -> None:
    stream = await client.chat.completions.create(
        model="tiny", messages=HELLO, max_completion_tokens=20, seed=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    pieces = [chunk.choices[0] for chunk in chunks[:-1]]
    assert pieces[0].delta.role == "assistant" and not any(piece.delta.role for piece in pieces[1:])
    assert "".join(piece.delta.content or "" for piece in pieces) == text(20, prompt=rendered(served))
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert {chunk.id for chunk in chunks} == {chunks[0].id} and {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 20
    assert chunks[-1].model_extra["pdmesh"][0]["timings"]["total_ns"] > 0


async def test_a_stream_without_usage_ends_with_its_last_choice(client: Any) -> None:
    stream = await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=5, seed=5, stream=True)
    chunks = [chunk async for chunk in stream]
    assert all(len(chunk.choices) == 1 for chunk in chunks)
    assert "".join(chunk.choices[0].text for chunk in chunks) == text(5)


async def test_usage_in_every_chunk(client: Any) -> None:
    stream = await client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=9, stream=True, stream_options={"include_usage": True},
        extra_body={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    )  # fmt: skip
    counts = [chunk.usage.completion_tokens async for chunk in stream if chunk.usage is not None]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == 9


async def test_the_synchronous_client(served: Mesh) -> None:
    def ask() -> tuple[str, str, list[str]]:
        with openai.OpenAI(base_url=url(served, "/v1"), api_key="none", max_retries=0) as client:
            state = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, seed=5).choices[0].text
            stream = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, seed=5, stream=True)
            streamed = "".join(chunk.choices[0].text for chunk in stream)
            return state, streamed, [model.id for model in client.models.list()]

    state, streamed, models = await asyncio.to_thread(ask)
    assert state == streamed == text(12)
    assert models == ["tiny"]


async def test_completions_have_openais_default_length(client: Any) -> None:
    answer = await client.completions.create(model="tiny", prompt=PROMPT, seed=5)
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion"
    assert answer.choices[0].text == text(16) and answer.choices[0].finish_reason == "length"


async def test_guesses_of_all_prompts_are_in_the_usage(served: Mesh, client: Any) -> None:
    quiet = await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=6)
    details = quiet.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)
    served["d0"].guesses = 3
    try:
        answer = await client.completions.create(model="tiny", prompt=[PROMPT, PROMPT[:20]], n=2, max_tokens=6)
    finally:
        served["d0"].guesses = 0
    details = answer.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (12, 60)


async def test_choices_and_prompts_are_numbered_as_openai_does(served: Mesh, client: Any) -> None:
    other = PROMPT[:20]
    answer = await client.completions.create(model="tiny", prompt=[PROMPT, other], n=2, max_tokens=6, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    wanted = [text(6, prompt=prompt, choice=choice) for prompt in (PROMPT, other) for choice in (0, 1)]
    assert [choice.text for choice in answer.choices] == wanted
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (70, 24)
    requests = [report["request_id"] for report in answer.model_extra["pdmesh"]]
    assert len(set(requests)) == 2 and all(name.startswith(answer.id.removeprefix("cmpl-")) for name in requests)


async def test_choices_and_prompts_stream_together(client: Any) -> None:
    prompts = ["abc", "defgh", "i"]
    stream = await client.completions.create(model="tiny", prompt=prompts, n=2, max_tokens=30, seed=7, stream=True)
    texts: dict[int, str] = {}
    async for chunk in stream:
        texts[chunk.choices[0].index] = texts.get(chunk.choices[0].index, "") + chunk.choices[0].text
    state = await client.completions.create(model="tiny", prompt=prompts, n=2, max_tokens=30, seed=7)
    assert texts == {choice.index: choice.text for choice in state.choices}


async def test_chat_choices(served: Mesh, client: Any) -> None:
    answer = await client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=6, seed=5, n=2)
    wanted = [text(6, prompt=rendered(served), choice=choice) for choice in (0, 1)]
    assert [choice.message.content for choice in answer.choices] == wanted


@pytest.mark.parametrize("stop", ["string", "list"])
async def test_stop_strings(client: Any, stop: str) -> None:
    state = text(40)
    end = state[10:13]
    answer = await client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=40, seed=5, stop=end if stop == "string" else ["§", end]
    )
    assert answer.choices[0].text == state[: state.index(end)] and answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_extra["stop_reason"] == end
    assert answer.usage.completion_tokens == state.index(end) + 3


async def test_a_seed_is_drawn_and_told(client: Any) -> None:
    first = await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12)
    seed = first.model_extra["pdmesh"][0]["seed"]
    assert 0 <= seed < 2**53
    again = await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, seed=seed)
    assert again.choices[0].text == first.choices[0].text
    assert (await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, seed=-1)).choices[0].text == text(
        12, seed=2**64 - 1
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_logprobs(served: Mesh, client: Any, stream: bool) -> None:
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 5, "seed": 5, "logprobs": True, "top_logprobs": 2}
    answer = await client.chat.completions.create(**asked, stream=stream)
    if stream:
        pieces = [chunk.choices[0].logprobs async for chunk in answer]
        entries = [entry for logprobs in pieces if logprobs is not None for entry in logprobs.content]
    else:
        entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == text(5, prompt=rendered(served))
    assert all(entry.logprob == -0.5 and entry.bytes == list(entry.token.encode()) for entry in entries)
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


async def test_completion_logprobs(client: Any) -> None:
    answer = await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=5, seed=5, logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and "".join(logprobs.tokens or []) == text(5)
    assert logprobs.token_logprobs == [-0.5] * 5 and logprobs.text_offset == [0, 1, 2, 3, 4]
    assert [dict(top) for top in logprobs.top_logprobs or []] == [{letter: -0.5} for letter in text(5)]


@pytest.mark.parametrize("prompt", ["abc", [65, 66, 67]])
async def test_echo(client: Any, served: Mesh, prompt: str | list[int]) -> None:
    plain = await client.completions.create(model="tiny", prompt=prompt, max_tokens=4, seed=5, n=2)
    echoed = await client.completions.create(model="tiny", prompt=prompt, max_tokens=4, seed=5, n=2, echo=True)
    before = prompt if isinstance(prompt, str) else served.router.core.models["tiny"].tokenizer.decode(prompt)
    assert [choice.text for choice in echoed.choices] == [before + choice.text for choice in plain.choices]


async def test_text_parts_and_developers(served: Mesh, client: Any) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "brief"}, {"role": "user", "content": parts}]
    answer = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=6, seed=5)
    prompt = rendered(served, [{"role": "system", "content": "brief"}, {"role": "user", "content": "one\ntwo"}])
    assert answer.choices[0].message.content == text(6, prompt=prompt)
    returned = [*messages, answer.choices[0].message.model_dump(), *HELLO]  # as programs continue a conversation
    assert (await client.chat.completions.create(model="tiny", messages=returned, max_tokens=1)).choices


async def test_headers_reach_the_workers(served: Mesh, client: Any) -> None:
    sent = {"X-Request-Id": "mine-7", "X-Tenant": "acme", "X-Priority": "batch", "X-Prefill-Mode": "local"}
    answer = await client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=2, extra_headers={**sent, "X-Request-Timeout-Ms": "9000"},
        extra_body={"cache_salt": "s", "top_k": -1, "min_p": 0.1, "ignore_eos": True, "repetition_penalty": 1.5},
    )  # fmt: skip
    assert answer.id == "cmpl-mine-7" and answer._request_id == "mine-7"
    submit = served["d0"].submits[-1]
    assert submit.mode == mesh_pb2.PREFILL_MODE_LOCAL and submit.request.tenant == "acme" and 0 < submit.time_left_ms <= 9100
    assert "acme" in submit.request.cache_salt and submit.request.cache_salt.endswith("s")
    sampling = submit.request.sampling
    assert (sampling.top_k, sampling.min_p, sampling.ignore_eos, sampling.repetition_penalty) == (0, 0.1, True, 1.5)
    assert not sampling.HasField("temperature")  # absent is 1, as with OpenAI


@pytest.mark.parametrize("chat", [False, True])
async def test_biases_reach_the_workers(served: Mesh, client: Any, chat: bool) -> None:
    asked: Any = {"model": "tiny", "max_tokens": 2, "logit_bias": {"70": -100, "71": 2.5}}
    if chat:
        await client.chat.completions.create(messages=HELLO, **asked)
    else:
        await client.completions.create(prompt=PROMPT, **asked)
    biases = [(each.token_id, each.bias) for each in served["d0"].submits[-1].request.sampling.logit_bias]
    assert biases == [(70, -100.0), (71, 2.5)]


async def test_a_schema_reaches_the_workers(served: Mesh, client: Any) -> None:
    schema = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}
    await client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2, response_format=wanted)
    constraint = served["d0"].submits[-1].request.sampling.constraint
    assert constraint.json_schema == '{"type":"object","properties":{"b":{"type":"integer"},"a":{"type":"string"}}}'


async def test_models(client: Any) -> None:
    (model,) = (await client.models.list()).data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "pdmesh") and model.created > 0
    assert (await client.models.retrieve("tiny")).model_extra == {"max_model_len": stub_model.MAX_CONTEXT}
    with pytest.raises(openai.NotFoundError) as missing:
        await client.models.retrieve("some/other")
    assert missing.value.code == "model_not_found" and missing.value.param == "model"


async def test_one_connection_serves_many_requests(served: Mesh) -> None:
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=1)) as http:
        ports = set()
        for stream in (False, True, False):
            body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3, "stream": stream}
            response = await http.post(url(served, "/v1/completions"), json=body)
            assert response.status_code == 200
            ports.add(response.extensions["network_stream"].get_extra_info("client_addr"))
        assert response.headers["content-type"] == "application/json" and len(ports) == 1


async def test_many_at_once(client: Any) -> None:
    async def one(seed: int) -> str:
        stream = await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=5 + seed, seed=seed, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    texts = await asyncio.gather(*(one(seed) for seed in range(40)))
    assert texts == [text(5 + seed, seed=seed) for seed in range(40)]
