"""`pdmesh profile` on a tiny model: every part is there, and they add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdmesh import cli
from pdmesh.doctor.step_limits import Machine, Work, limits_of
from pdmesh.doctor.step_profile import PYTHON, REST, SAMPLING, Case, StepProfiler
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.kernels.cpu.library import Profile
from pdmesh.engine.kernels.cpu.model import PackedExperts
from tests.support.tiny_families import make_tiny_family
from tests.support.tiny_models import make_tiny_model

STAGES = [*(stage for stage in Profile().nanoseconds() if stage != "total"), REST, SAMPLING, *PYTHON]


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
            assert profile.parts["gate_up"] > 0 and 0 < profile.python_share < 1
            assert profile.wall_ns == sum(profile.parts.values())
            assert profile.plain_ns > 0 and profile.accounted_share > 0
            assert set(profile.limits) == {"embed", "qkv", "output", "gate_up", "down", "attention", "head", "sampling"}
            assert all(limit > 0 for limit in profile.limits.values())
    assert [case.name for case in cases] == ["decode, batch 1", "decode, batch 3", "prefill, 100 tokens"]


def test_the_command(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--batches", "2", "--prefill", "30", "--context", "5", "--steps", "4", "--threads", "1", "--dtype", "float32"]
    assert cli.run(["profile", str(tiny), *options]) == 0
    shown = capsys.readouterr().out
    assert "float32-native4-" in shown and "decode, batch 2: " in shown and "prefill, 30 tokens: " in shown
    assert cli.run(["profile", str(tiny), *options, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [list(step["parts_ns"]) for step in content["steps"]] == [STAGES, STAGES]


def test_what_cannot_be_profiled(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["profile", str(tiny), "--dtype", "float16"]) == 1
    assert "torch computes this model" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.run(["profile", str(tiny), "--batches", "0"])
    assert "--batches" in capsys.readouterr().err


def test_a_limit_is_the_longer_of_bytes_and_operations() -> None:
    machine = Machine(bytes_per_s=2e9, operations_per_s=1e9, attention_operations_per_s=1e9)
    assert (machine.nanoseconds(200, 50), machine.nanoseconds(200, 300)) == (100, 300)
    assert Work.prefill(4) == Work(num_tokens=4, num_rows=1, num_pairs=10, num_read=4)
    assert Work.decode(3, 5) == Work(num_tokens=3, num_rows=3, num_pairs=15, num_read=15)


def test_of_experts_those_count_that_a_step_reads(tmp_path: Path) -> None:
    """The products of rows with experts are bounded by what all rows together take, which the kernels count."""
    model = make_tiny_family(tmp_path, "qwen3_moe")
    profiler = StepProfiler(EngineConfig(model=str(model), num_threads=1), cases := (Case(1, 20), Case(4, 20)), num_steps=8)
    profiler._machine = Machine(bytes_per_s=1e9, operations_per_s=1e30, attention_operations_per_s=1e30)  # a ns for a byte
    mlps = [layer.mlp for layer in profiler._model.weights.layers]
    layers = [mlp for mlp in mlps if isinstance(mlp, PackedExperts)]
    dense = sum(mlp.down.num_bytes for mlp in mlps if not isinstance(mlp, PackedExperts))
    num_experts, top_k, num_bytes = layers[0].config.num_experts, layers[0].config.top_k, layers[0].experts[0].down.num_bytes
    read = [(profiler.run(case).limits["down"] - dense) / num_bytes / len(layers) for case in cases]
    assert read[0] == pytest.approx(top_k)
    assert top_k < read[1] <= min(num_experts, 4 * top_k)
    kv = profiler._engine.kv.shape
    with pytest.raises(ValueError, match=f"experts_read: 0 numbers for {len(layers)} layers"):
        limits_of(profiler._model, kv, Work.decode(1, 20), profiler._machine)
