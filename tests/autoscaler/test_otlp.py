"""`python -m pdmesh.autoscaler` as a process: metrics and decisions arrive at a collector, like those of other services."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from pdmesh.autoscaler.loop_history import NAME
from pdmesh.runtime.child import ManagedProcess
from tests.autoscaler.loop_scene import usual_router
from tests.autoscaler.routers import ToldRouter, serving
from tests.otlp_metrics_receiver import OtlpMetricsReceiver
from tests.support.otlp_receiver import OtlpReceiver

PERIOD_S = 0.2


async def test_a_process_sends_metrics_and_decisions_to_the_collector(tmp_path: Path) -> None:
    (tmp_path / "objectives.toml").write_text("[m]\nttft_ms = 500\ntpot_ms = 50\nquantile = 0.9\n")
    metrics = OtlpMetricsReceiver()
    with OtlpReceiver(metrics=metrics) as receiver:
        async with serving(router := usual_router()):
            load = asyncio.create_task(_load(router))
            flags = ["--routers", router.address, "--objectives", str(tmp_path / "objectives.toml"), "--port", "0"]
            flags += ["--period-s", str(PERIOD_S), "--window-s", "1", "--otlp-endpoint", receiver.endpoint]
            process = ManagedProcess("autoscaler", [sys.executable, "-m", "pdmesh.autoscaler", *flags])
            try:
                await process.start(60)
                spans = await asyncio.to_thread(receiver.wait, lambda spans: bool(spans), 60)
            finally:
                await process.stop(20)
                load.cancel()
        # The last figures come when it ends.
        shown = await asyncio.to_thread(metrics.wait, lambda shown: "pdmesh.autoscaler.decisions" in shown)
    (root, *_) = spans
    assert root.name == NAME and root.parent_id == "" and root.attributes["pdmesh.autoscale.decode.reason"]
    assert {event.name for event in root.events} == {"decided", "scale"}
    assert {"pdmesh.autoscaler.wanted", "pdmesh.autoscaler.decision.age", "pdmesh.info"} <= shown.keys()
    services = {root.resource["service.name"], *(each["service.name"] for each in metrics.resources)}
    assert services == {"pdmesh-autoscaler"} and root.process == metrics.resources[0]["service.instance.id"] != ""


async def _load(router: ToldRouter) -> None:
    """More than one worker of each kind can do."""
    while True:
        router.more(20, seconds=PERIOD_S)
        await asyncio.sleep(PERIOD_S)
