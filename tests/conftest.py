"""For all tests."""

import os

import pytest
from hypothesis import settings

from pdmesh.platform.capabilities import ABSTRACT_SOCKETS, MEMFD, PEER_CREDENTIALS
from tests import order, thorough

# The same examples in every run: who changes one thing is not to meet a failure of another by chance. `PDMESH_EXPLORE=1` looks
# for new ones.
settings.register_profile("same", derandomize=True, deadline=None)
if not os.environ.get("PDMESH_EXPLORE"):
    settings.load_profile("same")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the variant of a test over a transport that needs what this system lacks (or what PDMESH_WITHOUT takes away)."""
    callspec = getattr(item, "callspec", None)
    transport = "" if callspec is None else callspec.params.get("transport")
    lacking = [each.name for each in (MEMFD, ABSTRACT_SOCKETS, PEER_CREDENTIALS) if not each.is_there]
    if transport in ("shm", "cuda_ipc") and lacking:
        pytest.skip(f"{transport} needs {', '.join(lacking)}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before tests are chosen by their marks."""
    thorough.mark(items)
    if "PYTEST_XDIST_WORKER" in os.environ:
        order.sort(items)
