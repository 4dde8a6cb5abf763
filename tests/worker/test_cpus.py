"""Cores of the engine's threads: what is refused, who is bound, and who is not."""

from __future__ import annotations

import os
import threading

import pytest

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.loader.loader import load_model
from pdmesh.platform import capabilities
from pdmesh.platform.capabilities import AFFINITY
from pdmesh.platform.fallbacks import usable_cores
from pdmesh.worker.config import WorkerConfig, bound, problem_with
from tests.support.worker_mesh import MODEL, Model, running_worker

needs_affinity = pytest.mark.skipif(not AFFINITY.is_there, reason="this system binds no threads to cores")
CORES = usable_cores()
ONE = (CORES[0],)


def test_a_system_that_binds_nothing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(capabilities.VARIABLE, "affinity")
    assert problem_with((), 7) is None
    assert problem_with(ONE, 1) == "this system binds no threads to cores (taken away by PDMESH_WITHOUT); leave it empty"
    assert usable_cores() == list(range(os.cpu_count() or 1))


@needs_affinity
@pytest.mark.parametrize(
    ("cpus", "num_threads", "problem"),
    [
        ((), 7, None),
        (ONE, 0, None),
        (ONE, 1, None),
        (ONE, 2, "fewer than num_threads 2"),
        (ONE * 2, 1, "twice"),
        ((100_000, CORES[0]), 1, "may not use 100000"),
        ((-1,), 1, "may not use -1"),
    ],
)
def test_what_is_refused(cpus: tuple[int, ...], num_threads: int, problem: str | None) -> None:
    found = problem_with(cpus, num_threads)
    assert found is None if problem is None else found is not None and problem in found


@needs_affinity
def test_settings_name_the_field(model: Model) -> None:
    with pytest.raises(ValueError, match=r"^cpus: "):
        WorkerConfig(engine=model.engine_config(), cpus=ONE * 2).validate()


def test_an_engine_bound_to_cores_has_a_thread_for_each(model: Model) -> None:
    assert WorkerConfig(engine=model.engine_config(), cpus=(4, 5, 6)).engine_config.num_threads == 3
    assert WorkerConfig(engine=model.engine_config(num_threads=2), cpus=(4, 5, 6)).engine_config.num_threads == 2
    assert WorkerConfig(engine=model.engine_config()).engine_config == model.engine_config()


@needs_affinity
def test_threads_that_begin_meanwhile_are_bound_and_stay_bound(model: Model) -> None:
    """The kernels' own threads among them."""
    before = set(os.listdir("/proc/self/task"))
    with bound(ONE):
        loaded = load_model(EngineConfig(model=str(model.folder), num_blocks=8, num_threads=3))
        assert os.sched_getaffinity(0) == set(ONE)
    assert os.sched_getaffinity(0) == set(CORES)
    new = {int(task) for task in set(os.listdir("/proc/self/task")) - before}
    assert len(new) >= 2 and all(os.sched_getaffinity(task) == set(ONE) for task in new)
    del loaded


@needs_affinity
async def test_only_the_engine_thread_of_a_worker_is_bound(model: Model) -> None:
    before = set(threading.enumerate())
    async with running_worker(model, cpus=ONE) as peer:
        assert peer.info.identity.model == MODEL
        [engine] = [thread for thread in set(threading.enumerate()) - before if thread.name == "engine"]
        assert engine.native_id is not None
        assert os.sched_getaffinity(engine.native_id) == set(ONE)
        assert os.sched_getaffinity(0) == set(CORES)
