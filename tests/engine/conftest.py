"""For all of the engine's tests: one thread (several runs share a machine; a test of bits sets its own number), and a cache
folder of the run's own, in which only the compiled kernels are those of other runs: they are named by what they were compiled
from, and compiling them takes longer than many of the tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from pdmesh.engine.loader.hash import cache_folder


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder, kernels = tmp_path_factory.mktemp("cache"), cache_folder().absolute() / "kernels"
    with contextlib.suppress(OSError):  # a home that cannot be written: this run compiles for itself
        kernels.mkdir(parents=True, exist_ok=True)
        (folder / "kernels").symlink_to(kernels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDMESH_CACHE", str(folder))
        yield
