"""Meshes that this benchmark compares: with fetched KV and tiers, and without either."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import MODEL, PLAIN_FLAGS, say
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from pdmesh.models.registry import ensure_model
from pdmesh.runtime.rpc.channel import connect
from pdmesh.v1 import worker_pb2, worker_pb2_grpc

WITH, WITHOUT = "with", "without"
DISK_GB = 8


@asynccontextmanager
async def running(
    *flags: str, has_tiers: bool, fetches: bool, prefill: int = 0, decode: int = 0, both: int = 0
) -> AsyncIterator[LocalMesh]:
    """A mesh of SmolLM2-135M; its tiers are one folder that all of its workers share."""
    model = ensure_model(MODEL, say)
    with TemporaryDirectory() as folder:
        tiers = ("--kv-disk", str(Path(folder) / "kv"), "--kv-disk-gb", str(DISK_GB)) if has_tiers else ()
        config = LocalMeshConfig(
            model=str(model),
            num_prefill=prefill,
            num_decode=decode,
            num_both=both,
            port=0,
            restart=False,
            worker_args=(*PLAIN_FLAGS, "--kv-pull", "auto" if fetches else "off", *tiers, *flags),
        )
        async with LocalMesh(config) as mesh:
            yield mesh


async def num_computed(mesh: LocalMesh) -> int:
    """Return the prompt tokens that the workers have computed since they started."""
    return sum(await asyncio.gather(*(_num_computed(address) for address in mesh.worker_addresses)))


async def _num_computed(address: str) -> int:
    channel = connect(address)
    try:
        async for report in worker_pb2_grpc.WorkerControlStub(channel).Watch(worker_pb2.WatchRequest()):
            return report.num_prefilled_tokens
        raise RuntimeError(f"worker {address} reports no load")
    finally:
        await channel.close()


def interleaved(number: int) -> Sequence[str]:
    """Return in which order the meshes take their turns in a round."""
    return (WITH, WITHOUT) if number % 2 else (WITHOUT, WITH)
