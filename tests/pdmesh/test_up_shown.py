"""What the autoscaler of `pdmesh up` tells of itself goes where the mesh's processes send theirs."""

from __future__ import annotations

import asyncio

import pytest

from pdmesh.commands.up_autoscale import Shown
from pdmesh.launcher.plan import LocalMeshConfig
from tests.otlp_metrics_receiver import OtlpMetricsReceiver
from tests.support.otlp_receiver import OtlpReceiver


@pytest.mark.parametrize("named_by", ["flag", "console", "environment"])
async def test_the_collector_gets_its_metrics_and_spans(named_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`console`: its address stands in the environment that processes are given, whatever the flag says."""
    metrics = OtlpMetricsReceiver()
    with OtlpReceiver(metrics=metrics) as receiver:
        env, flag = {}, receiver.endpoint if named_by == "flag" else "127.0.0.1:1"
        if named_by == "console":
            env = {"PDMESH_OTLP_ENDPOINT": receiver.endpoint}
        if named_by == "environment":
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{receiver.endpoint}")
            flag = ""
        shown = Shown.of(LocalMeshConfig(model="m", env=env, otlp_endpoint=flag))
        async with shown.open() as url:
            assert url == ""
            shown.tracing.begin("autoscale.decide", None, start_ns=1).end()
        found = await asyncio.to_thread(metrics.wait, lambda found: "pdmesh.autoscaler.events" in found)
        assert found and [span.name for span in receiver.spans] == ["autoscale.decide"]
        assert metrics.resources[0]["service.name"] == "pdmesh-autoscaler"


def test_without_a_collector_nothing_is_counted_or_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PDMESH_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    shown = Shown.of(LocalMeshConfig(model="m"))
    assert not shown.metrics.metrics.is_on and not shown.tracing.is_on
