"""Capacity against a mesh that is computed step by step, with prompts in chunks, batches that change, and promised paces."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.planning.capacity import DecodePool, Pool, PrefillPool, SharedPool, fewest
from pdmesh.planning.capacity_load import Goals, Lengths, Limits, Load, Worker
from pdmesh.planning.latency_model import LatencyModel
from tests.planning.stepped import Asked, run

WORKER = Worker(LatencyModel(8e-3, 6e-5, 2e-9, 2e-4, 3e-8), Limits(2048, 256, 400_000))
LENGTHS = Lengths(600, 7.2e5, 80)
GOALS = Goals(ttft_s=0.3, tpot_s=0.03, quantile=0.95)
NUM = 3000
MANY = 60
OFF = 0.03
"""Of the requests, by which the predicted share may be off."""


def kept(asked: list[Asked], ttft_s: float | None, tpot_s: float | None) -> float:
    good = [
        (ttft_s is None or one.first_s - one.arrived_s <= ttft_s) and (tpot_s is None or one.tpot_s <= tpot_s) for one in asked
    ]
    return sum(good) / len(good)


def check(pool: Pool, load: Load, stepped: dict[int, float]) -> None:
    """As many as are said to be the fewest keep about what is predicted; one less would not do."""
    number = max(stepped)
    predicted = pool.attainment(load, number)
    assert predicted is not None
    assert stepped[number] == pytest.approx(predicted, abs=OFF)
    assert stepped[number - 1] < pool.required


@pytest.mark.parametrize("rate", [20.0, 60.0])
def test_prefill_workers(rate: float) -> None:
    pool, load = PrefillPool(WORKER, GOALS), Load(rate, LENGTHS)
    number = fewest(pool, load, 99)
    assert number is not None and number > 1
    check(pool, load, {num: kept(run(WORKER, GOALS, load, num, MANY, NUM), GOALS.ttft_s, None) for num in (number - 1, number)})


@pytest.mark.parametrize("rate", [50.0, 150.0])
def test_decode_workers(rate: float) -> None:
    pool, load = DecodePool(WORKER, GOALS), Load(rate, LENGTHS)
    number = fewest(pool, load, 99)
    assert number is not None and number > 1
    check(pool, load, {num: kept(run(WORKER, GOALS, load, MANY, num, NUM), None, GOALS.tpot_s) for num in (number - 1, number)})


@pytest.mark.parametrize(("rate", "keeps_pace"), [(15.0, True), (50.0, True), (50.0, False)])
def test_workers_with_both_roles(rate: float, keeps_pace: bool) -> None:
    worker, load = replace(WORKER, keeps_pace=keeps_pace), Load(rate, LENGTHS)
    pool = SharedPool(worker, GOALS)
    number = fewest(pool, load, 99)
    assert number is not None and number > 1
    stepped = {num: kept(run(worker, GOALS, load, 0, num, NUM), GOALS.ttft_s, GOALS.tpot_s) for num in (number - 1, number)}
    check(pool, load, stepped)
