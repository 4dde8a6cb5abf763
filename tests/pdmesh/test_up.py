"""What `pdmesh up` says once the mesh is ready."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdmesh import cli
from pdmesh.commands.up import Options, _mesh_config, _summary, adapter_flags, check_adapters
from pdmesh.commands.up_autoscale import DECISIONS_FILE, AutoscaleOptions
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig, router_plans, worker_plans
from pdmesh.runtime.config import ConfigError, load, parse
from pdmesh.worker.config import WorkerConfig
from tests.support.terminal import plain

OPTIONS = AutoscaleOptions(autoscale=True, max_workers=5, min_workers=2, ttft_ms=700, tpot_ms=40, quantile=0.95)
MODEL = LocalMeshConfig(model="smollm2")


def _lines(options: AutoscaleOptions, base: LocalMeshConfig, folder: Path) -> list[str]:
    config = replace(options.prepared(base) if options.autoscale else base, log_dir=str(folder))
    return plain(*_summary(LocalMesh(config), options))


def test_it_says_what_autoscaling_may_do_for_which_objectives_and_where_it_writes(tmp_path: Path) -> None:
    lines = _lines(OPTIONS, MODEL, tmp_path)
    assert "autoscaling is on: 2–3 prefill and 2–3 decode workers, at most 5 in all" in lines
    assert "objectives: TTFT 700 ms, TPOT 40 ms for 95 % of requests" in lines
    assert f"decisions: {tmp_path / DECISIONS_FILE}" in lines


def test_workers_with_both_roles_are_one_kind(tmp_path: Path) -> None:
    both = replace(MODEL, num_prefill=0, num_decode=0, num_both=1)
    assert "autoscaling is on: 2–5 workers" in _lines(OPTIONS, both, tmp_path)


def test_a_mesh_that_may_go_to_zero_says_so_and_its_routers_wait_for_a_start(tmp_path: Path) -> None:
    options = replace(OPTIONS, zero_after_s=300.0)
    lines = _lines(options, MODEL, tmp_path)
    assert "autoscaling is on: 2–3 prefill and 2–3 decode workers, at most 5 in all; none after 300 s without a request" in lines
    config = options.prepared(replace(MODEL, router_args=("--max-queued=16",)))
    assert config.router_args == ("--wake-timeout-s", f"{2 * MODEL.start_timeout_s:g}", "--max-queued=16")
    settings = options.scaling(config, 2.0)
    assert settings.decode.allow_zero and settings.prefill.allow_zero and settings.zero_after_s == 300.0
    usual = OPTIONS.scaling(OPTIONS.prepared(MODEL), 2.0)
    assert not usual.decode.allow_zero and not OPTIONS.prepared(MODEL).router_args


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"autoscale": False, "zero_after_s": 60.0}, "zero_after_s: 60 is given without --autoscale"),
        ({"zero_after_s": 5.0}, "zero_after_s: 5 is less than cool_down_s, 20"),
        ({"zero_after_s": -1.0}, "zero_after_s: -1 is less than 0"),
    ],
)
def test_a_time_to_zero_that_cannot_be_is_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        replace(OPTIONS, **given).validate()


def test_objectives_of_a_file_are_said_and_one_that_lacks_the_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "promised.toml"
    path.write_text("[smollm2]\nttft_ms = 300\ntpot_ms = 25\n")
    lines = _lines(replace(OPTIONS, objectives=str(path)), MODEL, tmp_path)
    assert "objectives: TTFT 300 ms, TPOT 25 ms for 99 % of requests" in lines
    path.write_text("[other]\nttft_ms = 300\ntpot_ms = 25\n")
    with pytest.raises(ConfigError, match="says nothing of 'smollm2'"):
        _lines(replace(OPTIONS, objectives=str(path)), MODEL, tmp_path)


def test_every_worker_is_told_who_guesses(tmp_path: Path) -> None:
    asked = replace(Options(), speculation="prompt_lookup", worker_args=("--max-num-seqs=8",))
    for plan in worker_plans(_mesh_config(asked, tmp_path), "redis://", [0]):
        config = load(WorkerConfig, plan.argv[4:], {}, prog="worker")
        assert (config.engine.speculation, config.engine.max_num_seqs) == ("prompt_lookup", 8)
    usual = worker_plans(_mesh_config(Options(), tmp_path), "redis://", [0])
    assert not any("--speculation" in plan.argv for plan in usual)


def test_who_cannot_guess_is_said_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.run(["up", "--speculation", "prompt_lookup,oracle"])
    assert ended.value.code == cli.EXIT_USAGE
    assert "--speculation: 'oracle' is not known; give auto or none alone" in capsys.readouterr().err


def test_priorities_are_promised_more_than_the_model(tmp_path: Path) -> None:
    path = tmp_path / "promised.toml"
    path.write_text("[smollm2]\nttft_ms = 5000\ntpot_ms = 200\n[smollm2.interactive]\nttft_ms = 150\n")
    assert "objectives: TTFT 150 ms, TPOT 200 ms for 99 % of requests" in _lines(
        replace(OPTIONS, objectives=str(path)), MODEL, tmp_path
    )


@pytest.mark.parametrize(
    ("flags", "text", "told"),
    [
        ((), None, "--objectives: .* No such file"),
        ((), "[smollm2]\nttft_ms = 0\ntpot_ms = 1\n", r"--objectives: .*smollm2\.ttft_ms"),
        (("--autoscale",), None, "--objectives: .* No such file"),
        (("--autoscale",), "[other]\nttft_ms = 9\ntpot_ms = 9\n", "--model: .* says nothing of 'smollm2'; give one of other"),
        (("--autoscale",), "[smollm2]\nttft_ms = 9\ntpot_ms = 9\nquantile = 0.3\n", r"--objectives: smollm2\.quantile"),
    ],
)
def test_bad_objectives_are_wrong_use_before_anything_starts(
    flags: tuple[str, ...], text: str | None, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "objectives.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        cli.run(["up", "--model", "smollm2", "--objectives", str(path), "--log-dir", str(tmp_path / "logs"), *flags])
    assert ended.value.code == cli.EXIT_USAGE
    assert re.match(f"pdmesh up: {told}", capsys.readouterr().err)
    assert not (tmp_path / "logs").exists()


def test_there_is_a_console_unless_nobody_wants_one(tmp_path: Path) -> None:
    assert _mesh_config(Options(), tmp_path).console_port == 8200
    assert _mesh_config(replace(Options(), console_port=0), tmp_path).console_port == 0
    assert _mesh_config(replace(Options(), console=False), tmp_path).console_port is None
    with pytest.raises(ValueError, match="console_port"):
        replace(Options(), console_port=70_000).validate()


def test_without_autoscaling_nothing_is_said_of_it(tmp_path: Path) -> None:
    text = "\n".join(_lines(AutoscaleOptions(), MODEL, tmp_path))
    assert "autoscaling is" not in text and DECISIONS_FILE not in text and "stop: Ctrl-C" in text


def test_every_process_is_told_of_the_collector(tmp_path: Path) -> None:
    config = _mesh_config(replace(Options(), otlp_endpoint="there:4317"), tmp_path)
    for plan in (*worker_plans(config, "redis://", [0]), *router_plans(config, "redis://")):
        assert plan.env["PDMESH_OTLP_ENDPOINT"] == "there:4317"
    usual = worker_plans(_mesh_config(Options(), tmp_path), "redis://", [0])
    assert all("PDMESH_OTLP_ENDPOINT" not in plan.env for plan in usual), "what the environment says is for them as well"


def test_a_collector_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="--otlp-endpoint"):
        parse(Options, ["--otlp-endpoint", "there"], {}, prog="pdmesh up")


def test_adapters_are_checked_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lora: 'sql' is not NAME=FOLDER"):
        check_adapters(("sql",), 0)
    with pytest.raises(ValueError, match=r"lora: sql: .* has no adapter_config\.json"):
        check_adapters((f"sql={tmp_path}",), 0)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("{}")
    check_adapters((f"sql={tmp_path}",), 2)
    flags = adapter_flags((f"sql={tmp_path}", f"b={tmp_path}"), 2)
    assert flags == ("--lora", f"sql={tmp_path.resolve()}", "--lora", f"b={tmp_path.resolve()}", "--max-loras", "2")
