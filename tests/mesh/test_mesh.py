"""The mesh gives what one engine gives, whatever is asked of it."""

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import pytest

from pdmesh.client.client import AsyncClient, Client, Completed, Delta, Started
from pdmesh.client.types import FinishReason
from pdmesh.errors import InvalidArgument
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.sampling_params import SamplingParams
from pdmesh.text.tokenizer import Tokenizer
from tests.examples.programs import example, output_of
from tests.mesh import oracle
from tests.mesh.checks import assert_whole

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("mode", ["remote", "local"])
async def test_choices_penalties_and_logprobs(mesh: LocalMesh, tiny: Path, mode: str) -> None:
    prompt = oracle.prompt_of(1, 45)
    params = SamplingParams(
        temperature=0.9, top_k=50, top_p=0.95, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1,
        seed=7, max_tokens=24, n=3, ignore_eos=True, logprobs=2,
    )  # fmt: skip
    async with AsyncClient(mesh.router_addresses) as client:
        result = await client.generate(
            prompt, temperature=0.9, top_k=50, top_p=0.95, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.2,
            frequency_penalty=0.1, seed=7, max_tokens=24, n=3, ignore_eos=True, logprobs=2, mode=mode, timeout=60,
        )  # fmt: skip
    assert [list(choice.token_ids) for choice in result.choices] == oracle.answer(tiny, prompt, params)
    for choice in result.choices:
        assert len(choice.logprobs) == len(choice.token_ids) == 24
        assert all(entry.chosen.token_id == token for entry, token in zip(choice.logprobs, choice.token_ids, strict=True))
        assert all(len(entry.top) == 2 and entry.top[0].logprob >= entry.top[1].logprob for entry in choice.logprobs)
        assert choice.finish_reason is FinishReason.LENGTH
    assert result.usage.prompt_tokens == 45
    assert result.usage.completion_tokens == 72
    await assert_whole(mesh)


async def test_logprobs_of_the_prompt_are_the_same_whoever_computes_it(mesh: LocalMesh) -> None:
    prompt = oracle.prompt_of(11, 90)
    async with AsyncClient(mesh.router_addresses) as client:
        remote, local, cached = [
            await client.generate(prompt, seed=3, max_tokens=4, n=2, prompt_logprobs=2, mode=mode, ignore_eos=True, timeout=60)
            for mode in ("remote", "local", "local")
        ]
        plain = await client.generate(prompt, seed=3, max_tokens=4, n=2, mode="local", ignore_eos=True, timeout=60)
        with pytest.raises(InvalidArgument) as refused:
            await client.generate(prompt, max_tokens=4, prompt_logprobs=21, timeout=60)
    assert refused.value.field == "sampling.prompt_logprobs"
    first, *others = remote.prompt_logprobs
    assert others == list(local.prompt_logprobs[1:]) == list(cached.prompt_logprobs[1:]) and not plain.prompt_logprobs
    assert [entry.chosen.token_id for entry in remote.prompt_logprobs] == prompt
    assert math.isnan(first.chosen.logprob) and not first.top
    assert all(len(entry.top) == 2 and entry.chosen.text for entry in others)
    assert len({tuple(choice.token_ids for choice in each.choices) for each in (remote, local, cached, plain)}) == 1
    await assert_whole(mesh)


@pytest.mark.parametrize("mode", ["remote", "local"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_biases(mesh: LocalMesh, tiny: Path, mode: str, temperature: float) -> None:
    prompt = oracle.prompt_of(11, 45)
    plain = SamplingParams(temperature=temperature, seed=7, max_tokens=12, n=2, ignore_eos=True)
    banned = {token for output in oracle.answer(tiny, prompt, plain) for token in output}
    biases = {**dict.fromkeys(banned, -100.0), 65: 1.5}
    params = replace(plain, logit_bias=tuple(biases.items()))
    async with AsyncClient(mesh.router_addresses) as client:
        result = await client.generate(
            prompt, temperature=temperature, seed=7, max_tokens=12, n=2, ignore_eos=True, logit_bias=biases, mode=mode, timeout=60
        )
        forced = await client.generate(prompt, max_tokens=5, seed=1, logit_bias={66: 100}, ignore_eos=True, mode=mode, timeout=60)
    outputs = [list(choice.token_ids) for choice in result.choices]
    assert outputs == oracle.answer(tiny, prompt, params)
    assert not banned.intersection(token for output in outputs for token in output)
    assert list(forced.token_ids) == [66] * 5
    await assert_whole(mesh)


async def test_separation_moves_only_what_decode_lacks(mesh: LocalMesh) -> None:
    prompt = oracle.prompt_of(2, 100)
    async with AsyncClient(mesh.router_addresses) as client:
        first = await client.generate(prompt, temperature=0, max_tokens=8, mode="remote", ignore_eos=True, timeout=60)
        assert first.timings.kv_bytes > 0
        assert first.timings.transport == "shm"
        seen, again = set[tuple[str, str]](), first
        while (pair := (again.timings.prefill_worker, again.timings.decode_worker)) not in seen:  # another may be as good
            seen.add(pair)
            longer = [*prompt, 5, 6, len(seen)]
            again = await client.generate(longer, temperature=0, max_tokens=8, mode="remote", ignore_eos=True, timeout=60)
    assert again.timings.decode_cached_tokens >= 96
    assert again.timings.prefill_cached_tokens >= 96
    assert 0 < again.timings.kv_bytes < first.timings.kv_bytes
    await assert_whole(mesh)


async def test_parts_of_ttft_add_up(mesh: LocalMesh) -> None:
    async with AsyncClient(mesh.router_addresses) as client:
        for number in range(8):
            prompt = oracle.prompt_of(100 + number, 200)
            timings = (
                await client.generate(prompt, temperature=0, max_tokens=4, ignore_eos=True, mode="remote", timeout=60)
            ).timings
            assert sum(timings.ttft_parts.values()) == pytest.approx(timings.ttft_ns, rel=0.05, abs=3_000_000)
            assert timings.prefill_compute_ns > 0
            assert timings.kv_exposed_ns > 0


async def test_first_token_can_end_it(mesh: LocalMesh, tiny: Path) -> None:
    prompt = oracle.prompt_of(3, 20)
    async with AsyncClient(mesh.router_addresses) as client:
        one = await client.generate(prompt, temperature=0, max_tokens=1, mode="remote", timeout=60)
        assert [list(one.token_ids)] == oracle.answer(tiny, prompt, SamplingParams(temperature=0, max_tokens=1))
        stop = await client.generate(
            prompt, temperature=0, max_tokens=9, stop_token_ids=[one.token_ids[0]], mode="remote", timeout=60
        )
    assert stop.token_ids == one.token_ids
    assert stop.choices[0].finish_reason is FinishReason.STOP
    await assert_whole(mesh)


async def test_stop_strings_over_token_borders(mesh: LocalMesh, tiny: Path) -> None:
    prompt = oracle.prompt_of(4, 33)
    tokenizer = Tokenizer.load(tiny)
    async with AsyncClient(mesh.router_addresses) as client:
        free = await client.generate(prompt, temperature=0.7, seed=3, max_tokens=60, ignore_eos=True, timeout=60)
        assert free.text == tokenizer.decode(list(free.token_ids))
        stop = free.text[len(free.text) // 2 :][:4]
        assert len(stop) == 4
        cut = await client.generate(prompt, temperature=0.7, seed=3, max_tokens=60, ignore_eos=True, stop=[stop], timeout=60)
    assert cut.text == free.text[: free.text.index(stop)]
    assert cut.choices[0].stop_reason == stop
    assert cut.choices[0].finish_reason is FinishReason.STOP
    assert cut.usage.completion_tokens < free.usage.completion_tokens
    await assert_whole(mesh)


async def test_stream_order_and_sync_client(mesh: LocalMesh) -> None:
    def blocking() -> list[object]:
        with (
            Client(mesh.router_addresses) as client,
            client.chat_stream([("user", "hello")], max_tokens=12, seed=1, timeout=60) as stream,
        ):
            return list(stream)

    events = await asyncio.to_thread(blocking)
    assert isinstance(events[0], Started)
    assert events[0].seed == 1
    assert isinstance(events[-1], Completed)
    position = 0
    for event in events[1:-1]:
        assert isinstance(event, Delta)
        assert not event.token_ids or event.first_index == position
        position += len(event.token_ids)


async def test_chat_renders_the_template(mesh: LocalMesh, tiny: Path) -> None:
    async with AsyncClient(mesh.router_addresses) as client:
        rendered = await client.tokenize([("system", "be brief"), ("user", "hi")])
        expected = Tokenizer.load(tiny).encode(
            "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        )
        assert list(rendered.token_ids) == expected
        chat = await client.chat([("system", "be brief"), ("user", "hi")], temperature=0, max_tokens=10, timeout=60)
        plain = await client.generate(list(rendered.token_ids), temperature=0, max_tokens=10, timeout=60)
        assert chat.token_ids == plain.token_ids


async def test_status_lists_every_worker(mesh: LocalMesh) -> None:
    async with AsyncClient(mesh.router_addresses) as client:
        status = await client.status()
        models = await client.list_models()
    assert {worker.info.worker_id for worker in status.workers} == {"prefill-0", "prefill-1", "decode-0", "decode-1"}
    assert all(worker.alive and worker.info.epoch for worker in status.workers)
    assert status.registry_connected
    assert [(model.name, model.num_prefill_workers, model.num_decode_workers) for model in models] == [("tiny", 2, 2)]


async def test_examples_run_against_a_real_mesh(mesh: LocalMesh) -> None:
    """Each of them, and its expected tokens, stands in tests/examples; here are two against real workers."""
    router = mesh.router_addresses[0]
    streamed, called = await asyncio.gather(
        output_of(*example("sync_stream"), router),
        output_of(*example("reflection"), router, "pdmesh.v1.Mesh/Generate", '{"text": "a", "sampling": {"max_tokens": 4}}'),
    )
    assert streamed.endswith(" again: the same\n")
    assert '"started"' in called.splitlines()[0] and '"completed"' in called.splitlines()[-1]
    await assert_whole(mesh)
