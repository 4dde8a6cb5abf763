"""In whatever numbers the workers compute: what a mesh answers over each hand-off is what one engine answers."""

from pathlib import Path

import pytest

from benchmarks.engine_runs import SAMPLED, Settings, run_alone
from tests.equality import mesh_runs
from tests.equality.ways import Task
from tests.mesh import oracle
from tests.mesh.checks import assert_whole

NUM_TOKENS = 24
PROMPTS = [oracle.prompt_of(700 + length, length) for length in (1, 15, 16, 70, 200)]


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float32"},
        {"quantization": "none", "dtype": "bfloat16"},
        {"quantization": "int4", "kv_dtype": "float32"},
        {"kv_dtype": "int8"},
        {"backend": "torch", "dtype": "float32"},
    ],
    ids=str,
)
@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
async def test_a_mesh_answers_as_one_engine(tiny: Path, settings: Settings, transport: str) -> None:
    task = Task(tiny, PROMPTS, SAMPLED, NUM_TOKENS, {"kv_memory_mb": 64, **settings})
    expected = run_alone(task.engine(), PROMPTS, SAMPLED.params(NUM_TOKENS))
    async with task.mesh("--num-threads", "1", "--transports", transport) as mesh:
        for mode in ("remote", "local"):
            streams = await mesh_runs.run(mesh.router_addresses, PROMPTS, SAMPLED, NUM_TOKENS, mode=mode, together=True)
            assert mesh_runs.tokens(streams) == expected, mode
            assert {s.timings.transport for s in streams if s.timings} == ({transport} if mode == "remote" else {""})
        await assert_whole(mesh)
