"""Fixtures of the router's tests."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from router.api.http import server
from tests.router.answer_checks import RecordedAnswers, problems
from tests.router.mesh import write_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session", autouse=True)
def _answers_are_checked() -> Iterator[None]:
    """Every answer of every test here has the type that its endpoint declares."""
    build_app = server.build_app

    def checked_app(routes: Sequence[Route], cors_origins: Sequence[str] = ()) -> Starlette:
        app = build_app(routes, cors_origins)
        app.add_middleware(RecordedAnswers, routes=routes)
        return app

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "build_app", checked_app)
        yield


@pytest.fixture(autouse=True)
def _answers_have_their_types() -> Iterator[None]:
    RecordedAnswers.answers.clear()
    yield
    assert not [*problems(RecordedAnswers.answers)]
