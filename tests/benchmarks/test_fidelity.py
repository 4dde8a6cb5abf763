"""The pure parts of the comparison of the simulator with a real mesh: slices, calibration, what is put side by side."""

from __future__ import annotations

import io
import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from benchmarks.autoscale.fidelity import QUANTITIES, SHAPES, apart, lines, settings, simulated, value
from benchmarks.autoscale.fidelity_runs import (
    INPUT_SCALE,
    OUTPUT_SCALE,
    TRACE,
    Calibration,
    Passage,
    Run,
    SeenWorker,
    arrivals_of,
    calibrated,
)
from benchmarks.autoscale.logged_worker import logged, read_steps
from pdmesh.engine.outputs import StepResult
from pdmesh.worker.load import StepWatch

SIZES = {
    "max_num_batched_tokens": 512,
    "max_num_seqs": 64,
    "num_blocks": 4000,
    "block_size": 16,
    "max_context": 8192,
    "kv_bytes_per_token": 23040,
}
PRICES = [6e-3, 2.5e-3, 1e-6, 2e-3, 1e-6, 0.1, 0.1, 900.0]
EXACT = Calibration(1e-3, 3e-4, 6e-3, 5e-3, 0.0, 0.0, 0.2)


def passage(*, is_local: bool = True, ttft_s: float = 0.2, **parts: float) -> Passage:
    names = ("outside", "route", "admission_queue", "reserve", "first_token_return", "kv_exposed", "decode_queue")
    return Passage(0.0, 60, 20, ttft_s, 0.01, is_local, {**dict.fromkeys(names, 0.0), **parts})


def steps(noise: float, *, pause_s: float, num: int = 3000) -> list[list[float]]:
    """Of one row that decodes; each differs from the next by chance alone."""
    rng, now, listed = random.Random(5), 0.0, []
    for number in range(num):
        lasts_s = (PRICES[0] + PRICES[3] + PRICES[4] * (50 + number)) * rng.lognormvariate(-noise * noise / 2, noise)
        listed.append([now, now + lasts_s, 0, 0, 1, 50 + number])
        now += lasts_s + pause_s
    return listed


def worker(name: str = "worker-0", noise: float = 0.2, pause_s: float = 1e-3) -> SeenWorker:
    return SeenWorker(name, True, True, SIZES, [PRICES, PRICES], steps(noise, pause_s=pause_s))


def test_a_slice_of_the_trace_is_scaled_and_starts_at_once(tmp_path: Path) -> None:
    rows = [f"2023-11-16 18:17:{second:02d}.0000000,{1000 + second},{100 + second}" for second in range(40)]
    (tmp_path / TRACE).write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    some = arrivals_of(tmp_path, 10, rate=2.0, seconds=5.0, seed=1)
    assert len(some) == 10
    assert [one.at_s for one in some] == pytest.approx([0.5 * number for number in range(10)])
    assert (some[0].num_input, some[0].num_output) == (round(1010 * INPUT_SCALE), round(110 * OUTPUT_SCALE))


def test_without_traces_lengths_are_drawn_and_stay_in_bounds() -> None:
    some = arrivals_of(None, 0, rate=3.0, seconds=100.0, seed=4)
    assert some == arrivals_of(None, 0, rate=3.0, seconds=100.0, seed=4)
    assert len(some) == 300
    assert all(1 <= one.num_input <= 4000 and 1 <= one.num_output <= 512 for one in some)


def test_a_machine_is_measured_by_requests_that_met_nobody_and_by_steps_under_load() -> None:
    alone = Run([], 0.0, [passage(outside=3e-3, route=4e-4, admission_queue=5e-4, reserve=6e-4, first_token_return=2e-3)], 0)
    handed = Run([], 0.0, [passage(is_local=False, kv_exposed=4e-3, decode_queue=1e-3)], 0)
    found = calibrated(alone, handed, Run([], 0.0, [], 0, [worker(noise=0.2, pause_s=1e-3)]))
    assert (found.router_s, found.call_s, found.token_s) == pytest.approx((9e-4, 3e-4, 5e-3))
    assert (found.handoff_s, found.handoff.fixed_s, found.between_s) == pytest.approx((5e-3, 5e-3, 1e-3))
    assert found.noise == pytest.approx(0.2, rel=0.05)
    assert found.noise_lasts_s < 0.02  # a step is as long


def test_too_little_is_no_calibration() -> None:
    here, there = Run([], 0.0, [passage()], 0), Run([], 0.0, [passage(is_local=False)], 0)
    with pytest.raises(ValueError, match="placed otherwise"):
        calibrated(here, here, here)
    with pytest.raises(ValueError, match="no worker has done 64 steps"):
        calibrated(here, there, Run([], 0.0, [], 0, [replace(worker(), steps=steps(0.2, pause_s=1e-3, num=60))]))


def test_runs_are_kept_as_they_were() -> None:
    run = Run([(0.5, 10, 4)], 0.0, [passage(route=1e-3)], 1, [worker(noise=0.1)])
    assert Run.of(json.loads(json.dumps(run.to_keep()))).passages == run.passages
    assert Run.of(json.loads(json.dumps(run.to_keep()))).workers[0].spec() == run.workers[0].spec()


def test_the_simulated_request_is_the_sum_of_its_parts() -> None:
    run = Run([(1.0, 100, 11), (8.0, 100, 11)], 4.0, [], 0, [worker()])
    (seen,) = simulated(run, settings(EXACT), EXACT, [0])
    (one,) = seen.passages  # the other one came before any counted
    speed = run.workers[0].spec().speed
    assert one.parts["prefill_compute"] == pytest.approx(speed.prefill_s(0, 100, chunk=512))
    assert one.ttft_s == pytest.approx(1e-3 + 3e-4 + speed.prefill_s(0, 100, chunk=512) + 6e-3)
    assert one.ttft_s == pytest.approx(sum(one.parts.values()))
    assert one.tpot_s == pytest.approx(sum(speed.decode_s(1, 101 + number) for number in range(10)) / 10)


def test_seeds_differ_where_steps_vary() -> None:
    run = Run([(0.0, 100, 40)], 0.0, [], 0, [worker()])
    noisy = replace(EXACT, noise=0.3)
    first, again, other = (simulated(run, settings(noisy), noisy, [seed])[0].passages[0] for seed in (1, 1, 2))
    assert first == again
    assert first.ttft_s != other.ttft_s


def test_quantities_are_of_all_runs_together() -> None:
    runs = [Run([], 0.0, [passage(ttft_s=0.1 * number) for number in range(1, 6)], 0) for _ in range(2)]
    assert value(runs, QUANTITIES[0]) == pytest.approx(0.3)
    assert apart(0.9, 1.0) == pytest.approx(apart(1.1, 1.0)) == pytest.approx(0.1)
    assert any(line.startswith("TTFT p99") and "+0.0%" in line for line in lines(runs, runs))
    with pytest.raises(ValueError, match="TTFT median: no request was answered"):
        value([Run([], 0.0, [], 3)], QUANTITIES[0])


def test_goals_are_those_that_were_asked_for() -> None:
    assert [(what.q, what.goal) for what in QUANTITIES] == [(0.5, 0.10), (0.5, 0.10), (0.99, 0.25), (0.99, 0.25)]
    assert len({shape.key for shape in SHAPES}) == 2


def test_steps_are_written_and_read(tmp_path: Path) -> None:
    told: list[object] = []
    into = io.StringIO()
    result = cast(StepResult, SimpleNamespace(started_ns=2_000_000_000, ended_ns=2_010_000_000, work=(5, 15, 1, 40)))
    logged(lambda watch, step: told.append(step), into)(cast(StepWatch, None), result)
    (tmp_path / "steps").write_text(into.getvalue() + "3.0 3.1 0")  # the last line is being written
    assert told == [result]
    assert read_steps(tmp_path / "steps", 1.0, 9.0) == [(2.0, 2.01, 5.0, 15.0, 1.0, 40.0)]
    assert read_steps(tmp_path / "steps", 2.5, 9.0) == []
