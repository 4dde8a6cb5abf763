"""Which points of the curve are measured, in what time, and beside whom."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pdmesh.engine.runner.batch import StepBatch
from pdmesh.engine.sampling.sampler import Sampler
from pdmesh.engine.speculation.calibration import (
    BUDGET_S,
    FIRST_ROWS,
    ROWS,
    Meter,
    Shape,
    in_order,
    machine_to_itself,
    measured,
    run_step,
)
from pdmesh.engine.speculation.cost_curve import CostCurve


class Machine:
    """Steps take what `step_s` says: seconds of one row, and of each further one."""

    def __init__(self, step_s: float, row_s: float, context_s: float = 0.0) -> None:
        self.now_s = 0.0
        self._step_s, self._row_s, self._context_s = step_s, row_s, context_s
        self.ran: list[Shape] = []

    def run(self, shape: Shape) -> None:
        self.ran.append(shape)
        self.now_s += self._step_s + self._row_s * (shape.num_rows - 1) + self._context_s * (shape.context - shape.num_rows)

    def curve(self, *, max_context: int = 2048, max_rows: int = 2048) -> CostCurve:
        return measured(self.meter(), max_context, max_rows)

    def meter(self) -> Meter:
        return Meter(self.run, lambda: self.now_s)


def test_a_small_model_is_measured_everywhere() -> None:
    curve = Machine(0.001, 1e-5, 1e-7).curve()
    assert curve.rows == ROWS
    assert curve.seconds == pytest.approx([0.001 + 1e-5 * (rows - 1) for rows in ROWS])
    assert curve.context_s == pytest.approx(1e-7, rel=0.05)


@pytest.mark.parametrize("step_s", [0.01, 0.05, 0.3, 2.0, 20.0])
def test_a_large_one_where_it_matters_most_and_in_a_bounded_time(step_s: float) -> None:
    machine = Machine(step_s, step_s / 20, step_s / 1e6)
    curve = machine.curve()
    assert set(FIRST_ROWS) <= set(curve.rows)
    least_s = sum(step_s * (1 + (rows - 1) / 20) for rows in FIRST_ROWS)
    assert machine.now_s <= max(2 * BUDGET_S, least_s * 1.001)
    assert curve.context_s > 0 and curve.row_context_s > 0


def test_no_step_is_larger_than_the_engine_s() -> None:
    machine = Machine(0.001, 1e-5)
    assert machine.curve(max_context=40, max_rows=24).rows[-1] == 24
    assert max(shape.context for shape in machine.ran) <= 40
    assert Machine(0.001, 1e-5).curve(max_context=1, max_rows=1).rows == (1,)


@given(st.sets(st.sampled_from(ROWS)).map(lambda rows: rows | {1}))
def test_all_points_in_an_order_that_halves_the_gaps(rows: set[int]) -> None:
    ordered = in_order(rows)
    assert sorted(ordered) == sorted(rows)
    assert ordered[: len(rows & set(FIRST_ROWS))] == [r for r in FIRST_ROWS if r in rows]


def test_the_lock_is_held_while_measuring(tmp_path: Path) -> None:
    lock = tmp_path / "folder" / "lock"
    with machine_to_itself(lock), lock.open("w") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with lock.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_nobody_waits_for_ever(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with machine_to_itself(lock), machine_to_itself(lock, wait_s=0.0):
        pass


def test_without_a_folder_it_is_measured_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with machine_to_itself(tmp_path / "file" / "lock"):
        pass
    with pytest.raises(OSError, match="of the body"), machine_to_itself(tmp_path / "lock"):
        raise OSError("of the body")


def test_a_step_is_given_as_the_runner_gives_it() -> None:
    """Its numbers in host memory, wherever the pool lies: a model on a GPU packs them there, for one copy."""

    class Model:
        def forward(self, batch: StepBatch, kv: Tensor, signal: object = None, hidden: Tensor | None = None) -> Tensor:
            numbers = (batch.token_ids, batch.positions, batch.slot_mapping, batch.logits_rows)
            self.places = {tensor.device.type for tensor in numbers}
            return torch.zeros((len(batch.logits_rows), 8))

    model = Model()
    run_step(model, Sampler(), torch.empty((1, 2, 8, 4, 1, 16), device="meta"), num_rows=3, context=10)
    assert model.places == {"cpu"}
