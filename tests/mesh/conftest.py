"""Meshes of real processes. After each test every pool is whole; after each mesh nothing is left behind."""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from tests.mesh.checks import Footprint
from tests.support.forked_processes import ForkServers
from tests.support.tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model called "tiny"."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


EXECUTED = {"test_first_start", "test_mesh", "test_wheel", "test_without"}
"""Here processes are started as users start them: by their whole command, which imports everything for itself."""


@pytest.fixture(scope="session")
def fork_servers() -> Iterator[ForkServers]:
    """They import torch once for all processes."""
    with ForkServers() as servers:
        yield servers


@pytest.fixture(scope="module", autouse=True)
def processes_are_forked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Except in EXECUTED."""
    if request.path.stem in EXECUTED:
        yield
        return
    with request.getfixturevalue("fork_servers").used():
        yield


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def mesh(tiny: Path) -> AsyncIterator[LocalMesh]:
    """Two prefill workers, two decode workers, one router; dead processes are started again."""
    mesh = LocalMesh(LocalMeshConfig(model=str(tiny), num_prefill=2, num_decode=2, port=0, num_threads=1))
    async with mesh:
        footprint = Footprint.of(mesh)
        yield mesh
        footprint.grow(mesh)
    footprint.assert_gone()


ALONE = {"test_autoscale", "test_chaos", "test_cpus", "test_load", "test_speculation", "test_traces"}
"""Tests that compare durations, decide by measured ones, or fill the machine: another mesh beside them would be measured, too."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of them start processes."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("mesh")
            if item.path.stem in ALONE:
                item.add_marker("alone")
            if os.name != "posix":
                item.add_marker(pytest.mark.skip(reason="needs POSIX signals"))
