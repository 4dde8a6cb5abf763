"""What `pdmesh up` says of the layout that was asked for."""

from __future__ import annotations

import pytest

from pdmesh.launcher.layout import expectation
from pdmesh.launcher.plan import LocalMeshConfig


def said(num_cores: int, **fields: object) -> str:
    return expectation(LocalMeshConfig(model="any", **fields), num_cores)  # type: ignore[arg-type]


BOTH: dict[str, object] = {"num_prefill": 0, "num_decode": 0, "num_both": 2}


@pytest.mark.parametrize("num_cores", [2, 3, 64])
def test_what_was_measured_in_mixes_is_expected_to_serve_best_where_each_worker_has_a_core(num_cores: int) -> None:
    assert said(num_cores, **BOTH).startswith("layout: expected to serve best, as in most mixes measured on two cores: ")


@pytest.mark.parametrize("num_cores", [2, 3, 64])
def test_of_the_default_is_said_what_was_measured(num_cores: int) -> None:
    line = said(num_cores)
    assert line.startswith("layout: expected to serve well: ")
    assert "on two cores --prefill 0 --decode 0 --both 2 was measured" in line


@pytest.mark.parametrize(
    ("num_cores", "fields", "better", "why"),
    [
        (1, {}, "--prefill 0 --decode 0 --both 1", "2 workers share one core"),
        (3, {"num_prefill": 2, "num_decode": 2}, "--prefill 0 --decode 0 --both 2", "4 workers share 3 cores"),
        (2, {"num_prefill": 1, "num_decode": 2}, "--prefill 0 --decode 0 --both 2", "3 workers share 2 cores"),
        (2, {"num_prefill": 0, "num_decode": 0, "num_both": 1}, "--prefill 0 --decode 0 --both 2", "answers wait"),
        (8, {"num_prefill": 0, "num_decode": 2}, "--prefill 0 --decode 0 --both 2", "no worker computes prompts for another"),
        (4, {"lend_cores": False}, "--lend-cores", "on 2 cores only"),
        (4, {**BOTH, "lend_cores": False}, "--lend-cores", "on 2 cores only"),
        (8, {"num_both": 1}, "--both 0", "answers of a worker with both roles wait"),
        (8, {"num_decode": 0, "num_both": 1}, "--prefill 0 --decode 0 --both 2", "answers of a worker with both roles wait"),
        (4, {"num_threads": 4}, "--threads 2", "2 workers of 4 threads on 4 cores"),
        (64, {"num_threads": 1}, "--threads 32", "2 workers of one thread leave 62 of 64 cores without work"),
        (64, {"num_threads": 1, "lend_cores": False}, "--threads 32", "leave 62 of 64 cores without work"),
        (9, {"num_threads": 2, "max_workers": 3}, "--threads 3", "2 workers of 2 threads leave 5 of 9 cores without work"),
        (1, {"num_prefill": 0, "num_threads": 4}, "--threads 1", "one worker of 4 threads on one core"),
    ],
)
def test_what_is_expected_to_serve_better_is_said_with_the_reason(
    num_cores: int, fields: dict[str, object], better: str, why: str
) -> None:
    line = said(num_cores, **fields)
    assert line.startswith(f"layout: {better} is expected to serve better: ")
    assert why in line


@pytest.mark.parametrize("fields", [{"num_decode": 0, "num_both": 1}, {"num_decode": 1}])
def test_one_core_has_one_layout(fields: dict[str, object]) -> None:
    expected = "layout: one worker for prompts and answers, which is expected to serve best on one core"
    assert said(1, num_prefill=0, **fields) == expected


@pytest.mark.parametrize("better", ["--prefill 0 --decode 0 --both 2", "--prefill 0 --decode 0 --both 1"])
def test_the_layout_that_is_named_has_no_better_one(better: str) -> None:
    num_cores, num_both = (2, 2) if better.endswith("2") else (1, 1)
    assert "is expected to serve better" not in said(num_cores, num_prefill=0, num_decode=0, num_both=num_both)


@pytest.mark.parametrize("given", [("--backend=torch",), ("--backend", "torch"), ("--tensor-parallel=2",)])
def test_nothing_is_said_to_be_lent_where_no_kernel_lends(given: tuple[str, ...]) -> None:
    line = said(4, worker_args=given)
    assert line.startswith("layout: no better one is known, but each worker computes on 2 cores only")
    assert not LocalMeshConfig(model="any", worker_args=given).has_lending


def test_threads_that_are_kept_for_later_workers_are_not_missing() -> None:
    assert said(9, max_workers=3).startswith("layout: expected to serve well")


@pytest.mark.parametrize("fields", [{"engine": "vllm"}, {"device": "cuda"}])
def test_nothing_is_said_where_nothing_is_known(fields: dict[str, object]) -> None:
    assert said(8, **fields) == ""
