"""The first start on a machine: one worker compiles the CPU kernels, the others wait for it, and all say so."""

import asyncio
from pathlib import Path

import pytest

from pdmesh.client.client import AsyncClient
from pdmesh.engine.kernels.cpu import isa
from pdmesh.engine.kernels.cpu.build import build_ahead
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from pdmesh.sampling_params import SamplingParams
from tests.mesh import oracle

# What it links is the library that this machine has already; and it takes its time.
_COMPILER = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
case "$2" in
  *.so) for _ in $(seq 600); do [ -e {go} ] && break; sleep 0.1; done; cp {library} "$2" ;;
  *) : > "$2" ;;
esac
"""


@pytest.fixture
def slow_compiler(tmp_path: Path) -> Path:
    """Done when there is a file "go" beside it."""
    library = build_ahead(isa.detect(), None)
    path = tmp_path / "c++"
    path.write_text(_COMPILER.format(go=tmp_path / "go", library=library))
    path.chmod(0o755)
    return path


async def test_one_compiles_and_the_other_waits(tiny: Path, tmp_path: Path, slow_compiler: Path) -> None:
    heard: list[str] = []

    def hear(text: str) -> None:
        heard.append(text)
        if "waiting for another process" in text:
            (tmp_path / "go").touch()

    env = {"PDMESH_CACHE": str(tmp_path / "cache"), "CXX": str(slow_compiler), "PDMESH_KERNELS_DIR": ""}
    config = LocalMeshConfig(model=str(tiny), port=0, num_threads=1, env=env)
    async with LocalMesh(config, on_progress=hear) as mesh, AsyncClient(mesh.router_addresses) as client:
        answer = await client.generate(oracle.prompt_of(7, 40), temperature=0, max_tokens=8, mode="remote", timeout=60)
    told = {text.partition(": ")[0] for text in heard if "kernels" in text}
    assert told == {"prefill-0", "decode-0"}, heard
    assert sum(": compiling CPU kernels" in text for text in heard) == 1, heard
    assert sum(": compiled CPU kernels" in text for text in heard) == 1, heard
    params = SamplingParams(temperature=0, max_tokens=8)
    assert [list(answer.token_ids)] == await asyncio.to_thread(oracle.answer, tiny, oracle.prompt_of(7, 40), params)
