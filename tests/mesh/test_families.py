"""Families beyond Llama through real processes: the tokens of transformers, the KV that their parts say, prefixes found again,
hand-offs between workers of different block sizes. What every family has is shown by `make bench-models`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from pdmesh.client.client import AsyncClient, Generation
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig, ProcessPlan
from tests.engine.test_model_transformers import greedy, reference
from tests.mesh import oracle
from tests.mesh.checks import Footprint, assert_whole
from tests.support.tiny_families import make_tiny_family

pytest.importorskip("transformers")
NUM_TOKENS = 20
FLAGS = ("--backend", "torch", "--dtype", "float32", "--max-num-batched-tokens", "64")
BLOCK_SIZES = {"prefill-0": 16, "decode-0": 48}
KV_NUMBERS = {
    "gemma2": 2 * 2 * 16,  # keys and values of two heads of 16
    "mixtral": 2 * 2 * 16,
    "deepseek_v3": 32 + 16,  # a latent of 32 and a rotated key of 16, whatever the heads
}
"""Of a token and layer; each model has four layers, in float32."""


@dataclass(frozen=True)
class Served:
    """A mesh that serves one family, and its checkpoint."""

    mesh: LocalMesh
    folder: Path
    variant: str

    def kv_bytes(self, num_tokens: int) -> int:
        """Of the sender's whole blocks that these tokens take."""
        num_blocks = -(-num_tokens // BLOCK_SIZES["prefill-0"])
        return num_blocks * BLOCK_SIZES["prefill-0"] * 4 * 4 * KV_NUMBERS[self.variant]

    def expected(self, prompts: list[list[int]]) -> list[list[int]]:
        """What transformers answers."""
        model = reference(self.folder, dtype=torch.float32, attn_implementation="eager")
        return [greedy(model, prompt, NUM_TOKENS) for prompt in prompts]

    async def ask(self, *prompts: list[int]) -> list[Generation]:
        """One after the other, each prefilled by one worker and decoded by the other."""
        settings = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "mode": "remote", "timeout": 60}
        async with AsyncClient(self.mesh.router_addresses) as client:
            return [await client.generate(prompt, **settings) for prompt in prompts]  # type: ignore[arg-type]


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=sorted(KV_NUMBERS))
async def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """One worker of each kind, with blocks of different sizes."""

    def adjust(plan: ProcessPlan) -> ProcessPlan:
        own = ("--block-size", str(BLOCK_SIZES[plan.name])) if plan.is_worker else ()
        return replace(plan, argv=(*plan.argv, *own))

    folder = make_tiny_family(tmp_path_factory.mktemp("families") / "model", request.param)
    config = LocalMeshConfig(model=str(folder), port=0, num_threads=1, worker_args=FLAGS, adjust=adjust)
    async with LocalMesh(config) as mesh:
        footprint = Footprint.of(mesh)
        yield Served(mesh, folder, request.param)
        footprint.grow(mesh)
    footprint.assert_gone()


async def test_tokens_are_those_of_transformers(served: Served) -> None:
    """Prompts of one token, beside the borders of both block sizes, beyond the window of 24 and over several steps."""
    prompts = [oracle.prompt_of(300 + length, length) for length in (1, 16, 47, 150)]
    answers = await served.ask(*prompts)
    assert [list(answer.choices[0].token_ids) for answer in answers] == served.expected(prompts)
    assert all(answer.timings.kv_bytes and answer.timings.transport == "shm" for answer in answers)
    await assert_whole(served.mesh)


async def test_a_hand_off_is_as_large_as_the_parts_say(served: Served) -> None:
    [answer] = await served.ask(oracle.prompt_of(501, 130))
    assert answer.timings.kv_bytes == served.kv_bytes(130)
    await assert_whole(served.mesh)


async def test_a_prefix_is_found_again_on_both_ends(served: Served) -> None:
    """130 tokens are eight whole blocks of 16 for prefill, and two of 48 for decode: only the others are sent again."""
    prompt = oracle.prompt_of(502, 130)
    first, again = await served.ask(prompt, [*prompt, 5, 6, 7])
    assert again.timings.prefill_cached_tokens == 128
    assert again.timings.decode_cached_tokens >= 96
    assert again.timings.kv_bytes == served.kv_bytes(133 - again.timings.decode_cached_tokens) < first.timings.kv_bytes
    assert [list(again.choices[0].token_ids)] == served.expected([[*prompt, 5, 6, 7]])
    await assert_whole(served.mesh)
