"""Every input that fuzzing kept is refused or read, as are the seeds; what once broke a reader is among them."""

import pytest

from tests.fuzzing import corpus
from tests.fuzzing.targets import TARGETS, run_one


@pytest.mark.parametrize("name", TARGETS)
def test_what_was_found_breaks_nothing(name: str) -> None:
    run, refusals = TARGETS[name].make()
    for data in (*TARGETS[name].seeds, *corpus.read(name)):
        run_one(run, refusals, data)


REFUSES_ALL = {"redis-sealed", "model-gguf"}
"""Their seeds cannot be right: nobody else can sign, and a model is large."""


@pytest.mark.parametrize("name", sorted(TARGETS.keys() - REFUSES_ALL))
def test_a_search_begins_with_what_is_read(name: str) -> None:
    run, refusals = TARGETS[name].make()

    def is_read(seed: bytes) -> bool:
        try:
            run(seed)
        except refusals:
            return False
        return True

    assert any(map(is_read, TARGETS[name].seeds))


def test_a_break_is_seen() -> None:
    def broken(data: bytes) -> None:
        raise KeyError(data)

    run_one(broken, (KeyError,), b"x")
    with pytest.raises(KeyError):
        run_one(broken, (ValueError,), b"x")
