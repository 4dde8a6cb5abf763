"""The files that say where processes show their metrics, and the ports that they get."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdmesh.commands.status import metrics_lines
from pdmesh.launcher.local_state import MetricsFiles, Target, shown
from pdmesh.launcher.plan import LocalMeshConfig, router_plans, worker_plan, worker_plans
from tests.support.terminal import plain

ROUTER = Target("router-0", "router", ("http://127.0.0.1:9464/metrics", "http://127.0.0.1:9465/metrics"))
WORKER = Target("decode-0", "worker", ("http://127.0.0.1:9470/metrics",))


def _port(argv: tuple[str, ...]) -> str | None:
    return argv[argv.index("--metrics-port") + 1] if "--metrics-port" in argv else None


def test_processes_have_ports_one_after_the_other() -> None:
    config = LocalMeshConfig("m", num_routers=2, router_processes=2, num_prefill=1, num_decode=2, metrics_port=9464)
    assert [_port(plan.argv) for plan in router_plans(config, "redis://")] == ["9464", "9466"]
    assert config.autoscaler_metrics_port == 9468
    assert [_port(plan.argv) for plan in worker_plans(config, "redis://", [0])] == ["9469", "9470", "9471"]
    assert _port(worker_plan(config, "decode-7", "redis://", [0]).argv) == "0"


@pytest.mark.parametrize(("port", "shown_as"), [(None, None), (0, "0")])
def test_none_or_any(port: int | None, shown_as: str | None) -> None:
    config = LocalMeshConfig("m", metrics_port=port)
    plans = [*router_plans(config, "redis://"), *worker_plans(config, "redis://", [0])]
    assert {_port(plan.argv) for plan in plans} == {shown_as} and config.autoscaler_metrics_port == port


def test_a_port_must_leave_one_for_each_process() -> None:
    with pytest.raises(ValueError, match="metrics_port"):
        LocalMeshConfig("m", metrics_port=65534).validate()


def test_prometheus_and_status_find_what_there_is(tmp_path: Path) -> None:
    files = MetricsFiles(tmp_path, tmp_path / "cache")
    files.tell([ROUTER, WORKER, Target("prefill-0", "worker", ())], ["10.0.0.1:5", "10.0.0.1:6"])
    found = json.loads(files.targets_path.read_text())
    assert [each["labels"]["instance"] for each in found] == ["router-0-0", "router-0-1", "decode-0"]
    assert found[2] == {"targets": ["127.0.0.1:9470"], "labels": {"job": "pdmesh", "role": "worker", "instance": "decode-0"}}
    told = shown(["10.0.0.1:6"], tmp_path / "cache")
    assert told is not None and told["targets"] == found
    assert any("decode-0" in line and "http://127.0.0.1:9470/metrics" in line for line in plain(*metrics_lines(told)))
    assert shown(["10.9.9.9:1"], tmp_path / "cache") is None, "another mesh"
    files.remove()
    assert shown(["10.0.0.1:6"], tmp_path / "cache") is None and not files.targets_path.exists()


def test_a_worker_that_goes_is_a_target_no_more(tmp_path: Path) -> None:
    files = MetricsFiles(tmp_path, tmp_path / "cache")
    files.tell([ROUTER, WORKER], ["10.0.0.1:5"])
    files.tell([ROUTER], [])
    assert len(json.loads(files.targets_path.read_text())) == 2
