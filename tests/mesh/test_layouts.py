"""Prefill and decode workers whose KV lies differently: what is converted on arrival gives the same tokens."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.engine_runs import SAMPLED
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig, ProcessPlan
from tests.equality import mesh_runs
from tests.mesh import oracle
from tests.mesh.checks import Footprint, assert_whole

NUM_TOKENS = 24
# Of one token, of whole blocks of either size, of several steps (the budget is 64 tokens).
PROMPTS = [oracle.prompt_of(900 + length, length) for length in (1, 15, 16, 48, 70, 333)]


def expected(folder: Path, kv_dtype: str = "auto") -> list[list[int]]:
    draw = SAMPLED.params(NUM_TOKENS)
    return [answer[0] for answer in oracle.answers(folder, [(prompt, draw) for prompt in PROMPTS], kv_dtype=kv_dtype)]


@pytest.mark.parametrize(("prefill", "decode"), [("16", "48"), ("48", "16")])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_other_block_sizes_give_the_same_tokens(tiny: Path, prefill: str, decode: str, transport: str) -> None:
    args = ("--transports", transport, "--max-num-batched-tokens", "64")
    flags = {"prefill-0": ("--block-size", prefill), "decode-0": ("--block-size", decode)}
    async with mesh_with(tiny, flags, args) as mesh:
        footprint = Footprint.of(mesh)
        for _ in range(2):  # the second time the beginnings are cached on both ends, in blocks of their own
            streams = await mesh_runs.run(mesh.router_addresses, PROMPTS, SAMPLED, NUM_TOKENS, mode="remote", together=True)
            assert mesh_runs.tokens(streams) == expected(tiny)
            assert {s.timings.transport for s in streams if s.timings} == {transport}
        await assert_whole(mesh)
        footprint.grow(mesh)
    footprint.assert_gone()


async def test_decode_may_keep_int8(tiny: Path) -> None:
    """The first token is that of bfloat16 KV; later ones see what int8 keeps of it."""
    flags = {"prefill-0": ("--kv-dtype", "bfloat16"), "decode-0": ("--kv-dtype", "int8", "--block-size", "32")}
    async with mesh_with(tiny, flags) as mesh:
        streams = await mesh_runs.run(mesh.router_addresses, PROMPTS, SAMPLED, NUM_TOKENS, mode="remote", together=True)
        assert [tokens[0] for tokens in mesh_runs.tokens(streams)] == [tokens[0] for tokens in expected(tiny, "bfloat16")]
        assert all(s.timings and s.timings.transport == "shm" for s in streams)
        await assert_whole(mesh)


def mesh_with(folder: Path, flags: Mapping[str, tuple[str, ...]], worker_args: tuple[str, ...] = ()) -> LocalMesh:
    """One worker of each kind, with flags of its own."""

    def adjust(plan: ProcessPlan) -> ProcessPlan:
        return replace(plan, argv=(*plan.argv, *flags.get(plan.name, ())))

    return LocalMesh(LocalMeshConfig(model=str(folder), port=0, num_threads=1, worker_args=worker_args, adjust=adjust))
