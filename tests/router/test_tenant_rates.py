"""A tenant's rate holds over two routers that share a Redis."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from pdmesh.runtime.registry.redis_server import EmbeddedRedis
from tests.router.mesh import request, running_mesh
from tests.support.waiting import eventually


async def _ask(stub: Any, tenant: str) -> str:
    """The status that a request of 60 tokens ends with."""
    wanted = request(range(64, 120), max_tokens=4)
    wanted.options.tenant = tenant
    try:
        return "OK" if [message async for message in stub.Generate(wanted, timeout=15)] else "nothing"
    except grpc.aio.AioRpcError as error:
        return error.code().name


async def test_a_burst_is_given_out_once(model_folder: Path, tmp_path: Path) -> None:
    """300 tokens may come at once and 3 each second: five requests of 60, wherever they go. Each router alone would take five."""
    limits = tmp_path / "tenants.toml"
    limits.write_text("[tenants.t]\ntokens_per_s = 3\nburst_tokens = 300")
    # Each has workers of its own: a stub's stream goes to one router.
    async with (
        EmbeddedRedis() as redis,
        running_mesh(model_folder, prefill=0, redis=redis.url, tenants=str(limits)) as one,
        running_mesh(model_folder, prefill=0, redis=redis.url, tenants=str(limits)) as two,
    ):
        sides: list[Any] = [mesh.router.shared for mesh in (one, two) if mesh.router.shared is not None]
        await eventually(lambda: [side.share("t") for side in sides] == pytest.approx([0.5, 0.5]))
        answers = await asyncio.gather(*(_ask(mesh.stub, "t") for mesh in (one, two) * 8))
        assert set(answers) == {"OK", "RESOURCE_EXHAUSTED"} and 2 <= answers.count("OK") <= 6, answers
        assert await _ask(one.stub, "other") == "OK"
