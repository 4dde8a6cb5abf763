"""Fixtures."""

from pathlib import Path

import pytest

from tests.router.mesh import write_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))
