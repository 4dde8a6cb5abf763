"""A real Redis for the tests of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from pdmesh.runtime.registry.redis_server import EmbeddedRedis


@pytest.fixture
async def redis_server() -> AsyncIterator[EmbeddedRedis]:
    async with EmbeddedRedis() as server:
        yield server
