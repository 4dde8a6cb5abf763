"""Figures on their way to a collector: a real one over gRPC."""

from __future__ import annotations

import asyncio
import threading

import pytest

from pdmesh.runtime.ports import reserve
from pdmesh.runtime.telemetry import metrics_otlp
from pdmesh.runtime.telemetry.config import TelemetryConfig
from pdmesh.runtime.telemetry.metrics import counter, histogram
from pdmesh.runtime.telemetry.open_metrics import open_metrics
from tests.otlp_metrics_receiver import OtlpMetricsReceiver
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.waiting import eventually

ASKED = counter("pdmesh.asked", "Questions", ("tenant",))
TOOK = histogram("gen_ai.took", "How long", (0.1, 1.0), ("gen_ai.request.model", "error.type"), unit="s")
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
RESOURCE = {"service.instance.id": "t-0"}


async def test_names_units_and_buckets_are_those_of_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_otlp.OtlpMetricsExporter.__init__, "__defaults__", ((), 0.05))
    with OtlpMetricsReceiver() as receiver:
        metrics = open_metrics(TelemetryConfig(otlp_endpoint=receiver.endpoint), "pdmesh-test", RESOURCE, {}, host="127.0.0.1")
        metrics.add(ASKED, 3, "a")
        for value, trace in ((0.05, ""), (0.5, TRACE), (0.6, ""), (7.0, "")):
            metrics.observe(TOOK, value, "m", "", trace=trace)
        assert await metrics.start() == "", "nobody asked for a port"
        found = await asyncio.to_thread(receiver.wait, lambda names: "gen_ai.took" in names)
        await metrics.stop()
    (point,) = found["gen_ai.took"].histogram.data_points
    assert found["gen_ai.took"].unit == "s"
    assert list(point.explicit_bounds) == [0.1, 1.0] and list(point.bucket_counts) == [1, 2, 1]
    assert point.count == 4 and point.sum == pytest.approx(8.15)
    assert {each.key: each.value.string_value for each in point.attributes} == {"gen_ai.request.model": "m"}
    assert [each.trace_id.hex() for each in point.exemplars] == [TRACE]
    (asked,) = found["pdmesh.asked"].sum.data_points
    assert asked.as_double == 3 and found["pdmesh.asked"].sum.is_monotonic
    assert asked.start_time_unix_nano < asked.time_unix_nano
    assert receiver.resources[-1]["service.name"] == "pdmesh-test" and receiver.resources[-1]["service.instance.id"] == "t-0"
    assert found["process_resident_memory_bytes"].unit == "By"


async def test_the_last_figures_are_sent_at_the_end() -> None:
    with OtlpMetricsReceiver() as receiver:
        metrics = open_metrics(TelemetryConfig(otlp_endpoint=receiver.endpoint), "s", RESOURCE, {}, host="127.0.0.1")
        await metrics.start()
        metrics.add(ASKED, 1, "a")
        await metrics.stop()
        assert receiver.wait(lambda names: "pdmesh.asked" in names)["pdmesh.asked"].sum.data_points[0].as_double == 1


async def test_a_collector_of_traces_alone_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_otlp.OtlpMetricsExporter.__init__, "__defaults__", ((), 0.02))
    with OtlpReceiver() as receiver:
        metrics = open_metrics(TelemetryConfig(otlp_endpoint=receiver.endpoint), "s", RESOURCE, {}, host="127.0.0.1")
        await metrics.start()
        await eventually(lambda: "metrics-otlp" not in {thread.name for thread in threading.enumerate()})
        await metrics.stop()


async def test_a_collector_that_is_away_stops_nobody() -> None:
    with reserve("127.0.0.1", 0, "port") as nobody:  # bound, and nobody listens
        endpoint = f"127.0.0.1:{nobody.getsockname()[1]}"
        metrics = open_metrics(TelemetryConfig(otlp_endpoint=endpoint), "s", RESOURCE, {}, host="127.0.0.1")
        await metrics.start()
        await asyncio.wait_for(metrics.stop(), 10)
