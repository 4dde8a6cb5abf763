"""64 streams of mixed lengths through one worker of each kind; the next one is refused at once."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from engine.sampling_params import SamplingParams
from pdmesh.client import AsyncClient, Started
from pdmesh.errors import Overloaded
from pdmesh.launcher import LocalMesh
from pdmesh.launcher_plan import LocalMeshConfig
from tests.mesh import oracle
from tests.mesh.checks import assert_whole

pytestmark = pytest.mark.asyncio(loop_scope="module")
BOUND = 64


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def bounded(tiny: Path) -> AsyncIterator[LocalMesh]:
    limits = ("--max-inflight", str(BOUND), "--max-queued", "0")
    async with LocalMesh(LocalMeshConfig(model=str(tiny), port=0, num_threads=1, router_args=limits)) as mesh:
        yield mesh


async def test_sixty_four_streams_and_one_too_many(bounded: LocalMesh, tiny: Path) -> None:
    rng = random.Random(4)
    jobs = [(oracle.prompt_of(500 + n, rng.choice([1, 7, 16, 40, 130, 300])), rng.choice([150, 200, 250])) for n in range(BOUND)]
    started = asyncio.Semaphore(0)
    async with AsyncClient(bounded.router_addresses) as client:

        async def stream(prompt: list[int], max_tokens: int) -> list[int]:
            tokens: list[int] = []
            async with client.generate_stream(
                prompt, temperature=0, max_tokens=max_tokens, ignore_eos=True, timeout=200
            ) as events:
                async for event in events:
                    if isinstance(event, Started):
                        started.release()
                    tokens.extend(getattr(event, "token_ids", ()))
            return tokens

        tasks = [asyncio.create_task(stream(prompt, max_tokens)) for prompt, max_tokens in jobs]
        for _ in tasks:
            await started.acquire()
        with pytest.raises(Overloaded) as refused:
            await client.generate([1, 2, 3], max_tokens=2, timeout=20)
        assert refused.value.retry_delay_s is not None
        assert refused.value.retry_delay_s > 0
        answers = await asyncio.gather(*tasks)
        assert (await client.generate([1, 2, 3], max_tokens=2, timeout=20)).token_ids  # room again
    expected = [(prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)) for prompt, max_tokens in jobs]
    assert [[tokens] for tokens in answers] == oracle.answers(tiny, expected)
    await assert_whole(bounded)
