"""A curve that was measured before: where it is kept, and when it is believed."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.loader.hash import cache_folder
from pdmesh.engine.loader.loader import load_model
from pdmesh.engine.speculation import calibration
from pdmesh.engine.speculation.calibration import (
    BUDGET_S,
    FIRST_ROWS,
    ROWS,
    Circumstances,
    confirmed,
    known_curve,
    measured,
    recall,
    remember,
)
from pdmesh.engine.speculation.cost_curve import CostCurve
from tests.engine.speculation.test_calibrate import Machine
from tests.support.mock_engine import open_engine
from tests.support.tiny_models import make_tiny_model

OF = Circumstances("hash", "int8", "processor", 2, "torch.int8", 16, 2048, 512)
CURVE = CostCurve((1, 2, 4, 8), (0.001, 0.001, 0.0012, 0.0015), 1e-7, 1e-8)


@pytest.fixture
def kernels() -> Path:
    """Compiled for this run: compiling them takes longer than all of these tests."""
    return cache_folder().absolute() / "kernels"


@pytest.fixture(autouse=True)
def cache(kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDMESH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_curve_is_remembered_for_its_circumstances_alone() -> None:
    assert recall(OF) is None
    remember(OF, CURVE)
    assert recall(OF) == CURVE
    changed = {"weights_hash": "other", "processor": "other", "num_threads": 1, "max_rows": 256, "kv_dtype": "torch.float32"}
    for name, value in changed.items():
        assert recall(replace(OF, **{name: value})) is None  # type: ignore[arg-type]
    remember(OF, replace(CURVE, context_s=2e-7))
    assert recall(OF) == replace(CURVE, context_s=2e-7)


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": [2, 4, 8, 16]},
        {"rows": [1, 4, 2, 8]},
        {"rows": [1, 2, 4]},
        {"rows": [], "seconds": []},
        {"rows": "1248"},
        {"seconds": [0.001, 0.001, 0.0012, 0.0011]},
        {"seconds": [0.0, 0.001, 0.0012, 0.0015]},
        {"seconds": [0.001, 0.001, 0.0012, float("inf")]},
        {"seconds": [0.001, 0.001, 0.0012, None]},
        {"context_s": float("nan")},
        {"row_context_s": None},
        {"of": {}},
    ],
)
def test_what_can_be_no_curve_is_none(cache: Path, changes: dict[str, object]) -> None:
    remember(OF, CURVE)
    [path] = (cache / "curves").iterdir()
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert recall(OF) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe"])
def test_nor_is_garbage(cache: Path, content: bytes) -> None:
    remember(OF, CURVE)
    [path] = (cache / "curves").iterdir()
    path.write_bytes(content)
    assert recall(OF) is None


def test_a_cache_that_cannot_be_written_is_none(cache: Path) -> None:
    cache.write_text("no folder")
    remember(OF, CURVE)
    assert recall(OF) is None


@pytest.mark.parametrize("slower", [0.5, 1.0, 3.0])
def test_on_a_slower_machine_it_is_higher(slower: float) -> None:
    curve = Machine(0.001, 1e-5, 1e-7).curve()
    machine = Machine(0.001 * slower, 1e-5 * slower, 1e-7 * slower)
    found = confirmed(curve, machine.meter())
    assert found is not None
    assert found.rows == ROWS
    assert found.seconds == pytest.approx([slower * seconds for seconds in curve.seconds])
    assert (found.context_s, found.row_context_s) == pytest.approx((slower * curve.context_s, slower * curve.row_context_s))


def test_where_rows_cost_more_than_they_did_it_is_not_true_any_more() -> None:
    machine = Machine(0.001, 2e-4)
    assert confirmed(Machine(0.001, 1e-5).curve(), machine.meter()) is None


@pytest.mark.parametrize("step_s", [0.003, 0.3, 2.0])
def test_what_spoke_against_it_is_not_measured_again(step_s: float) -> None:
    machine = Machine(step_s, step_s / 5)
    meter = machine.meter()
    assert confirmed(Machine(step_s, step_s / 100).curve(), meter) is None
    assert measured(meter, 2048, 512).step_s(8) == pytest.approx(step_s * (1 + 7 / 5))
    certain_s = step_s + sum(step_s * (1 + (rows - 1) / 5) for rows in FIRST_ROWS)
    assert machine.now_s <= max(2 * BUDGET_S, 1.001 * certain_s)


@pytest.mark.parametrize("step_s", [1e-4, 0.003, 0.05, 2.0])
def test_it_is_held_against_a_few_steps_only(step_s: float) -> None:
    curve = Machine(step_s, step_s / 20).curve()
    machine = Machine(step_s, step_s / 20)
    assert confirmed(curve, machine.meter()) is not None
    assert {shape.num_rows for shape in machine.ran} == set(FIRST_ROWS)
    assert machine.now_s <= max(BUDGET_S, step_s * (1 + sum(1 + (rows - 1) / 20 for rows in FIRST_ROWS)) * 1.001)
    assert len(machine.ran) < 50


def test_only_what_was_remembered_is_held_against_steps() -> None:
    machine = Machine(0.001, 1e-5)
    assert known_curve(OF, machine.meter()) is None
    assert not machine.ran
    remember(OF, Machine(0.001, 1e-5).curve())
    assert known_curve(OF, machine.meter()) is not None


def test_an_engine_measures_once(
    tmp_path: Path, kernels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With whatever a tiny model's steps take on a busy machine."""
    cache.mkdir()
    (cache / "kernels").symlink_to(kernels)
    monkeypatch.setattr(calibration, "KEPT_S", 0.0)
    monkeypatch.setattr(calibration, "ALIKE", 1e9)
    folder = make_tiny_model(tmp_path / "tiny")
    sizes = {"num_blocks": 64, "num_threads": 1, "max_num_batched_tokens": 32, "max_context": 256}
    config = EngineConfig(str(folder), speculation="prompt_lookup", **sizes)  # type: ignore[arg-type]
    loaded = load_model(config)
    with caplog.at_level(logging.INFO, logger="pdmesh.engine"):
        first, second = open_engine(config, loaded), open_engine(config, loaded)
        other = open_engine(replace(config, max_num_batched_tokens=16), loaded)
    said = [record.getMessage() for record in caplog.records if "ms of a step" in record.getMessage()]
    assert ["remembered" in text for text in said] == [False, True, False]
    assert first.speculator is not None and second.speculator is not None and other.speculator is not None
    assert first.speculator.curve.rows == second.speculator.curve.rows != other.speculator.curve.rows
    assert len(list((cache / "curves").iterdir())) == 2
