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


def test_a_search_in_a_simulated_mesh_begins_with_calls_that_are_served() -> None:
    done = subprocess.run([sys.executable, "-c", SERVED], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    served = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    for method in ("DecodeService/Submit", "PrefillService/Prefill", "TransferService/Push", "WorkerControl/SetRoles",
                   "Mesh/Generate", "Mesh/Chat", "GRPCInferenceService/ModelInfer", "VllmEngine/Generate"):  # fmt: skip
        assert any(path.endswith(method) for path in served), f"{method} is refused: {sorted(served)}"
    committed = int(served["committed"])
    assert committed >= 1, "the seed whose prefill worker hands over"


SERVED = """
from tests.fuzzing.targets import TARGETS
TARGETS["mesh-worker"].make()
from collections import Counter
from pdmesh.v1 import prefill_pb2
from tests.fuzzing import mesh_run
from tests.fuzzing.mesh_calls import ROUTER_METHODS, WORKER_METHODS, steps_of
served, outcomes = Counter(), []
heard = mesh_run.CallsRun._heard
def hears(self, step, response):
    if isinstance(response, prefill_pb2.PrefillEvent) and response.HasField("outcome"):
        outcomes.append(response.outcome.status)
    heard(self, step, response)
mesh_run.CallsRun._heard = hears
for name, methods in (("mesh-worker", WORKER_METHODS), ("mesh-router", ROUTER_METHODS)):
    for seed in TARGETS[name].seeds:
        run = mesh_run.CallsRun(list(steps_of(methods, seed)))
        run.run()
        assert not run.violations, run.violations
        served += run.answered
served["committed"] = outcomes.count(prefill_pb2.HANDOFF_STATUS_COMMITTED)
for path, number in served.items():
    print(path, number)
"""


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


def test_block_files_are_read_behind_a_header_whose_checksum_the_search_cannot_know() -> None:
    """Both forms, and what their decoder says of a number of three bytes."""
    run, refusals = TARGETS["kv-block-file"].make()
    plain, coded, *_ = TARGETS["kv-block-file"].seeds
    run(plain)
    run(coded)
    of_three = bytearray(coded)
    of_three[12] = 3
    with pytest.raises(refusals, match="64 bytes are no numbers of 3"):
        run(bytes(of_three))


def test_the_product_is_imported_where_a_search_sees_it() -> None:
    """What was imported before is not instrumented, and counts as no coverage."""
    code = "import sys, tests.fuzzing.targets; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not {"kvtransfer", "router", "decode_service", "prefill_service"} & set(done.stdout.split())


def test_a_break_is_seen() -> None:
    def broken(data: bytes) -> None:
        raise KeyError(data)

    run_one(broken, (KeyError,), b"x")
    with pytest.raises(KeyError):
        run_one(broken, (ValueError,), b"x")
