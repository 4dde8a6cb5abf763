"""Every input that fuzzing kept is refused or read, as are the seeds; what once broke a reader is among them."""

import subprocess
import sys

import pytest

from tests.fuzzing.__main__ import run_kept
from tests.fuzzing.targets import TARGETS, run_one

ALONE = {name for name, target in TARGETS.items() if target.is_alone}


@pytest.mark.parametrize("name", sorted(TARGETS.keys() - ALONE))
def test_what_was_found_breaks_nothing(name: str) -> None:
    run_kept(TARGETS[name])


@pytest.mark.parametrize("name", sorted(ALONE))
def test_what_was_found_breaks_nothing_in_a_simulated_mesh(name: str) -> None:
    command = [sys.executable, "-m", "tests.fuzzing", "--kept", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_a_bug_in_a_handler_is_seen_in_a_simulated_mesh() -> None:
    """The worker fails to say what it holds; the seed that asks for it is printed, and no other."""
    done = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "/pdmesh.v1.WorkerControl/ListBlocks" in done.stderr
    assert done.stderr.count("--replay mesh-worker:") == 1


BROKEN = """
from tests.fuzzing.__main__ import run_kept
from tests.fuzzing.targets import TARGETS
from tests.simulation.run import prepare
prepare()
from pdmesh.worker.control import ControlServicer
ControlServicer.ListBlocks = lambda self, request, context: 1 // 0
run_kept(TARGETS["mesh-worker"])
"""


REFUSES_ALL = {"redis-sealed", "model-gguf"}
"""Their seeds cannot be right: nobody else can sign, and a model is large."""


@pytest.mark.parametrize("name", sorted(TARGETS.keys() - REFUSES_ALL - ALONE))
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
