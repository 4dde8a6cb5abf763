"""A router whose workers are stock engines of vLLM's protocol: the routers of a real mesh, each a process that can be killed."""

import asyncio
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pdmesh.client.client import AsyncClient
from pdmesh.client.types import Completed, Delta, Timings
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from pdmesh.runtime.child import ManagedProcess, import_path, python_command
from pdmesh.sampling_params import SamplingParams
from tests.mesh import oracle
from tests.mesh.checks import Footprint, assert_whole

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]
LONG = 800


@dataclass
class Bridged:
    """Two engines, and the router in front of them."""

    engines: LocalMesh
    front: ManagedProcess


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def bridged(tiny: Path) -> AsyncIterator[Bridged]:
    config = LocalMeshConfig(model=str(tiny), num_routers=2, port=0, num_threads=1)
    async with LocalMesh(config) as mesh:
        footprint = Footprint.of(mesh)
        flags = ["--port=0", f"--models=tiny={tiny}", "--policy=round-robin", "--drain-grace-s=0.5", "--exit-with-parent"]
        flags += [f"--engine-address=grpc://{address}" for address in mesh.router_addresses]
        front = ManagedProcess("front", python_command("-m", "router", *flags), env=import_path())
        await front.start(60)
        try:
            await _both_are_used(front)
            yield Bridged(mesh, front)
        finally:
            await front.stop(10)
        footprint.grow(mesh)
    footprint.assert_gone()


async def _both_are_used(front: ManagedProcess) -> None:
    """Wait until the router in front gives requests to both engines."""
    async with AsyncClient(front.address) as client, asyncio.timeout(60):
        used: set[str] = set()
        while len(used) < 2:
            answers = [await client.generate([70, 71], max_tokens=1, timeout=30) for _ in range(2)]
            used = {answer.timings.decode_worker for answer in answers}


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0, "n": 2}, {"temperature": 0.8, "seed": 5, "n": 2, "logprobs": 3}], ids=["greedy", "seeded"]
)
async def test_the_answers_of_the_engine_itself(bridged: Bridged, sampling: dict[str, Any]) -> None:
    asked: dict[str, Any] = {**sampling, "max_tokens": 40, "timeout": 60}
    for number in range(2):  # one for each engine
        prompt = oracle.prompt_of(number, 60)
        async with AsyncClient(bridged.front.address) as client, AsyncClient(bridged.engines.router_addresses) as engine:
            ours, theirs = await client.generate(prompt, **asked), await engine.generate(prompt, **asked)
        assert [(choice.token_ids, choice.text, choice.finish_reason) for choice in ours.choices] == [
            (choice.token_ids, choice.text, choice.finish_reason) for choice in theirs.choices
        ]
        for our, their in zip(ours.choices, theirs.choices, strict=True):
            assert [entry.top[:1] for entry in our.logprobs] == [entry.top[:1] for entry in their.logprobs]
        assert sum(ours.timings.ttft_parts.values()) == pytest.approx(ours.timings.ttft_ns, rel=0.05, abs=1_000_000)
    await assert_whole(bridged.engines)


async def test_a_client_that_leaves_frees_the_engine(bridged: Bridged) -> None:
    async with AsyncClient(bridged.front.address) as client:
        call = client.generate_stream(oracle.prompt_of(3, 60), temperature=0.0, max_tokens=LONG, ignore_eos=True, timeout=60)
        async with call as stream:
            async for event in stream:
                if isinstance(event, Delta):
                    break
    await assert_whole(bridged.engines)


async def test_a_killed_engine_loses_nothing_and_is_used_again(bridged: Bridged, tiny: Path) -> None:
    """Each engine has one of two requests when the first engine is killed."""
    prompts = [oracle.prompt_of(number, 60) for number in (4, 5)]
    begun = asyncio.Semaphore(0)
    asked = [asyncio.create_task(_answer(bridged.front.address, prompt, begun)) for prompt in prompts]
    for _ in asked:
        await begun.acquire()
    bridged.engines.kill("router-0", signal.SIGKILL)
    answers = await asyncio.gather(*asked)
    params = SamplingParams(temperature=0.0, max_tokens=LONG, ignore_eos=True)
    assert [tokens for tokens, _ in answers] == [
        choices[0] for choices in oracle.answers(tiny, [(each, params) for each in prompts])
    ]
    assert sum(timings.num_resubmissions for _, timings in answers) >= 1
    await _both_are_used(bridged.front)
    await bridged.engines.wait_ready(60)
    await assert_whole(bridged.engines)


async def _answer(address: str, prompt: list[int], begun: asyncio.Semaphore) -> tuple[list[int], Timings]:
    """The tokens of a long greedy answer; `begun` is released with the first of them."""
    tokens: list[int] = []
    async with (
        AsyncClient(address) as client,
        client.generate_stream(prompt, temperature=0.0, max_tokens=LONG, ignore_eos=True, timeout=60) as stream,
    ):
        async for event in stream:
            if isinstance(event, Delta):
                begun.release()
                tokens.extend(event.token_ids)
            if isinstance(event, Completed):
                return tokens, event.timings
    raise AssertionError("the stream ended without its last event")
