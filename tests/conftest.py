"""For all tests."""

import os

import pytest
from hypothesis import settings

from tests import order, thorough

# The same examples in every run: who changes one thing is not to meet a failure of another by chance. `PDMESH_EXPLORE=1` looks
# for new ones.
settings.register_profile("same", derandomize=True)
if not os.environ.get("PDMESH_EXPLORE"):
    settings.load_profile("same")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before tests are chosen by their marks."""
    thorough.mark(items)
    if "PYTEST_XDIST_WORKER" in os.environ:
        order.sort(items)
