"""One suite for every transport: `world` is parametrized over them and checks that nothing is left behind."""

from collections.abc import AsyncIterator

import pytest

from tests.kvtransfer.endpoints import World, nothing_left, running


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def world(transport: str) -> AsyncIterator[World]:
    with nothing_left():
        async with running(World(transport)) as both:
            yield both
