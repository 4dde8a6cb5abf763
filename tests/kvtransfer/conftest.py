"""One suite for every transport, tcp also in TLS: `world` is parametrized over them and checks that nothing is left behind."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import grpc.aio
import pytest

from kvtransfer.transports import common
from kvtransfer.transports.nixl.agent import is_installed
from kvtransfer.transports.nixl.reader import Reader
from tests.kvtransfer.endpoints import World, nothing_left, running
from tests.support.nixl import NIXL, NIXL_DEVICE, NIXL_TLS

CONVERTING = ["shm", "tcp", "tcp+tls", "tcp+secret", "grpc", "grpc+tls", "grpc+secret", NIXL, NIXL_TLS]  # between layouts


@pytest.fixture(scope="session", autouse=True)
def grpc_keeps_its_threads() -> Iterator[None]:
    """gRPC starts a thread with the first server and ends it with the last: for `nothing_left` it is simply there."""
    loop = asyncio.new_event_loop()  # it wants one, whatever ran before
    asyncio.set_event_loop(loop)
    grpc.aio.init_grpc_aio()
    yield
    loop.close()


@pytest.fixture(autouse=True)
def no_kept_mappings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left behind is to be seen at once."""
    monkeypatch.setattr(common, "KEEP_S", 0)


@pytest.fixture(scope="session", autouse=True)
def nixl_keeps_what_it_opens_once() -> None:
    """Not a matter of one agent either."""
    if is_installed():
        Reader().close()


@pytest.fixture(params=["cuda_ipc", NIXL_DEVICE, *CONVERTING])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def world(transport: str) -> AsyncIterator[World]:
    with nothing_left():
        async with running(World(transport)) as both:
            yield both
