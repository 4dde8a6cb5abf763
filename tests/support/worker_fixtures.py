"""One tiny model for all tests; two workers and a router's side for each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from pdmesh.runtime import failpoints
from tests.support.mini_router import MiniRouter
from tests.support.tiny_models import make_tiny_model
from tests.support.worker_mesh import Model, Peer, load_tiny, running_worker


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_tiny(make_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
async def prefiller(model: Model) -> AsyncIterator[Peer]:
    async with running_worker(model, roles=("prefill",), worker_id="p") as peer:
        yield peer


@pytest.fixture
async def decoder(model: Model) -> AsyncIterator[Peer]:
    async with running_worker(model, roles=("decode",), worker_id="d", stream_timeout_s=0.5, grace_s=1.0) as peer:
        yield peer


@pytest.fixture
async def router(decoder: Peer) -> AsyncIterator[MiniRouter]:
    """Attached to `decoder`."""
    router = MiniRouter()
    await router.attach(decoder)
    yield router
    await router.detach()


@pytest.fixture(autouse=True)
def no_failpoints_left() -> Iterator[None]:
    yield
    failpoints.install("")
