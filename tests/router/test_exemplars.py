"""From a slow bucket to its trace: the id in a bucket is that of a trace that the collector got."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pdmesh.runtime.telemetry.config import TelemetryConfig
from tests.router.mesh import request, running_mesh
from tests.runtime.telemetry.scrape import scrape
from tests.support.otlp_receiver import OtlpReceiver

BUCKET = "gen_ai_server_time_to_first_token_seconds_bucket"


@pytest.mark.parametrize(("share", "is_missed", "is_named"), [(1.0, False, True), (0.0, True, True), (0.0, False, False)])
async def test_buckets_name_traces_that_are_sent(
    model_folder: Path, tmp_path: Path, share: float, is_missed: bool, is_named: bool
) -> None:
    """Sampled, or kept because an objective was missed; never one that nobody can look at."""
    (tmp_path / "objectives.toml").write_text("[tiny]\nttft_ms = 60000\ntpot_ms = 60000\n")
    with OtlpReceiver() as receiver:
        telemetry = TelemetryConfig(otlp_endpoint=receiver.endpoint, metrics_port=0, trace_share=share)
        async with running_mesh(model_folder, telemetry=telemetry, objectives=str(tmp_path / "objectives.toml")) as mesh:
            asked = request()
            if is_missed:
                asked.options.slo_tpot_ms = 1
                mesh["p0"].prefill_plan = ["fail"]
                asked.options.slo_ttft_ms = 1
            await mesh.generate(asked)
            page = await asyncio.to_thread(scrape, mesh.router.metrics_url)
            named = {s.exemplar.labels["trace_id"] for s in page.samples if s.name == BUCKET and s.exemplar is not None}
            assert bool(named) == is_named
            if named:
                await asyncio.to_thread(receiver.wait, lambda spans: named <= {span.trace_id for span in spans})
