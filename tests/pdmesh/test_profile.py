"""`pdmesh profile` on a tiny model: every part is there, and they add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdmesh import cli
from pdmesh.doctor.step_profile import PYTHON, REST, SAMPLING, Case, StepProfiler
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.kernels.cpu.library import Profile
from tests.support.tiny_models import make_tiny_model

STAGES = [*(stage for stage in Profile().nanoseconds() if stage != "total"), REST, SAMPLING, PYTHON]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def test_every_part_of_every_case(tiny: Path) -> None:
    cases = (Case(1, 20), Case(3, 40), Case(0, 100))
    profiler = StepProfiler(EngineConfig(model=str(tiny), num_threads=1), cases, num_steps=8)
    assert profiler.numeric_mode.startswith("int8-")
    for case in cases:
        for _ in range(2):  # the engine is left as it was found
            profile = profiler.run(case)
            assert list(profile.parts) == STAGES
            assert all(value >= 0 for value in profile.parts.values())
            assert profile.parts["gate_up"] > 0 and profile.parts[PYTHON] > 0
            assert profile.wall_ns == sum(profile.parts.values())
    assert [case.name for case in cases] == ["decode, batch 1", "decode, batch 3", "prefill, 100 tokens"]


def test_the_command(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--batches", "2", "--prefill", "30", "--context", "5", "--steps", "4", "--threads", "1", "--dtype", "float32"]
    assert cli.run(["profile", str(tiny), *options]) == 0
    shown = capsys.readouterr().out
    assert "float32-native3-" in shown and "decode, batch 2: " in shown and "prefill, 30 tokens: " in shown
    assert cli.run(["profile", str(tiny), *options, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [list(step["parts_ns"]) for step in content["steps"]] == [STAGES, STAGES]


def test_what_cannot_be_profiled(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["profile", str(tiny), "--dtype", "float16"]) == 1
    assert "torch computes this model" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.run(["profile", str(tiny), "--batches", "0"])
    assert "--batches" in capsys.readouterr().err
