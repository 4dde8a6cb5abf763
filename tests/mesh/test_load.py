"""64 streams of mixed lengths through one worker of each kind; the next one is refused at once."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from pdmesh.client.client import AsyncClient, Started
from pdmesh.errors import Overloaded
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from pdmesh.sampling_params import SamplingParams
from tests.mesh import oracle
from tests.mesh.checks import assert_whole

pytestmark = pytest.mark.asyncio(loop_scope="module")
BOUND = 64


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def bounded(tiny: Path) -> AsyncIterator[LocalMesh]:
    limits = ("--max-inflight", str(BOUND), "--max-queued", "0")
    async with LocalMesh(LocalMeshConfig(model=str(tiny), port=0, num_threads=1, router_args=limits)) as mesh:
        yield mesh


async def stream(client: AsyncClient, prompt: list[int], max_tokens: int, started: asyncio.Semaphore) -> list[int]:
    tokens: list[int] = []
    async with client.generate_stream(prompt, temperature=0, max_tokens=max_tokens, ignore_eos=True, timeout=200) as events:
        async for event in events:
            if isinstance(event, Started):
                started.release()
            tokens.extend(getattr(event, "token_ids", ()))
    return tokens


async def test_sixty_four_streams_of_mixed_lengths(bounded: LocalMesh, tiny: Path) -> None:
    rng = random.Random(4)
    jobs = [(oracle.prompt_of(500 + n, rng.choice([1, 7, 16, 40, 130, 300])), rng.choice([20, 50, 100])) for n in range(BOUND)]
    started = asyncio.Semaphore(0)
    async with AsyncClient(bounded.router_addresses) as client:
        answers = await asyncio.gather(*(stream(client, prompt, max_tokens, started) for prompt, max_tokens in jobs))
    expected = [(prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)) for prompt, max_tokens in jobs]
    assert [[tokens] for tokens in answers] == oracle.answers(tiny, expected)
    await assert_whole(bounded)


async def test_one_too_many_is_refused_at_once(bounded: LocalMesh) -> None:
    started = asyncio.Semaphore(0)
    async with AsyncClient(bounded.router_addresses) as client:
        # As long as the model allows: none of them ends before the last one has begun.
        streams = [asyncio.create_task(stream(client, oracle.prompt_of(600 + n, 7), 2000, started)) for n in range(BOUND)]
        for _ in streams:
            await started.acquire()
        with pytest.raises(Overloaded) as refused:
            await client.generate([1, 2, 3], max_tokens=2, timeout=20)
        assert refused.value.retry_delay_s is not None
        assert refused.value.retry_delay_s > 0
        for task in streams:
            task.cancel()
        await asyncio.wait(streams)
        await assert_whole(bounded)
        assert (await client.generate([1, 2, 3], max_tokens=2, timeout=20)).token_ids  # room again
    await assert_whole(bounded)
