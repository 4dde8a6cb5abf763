"""With each capability taken away the tests of the parts that use it pass: by the fallback, on this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from pdmesh.platform.capabilities import CAPABILITIES, VARIABLE
from tests.structure.measure import ROOT

HAND_OFF = ("tests/worker/test_handoff.py::test_tokens_equal_one_engine", "tests/kvtransfer/test_shm.py")
PROCESS = "tests/runtime/test_process.py::test_"
HTTP_LIFE = "tests/router/openai/test_life.py::test_"
PARTS = {
    "memfd": (
        *HAND_OFF,
        "tests/kvtransfer/test_transfer.py",
        "tests/engine/test_kv_cache.py",
        "tests/engine/parallel/test_copies.py",
        "tests/engine/parallel/test_parallel_engine.py::test_logits_are_those_of_one_rank",
        "tests/engine/parallel/test_parallel_engine.py::test_prefilled_by_one_degree_and_decoded_by_another",
    ),
    "abstract_sockets": ("tests/kvtransfer/test_shm.py",),
    "peer_credentials": HAND_OFF,
    "parent_death": (
        f"{PROCESS}children_die_with_a_parent_that_is_killed",
        f"{PROCESS}exit_with_parent_without_a_wrapper",
        f"{PROCESS}the_watcher_of_a_child_goes_with_it_and_holds_none_of_its_files",
        "tests/engine/parallel/test_faults.py::test_ranks_end_with_a_killed_engine",
    ),
    "huge_pages": ("tests/engine/test_kv_cache.py", "tests/engine/test_kv_pages.py", "tests/engine/test_weights_packed.py"),
    "touched_pages": ("tests/engine/test_kv_cache.py", "tests/engine/test_kv_pages.py"),
    "affinity": ("tests/worker/test_cpus.py", "tests/engine/kernels/cpu/test_threads.py"),
    "thread_priority": ("tests/kvtransfer/tiers/test_host.py",),
    "time_slices": ("tests/platform/test_time_slices.py", "tests/runtime/test_process.py"),
    "proc": ("tests/engine/test_memory.py", "tests/runtime/test_identity.py"),
    "cgroups": ("tests/engine/test_memory.py", "tests/engine/kernels/cpu/test_threads.py"),
    "shared_ports": ("tests/router/test_processes.py", "tests/runtime/test_ports.py"),
    "user_timeout": (f"{HTTP_LIFE}who_reads_nothing_is_cut_off", f"{HTTP_LIFE}a_whole_answer_that_nobody_takes_is_dropped"),
    "cpu_tiers": ("tests/engine/kernels/cpu/test_isa.py", "tests/engine/kernels/cpu/test_sampling.py"),
}
LIMIT_S = 280


def test_every_capability_is_here() -> None:
    assert list(PARTS) == [each.name for each in CAPABILITIES]


@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize("name", PARTS)
def test_its_parts_work_without_it(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-rs", "-p", "no:cacheprovider", "-p", "no:xdist", *PARTS[name]]
    environment = {each: value for each, value in os.environ.items() if not each.startswith("PYTEST_")}
    environment[VARIABLE] = name
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"^[.sx]*\.", done.stdout, re.MULTILINE), f"nothing was tested: {done.stdout[-2000:]}"
