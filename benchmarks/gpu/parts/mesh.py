"""The whole mesh on this one GPU: router, a worker that prefills and one that decodes, as they are anywhere.

Where the mesh does not start, this part says so in the worker's own words. Workers load folders: this part alone writes weights
to a disk, of a model of a few layers, and deletes them at the end.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.engine_runs import GREEDY
from benchmarks.gpu.context import Context
from benchmarks.harness import Figure
from pdmesh.client.client import AsyncClient
from pdmesh.errors import MeshError
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from pdmesh.runtime.child import StartFailed
from tests.equality.mesh_runs import Stream, tokens
from tests.equality.mesh_runs import run as run_streams

NAME = "mesh on one device"
NOT_THERE = "did not run"
SHAPE: dict[str, Any] = {
    "vocab_size": 32_768,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
}
TINY_SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""What Triton's interpreter bears."""
STREAMS, PROMPT, OUTPUT = 8, 256, 64
NUM_ALONE = 2


def run(context: Context) -> None:
    with tempfile.TemporaryDirectory(prefix="pdmesh-gpu-") as scratch:
        folder = _folder(context, Path(scratch) / "model")
        try:
            asyncio.run(_measure(context, _config(context, folder, Path(scratch) / "logs")))
        except (StartFailed, MeshError, TimeoutError, ExceptionGroup) as error:
            why = last_line(str(error) or repr(error))
            context.add(Figure(NAME, f"{NOT_THERE}: {why}", "", "higher"))


def last_line(text: str) -> str:
    """What a child said last says what was wrong with it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no reason was given"


def _folder(context: Context, folder: Path) -> Path:
    from tests.support.tiny_models import make_tiny_model  # it makes a model with transformers, in a second or so

    is_full = context.device == "cuda"
    return make_tiny_model(folder, "llama", dtype="bfloat16" if is_full else "float32", **(SHAPE if is_full else TINY_SHAPE))


def _config(context: Context, folder: Path, logs: Path) -> LocalMeshConfig:
    left_s = max(5.0, context.deadline.left_s - 10.0)
    flags = ("--kv-memory-mb", "2048" if context.device == "cuda" else "64", "--speculation", "none")
    return LocalMeshConfig(
        model=str(folder),
        device=context.device,
        port=0,
        restart=False,
        start_timeout_s=left_s,
        log_dir=str(logs),
        worker_args=flags,
    )


async def _measure(context: Context, config: LocalMeshConfig) -> None:
    """The same prompts twice: prefilled elsewhere, and where they are decoded. Of those that are alone in the mesh not one token
    may differ; beside others, products of a library have other bits in 16 bits, and a near tie may fall otherwise."""
    async with LocalMesh(config) as mesh:
        async with AsyncClient(mesh.router_addresses) as client:
            await Stream(_prompt(99)).run(client, GREEDY, 4, "remote")
        prompts = [_prompt(number) for number in range(STREAMS if context.device == "cuda" else 3)]
        seconds, found, alone = {}, {}, {}
        for mode in ("remote", "local"):
            began = time.monotonic()
            streams = await run_streams(mesh.router_addresses, prompts, GREEDY, OUTPUT, mode=mode, together=True)
            seconds[mode], found[mode] = time.monotonic() - began, tokens(streams)
            streams = await run_streams(mesh.router_addresses, prompts[:NUM_ALONE], GREEDY, OUTPUT, mode=mode, together=False)
            alone[mode] = tokens(streams)
    if alone["remote"] != alone["local"] or not all(alone["remote"]):
        context.fail(f"{NAME}: tokens of separated and unseparated requests differ")
    for mode, words in (("remote", "prefilled elsewhere"), ("local", "prefilled where decoded")):
        speed = sum(map(len, found[mode])) / seconds[mode]
        context.add(Figure(f"{NAME}: {len(prompts)} streams, {words}", speed, "tokens/s", "higher"))


def _prompt(number: int) -> list[int]:
    return [(number * 7919 + i * 31) % 250 for i in range(PROMPT)]
