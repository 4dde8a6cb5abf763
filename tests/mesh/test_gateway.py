"""Workers' own HTTP, the endpoint picker and a real Envoy: the tokens of a mesh, a worker that ends, one that is killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from pdmesh.runtime.child import ManagedProcess, import_path, python_command
from tests.mesh.checks import is_running, shared_memory_names
from tests.support.envoy import find_envoy, running_envoy

ENVOY = find_envoy()
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(180),
    pytest.mark.skipif(ENVOY is None, reason="there is no envoy here (make setup fetches one on Linux, x86-64)"),
]
START_S = 60.0
ASKED = {"model": "tiny", "max_tokens": 24, "temperature": 0.8, "seed": 7}


@dataclass(frozen=True)
class Gateway:
    """Envoy at `url`, in front of `workers`."""

    url: str
    picker: ManagedProcess
    workers: dict[str, ManagedProcess]

    async def ask(self, client: httpx.AsyncClient, prompt: str, url: str = "") -> str:
        answer = await client.post(f"{url or self.url}/v1/completions", json={**ASKED, "prompt": prompt})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])


async def start(stack: AsyncExitStack, name: str, *arguments: str) -> ManagedProcess:
    process = ManagedProcess(name, python_command("-m", *arguments), env=import_path())
    await process.start(START_S)
    stack.push_async_callback(process.stop, 20.0)
    return process


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def gateway(tiny: Path) -> AsyncIterator[Gateway]:
    """Two workers with both roles, which answer HTTP themselves."""
    assert ENVOY is not None
    segments = shared_memory_names()
    async with AsyncExitStack() as stack:
        options = (
            "--model",
            str(tiny),
            "--model-name",
            "tiny",
            "--roles",
            "prefill,decode",
            "--num-threads",
            "1",
            "--http-port",
            "0",
        )
        started = [start(stack, f"worker-{number}", "decode_service", *options, "--kv-memory-mb", "64") for number in range(2)]
        workers = {str(each.ready_line["http_url"]).removeprefix("http://"): each for each in await asyncio.gather(*started)}
        picking = ("--port", "0", "--endpoints", ",".join(workers), "--metrics-period-s", "0.1", "--max-failures", "2")
        picker = await start(stack, "picker", "router.endpoint_picker", *picking)
        url = await stack.enter_async_context(running_envoy(ENVOY, picker.address, list(workers)))
        pids = [picker.pid, *(each.pid for each in workers.values())]
        yield Gateway(url, picker, workers)
    assert not [pid for pid in pids if pid is not None and is_running(pid)]
    assert shared_memory_names() <= segments


@pytest_asyncio.fixture(loop_scope="module")
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=60) as client:
        yield client


async def test_a_worker_says_of_itself_what_gateways_read(gateway: Gateway, client: httpx.AsyncClient) -> None:
    for address in gateway.workers:
        text = (await client.get(f"http://{address}/metrics")).text
        assert 'vllm:num_requests_running{model_name="tiny"} 0' in text
        assert 'vllm:kv_cache_usage_perc{model_name="tiny"} 0' in text
        assert 'vllm:cache_config_info{model_name="tiny",block_size="' in text
        assert (await client.get(f"http://{address}/health")).status_code == 200
        assert [each["id"] for each in (await client.get(f"http://{address}/v1/models")).json()["data"]] == ["tiny"]


async def test_the_same_tokens_from_each_worker_and_through_the_gateway(gateway: Gateway, client: httpx.AsyncClient) -> None:
    prompts = [f"{number}. Once upon a time there was a mesh" for number in range(6)]
    through = [await gateway.ask(client, prompt) for prompt in prompts]
    for address in gateway.workers:
        assert [await gateway.ask(client, prompt, f"http://{address}") for prompt in prompts] == through
    together = await asyncio.gather(*(gateway.ask(client, prompt) for prompt in prompts))
    assert list(together) == through


async def test_a_client_that_leaves_frees_its_worker(gateway: Gateway, client: httpx.AsyncClient) -> None:
    sent = {**ASKED, "prompt": "a long one", "max_tokens": 4000, "stream": True, "ignore_eos": True}
    async with client.stream("POST", f"{gateway.url}/v1/completions", json=sent) as answer:
        async for _ in answer.aiter_lines():
            break

    async with asyncio.timeout(20):
        while not await _are_idle(gateway, client):  # noqa: ASYNC110  that is in other processes
            await asyncio.sleep(0.1)


async def _are_idle(gateway: Gateway, client: httpx.AsyncClient) -> bool:
    texts = [(await client.get(f"http://{address}/metrics")).text for address in gateway.workers]
    return all('vllm:num_requests_running{model_name="tiny"} 0\n' in text for text in texts)


async def test_a_worker_that_stops_finishes_what_it_has_and_the_next_one_takes_over(
    gateway: Gateway, client: httpx.AsyncClient
) -> None:
    """Last: one worker is stopped, then the picker has one endpoint."""
    stopped, other = gateway.workers
    prompts = [f"{number}. The history of the city" for number in range(8)]
    expected = [await gateway.ask(client, prompt, f"http://{other}") for prompt in prompts]
    stopping: asyncio.Task[int | None] | None = None
    answers: list[str] = []
    while stopping is None or not stopping.done():
        answers += await asyncio.gather(*(gateway.ask(client, prompt) for prompt in prompts))
        stopping = stopping or asyncio.create_task(gateway.workers[stopped].stop(30.0))
    answers += await asyncio.gather(*(gateway.ask(client, prompt) for prompt in prompts))
    assert answers == expected * (len(answers) // len(prompts))
    assert await stopping == 0


async def test_a_worker_that_is_killed_costs_no_later_request(gateway: Gateway, client: httpx.AsyncClient) -> None:
    """Behind the one above: the other one ends, too, and the gateway says so."""
    _, other = gateway.workers
    gateway.workers[other].kill()
    await gateway.workers[other].wait()
    async with asyncio.timeout(20):
        while True:
            answer = await client.post(f"{gateway.url}/v1/completions", json={**ASKED, "prompt": "x"})
            assert answer.status_code == 503
            if answer.headers["content-type"] == "application/json":  # the picker's own, once it knows
                assert answer.json()["error"]["code"] == "no_endpoint"
                return
            await asyncio.sleep(0.1)
