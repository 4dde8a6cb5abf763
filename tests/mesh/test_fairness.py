"""A short prompt behind long ones: it shares their steps, on a prefill worker and, with LOCAL, on a decode worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import pytest
import pytest_asyncio

from pdmesh.client import AsyncClient, Started
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from tests.mesh import oracle
from tests.mesh.checks import assert_whole

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]
NUM_LONG = 6


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def mesh(tiny: Path) -> AsyncIterator[LocalMesh]:
    """One worker of each kind, with small steps: a long prompt takes hundreds of them."""
    flags = ("--max-num-batched-tokens", "4")
    async with LocalMesh(LocalMeshConfig(model=str(tiny), port=0, num_threads=1, worker_args=flags)) as mesh:
        yield mesh


@pytest.mark.parametrize("mode", ["remote", "local"])
async def test_a_short_prompt_does_not_wait_for_long_ones(mesh: LocalMesh, mode: Literal["remote", "local"]) -> None:
    ended: list[str] = []
    async with AsyncClient(mesh.router_addresses) as client:

        async def ask(name: str, prompt: list[int], started: asyncio.Event) -> None:
            async with client.generate_stream(
                prompt, temperature=0, max_tokens=1, ignore_eos=True, mode=mode, timeout=100
            ) as events:
                async for event in events:
                    if isinstance(event, Started):
                        started.set()
            ended.append(name)

        computing = asyncio.Event()
        seed = 100 * len(mode)  # nothing is cached of the other mode's prompts
        long = [oracle.prompt_of(seed + number, 1900) for number in range(NUM_LONG)]
        tasks = [asyncio.create_task(ask(f"long {number}", prompt, computing)) for number, prompt in enumerate(long)]
        await computing.wait()
        await ask("short", oracle.prompt_of(seed + 99, 4), asyncio.Event())
        await asyncio.gather(*tasks)
    assert ended.index("short") <= NUM_LONG // 2, "a long prompt takes hundreds of steps, the short one a few"
    await assert_whole(mesh)
