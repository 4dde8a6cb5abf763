"""The engines of the contract's tests, each with a tiny model that is loaded once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.worker.engines import harness
from tests.worker.engines.engines import ENGINES, Kind


@pytest.fixture(scope="package", params=ENGINES)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kind]:
    """One kind of engine, with a tiny model. It is skipped by name where its packages are not installed."""
    made = ENGINES[request.param](tmp_path_factory.mktemp(request.param))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def root(request: pytest.FixtureRequest) -> None:
    """Give each test a prefix cache of its own, also where all have one engine."""
    harness.root = request.node.name.encode()
